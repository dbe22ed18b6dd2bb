"""Runs of axolotl."""
