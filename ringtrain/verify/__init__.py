"""``ringtrain verify``: do N processes train what one process trains?"""
