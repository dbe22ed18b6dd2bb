"""What a model does without a backward: texts in batches, and the tasks of an evaluation harness."""
