"""The memory limit by multipliers, and bounds and plans where exact tables are too large."""
