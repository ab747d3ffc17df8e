"""How fast ringtrain is, against others, in rounds where every contender runs once."""
