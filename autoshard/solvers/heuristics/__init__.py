"""Sharding propagation, recursive bisection, random plans; and brute force, the oracle."""
