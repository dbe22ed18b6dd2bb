"""Verbs of the `lema` command that stand on the core's public names alone: each is a module here
and an entry point.
"""
