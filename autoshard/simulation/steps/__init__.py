"""A whole step: its parts simulated, on stages and on places."""
