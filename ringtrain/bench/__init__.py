"""``ringtrain bench``: how fast ringtrain is, against others, in rounds where every contender runs once."""
