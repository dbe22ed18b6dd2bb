"""What a run will need and how fast it will be, told before it starts; no weights are read for it."""
