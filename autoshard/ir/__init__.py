"""The nouns that all else reads and writes: mesh, layout, graph, problem, plan, program. Frozen data, no torch."""
