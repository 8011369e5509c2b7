"""The shared data types: mesh, layout, graph, problem, plan, program. Frozen data, no torch."""
