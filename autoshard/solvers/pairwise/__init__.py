"""Large problems of pairs: bounds by messages, large moves, sections by integer programming."""
