"""Proves rules on shards of random inputs, and finds rules by experiment."""
