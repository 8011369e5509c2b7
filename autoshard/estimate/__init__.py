"""A step of a standard transformer from its sizes: `estimate(Transformer(...), TrainingRun(...), hardware)`."""
