"""What servers take of adapters, and experts that have an adapter each."""
