"""The least memory that every program of a formulation needs: a bound on simulated peaks."""
