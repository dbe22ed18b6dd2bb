"""A model that is open: made once from its files, and as often as memory is spent anew."""
