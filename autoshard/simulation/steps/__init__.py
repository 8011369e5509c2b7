"""Simulates a whole step on stages and on places."""
