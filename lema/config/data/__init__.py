"""Settings of data sets, and of how rows are read."""
