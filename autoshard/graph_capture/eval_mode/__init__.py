"""Whether a model's evaluation forward differs from its training forward by more than dropout."""
