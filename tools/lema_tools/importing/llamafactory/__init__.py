"""Runs of llamafactory."""
