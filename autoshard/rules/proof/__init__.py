"""Rules are proved: shards of random inputs, run, combined and compared; rules by experiment."""
