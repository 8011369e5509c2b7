"""Large problems of pairs: presolve, bounds by messages, large moves, sections by integer programming."""
