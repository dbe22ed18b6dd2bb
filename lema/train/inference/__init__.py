"""What a model does without a backward: texts in batches, and how likely given ones are."""
