"""What a model does without a backward: texts, in batches."""
