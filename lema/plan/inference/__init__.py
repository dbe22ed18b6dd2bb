"""What passes without a backward take of memory: batches of texts with their keys and values,
rows that are scored.
"""
