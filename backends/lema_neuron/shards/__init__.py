"""The adapter shards of optimum-neuron: read, and written; the core finds them in the group `lema.shard_formats`."""
