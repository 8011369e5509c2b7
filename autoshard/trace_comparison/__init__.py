"""Compares a trace of a real run with the predicted timeline, by stream, operator and collective."""
