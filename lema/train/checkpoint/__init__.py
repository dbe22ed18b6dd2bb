"""Checkpoints: their contents, the one from which a run continues, and whether it is still the same
run. docs/internals/checkpoints.md describes the folder."""
