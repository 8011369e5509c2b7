"""A step of a standard transformer from its numbers alone: `step.estimate(Transformer(...), TrainingRun(...), hardware)`."""
