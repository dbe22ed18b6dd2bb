"""Whether a run goes well: it learns, its numbers are finite, and it moves."""
