"""Which rows come when: orders of an epoch, and how the rows of data sets interleave."""
