"""The notation of rules, and what follows from it: factors, strategies, the layouts of operands and results."""
