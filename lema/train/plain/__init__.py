"""A plain run: one stage over one data set, by `lema train` and `LemaTrainer.fit`."""
