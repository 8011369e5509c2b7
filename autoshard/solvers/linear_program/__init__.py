"""The problem as a linear program, and HiGHS behind a few functions."""
