"""Training of a model's own weights while its layers stream.
docs/internals/full-training.md describes the folder."""
