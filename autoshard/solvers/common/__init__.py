"""Parts that all solvers share: options, clock, result, validation, local search, memory repair."""
