"""Files that anybody may have written, or may read at any moment."""
