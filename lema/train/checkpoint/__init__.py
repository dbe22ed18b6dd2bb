"""Checkpoints: what they hold, which one a run goes on from, and whether it is still the same run.
docs/internals/checkpoints.md describes the folder."""
