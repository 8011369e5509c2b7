"""Prediction of a standard transformer's step: `estimate(Transformer(...), TrainingRun(...), hardware)`."""
