"""A lower bound on the memory of every program of a formulation."""
