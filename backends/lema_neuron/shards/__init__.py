"""Formats of adapter shards, which the core finds in the group `lema.shard_formats`: LEMA's, and
optimum-neuron's.
"""
