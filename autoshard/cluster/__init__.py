"""Hardware profiles: devices, links as a graph, and the constants of the cost formulas."""
