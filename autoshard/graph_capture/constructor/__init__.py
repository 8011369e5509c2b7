"""What building the model computes: the start of each parameter and buffer, as the calls that make it."""
