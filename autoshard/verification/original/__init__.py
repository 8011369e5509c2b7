"""The original model in float64: batches, random numbers, optimizer steps."""
