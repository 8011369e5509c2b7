"""A trace of a real run beside the predicted timeline: by stream, operator and collective, and where they differ."""
