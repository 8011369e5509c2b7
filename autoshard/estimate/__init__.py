"""A step of a standard transformer from its numbers: `estimate(Transformer(...), TrainingRun(...), hardware)`."""
