"""What ringtrain is measured against: plain scripts that hold none of its code."""
