"""The nouns that everything else reads and writes: mesh, layout, graph, problem, plan, program. Frozen data, no torch."""
