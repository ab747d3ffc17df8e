"""Files that anybody may have written."""
