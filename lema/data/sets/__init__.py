"""Data sets: their files, the parts of them that are read, and how their rows are read."""
