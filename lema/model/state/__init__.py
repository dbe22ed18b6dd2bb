"""What modules hold outside of their parameters and change when they are called."""
