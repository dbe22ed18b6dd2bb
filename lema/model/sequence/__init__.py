"""A sequence that goes through each layer in chunks: their calls, and the cache between them."""
