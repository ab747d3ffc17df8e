"""Measurements that need more than ``ringtrain bench`` may ask of a user's machine."""
