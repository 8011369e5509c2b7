"""A simulated step in other tools' formats: the profiler's trace, Chakra execution traces, a memory snapshot."""
