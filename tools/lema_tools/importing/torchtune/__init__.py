"""Runs of torchtune."""
