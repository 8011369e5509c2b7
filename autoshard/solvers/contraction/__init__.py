"""Large problems of pairs made small: contraction with its way back, and the costs and choices of what is left."""
