"""Steps around one solve: objectives, the memory limit, mesh shapes, plans worth simulating."""
