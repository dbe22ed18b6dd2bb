"""What `lema init` finds out: the machine, the model that a name means, and what rows are."""
