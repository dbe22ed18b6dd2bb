"""Phases: which weights train when, on what data and for how long, and the run that goes through
them. The last part of docs/internals/full-training.md describes the folder."""
