"""A simulated step in other tools' formats: profiler traces, Chakra execution traces, memory snapshots."""
