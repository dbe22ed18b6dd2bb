"""Runs of trl."""
