"""Whether a run learns anything."""
