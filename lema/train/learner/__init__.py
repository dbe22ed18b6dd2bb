"""A model that trains several adapters at once, for callers who bring rows and losses of their
own.
"""
