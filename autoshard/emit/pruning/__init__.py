"""What a plan does not need is left out of its package."""
