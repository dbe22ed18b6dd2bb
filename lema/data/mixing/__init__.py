"""Which rows come when: orders of an epoch, shares of several data sets, and how they interleave."""
