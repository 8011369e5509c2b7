"""The notation of rules and its consequences: factors, strategies, layouts of operands and results."""
