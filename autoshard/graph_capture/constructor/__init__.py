"""How a constructor initialises parameters and buffers, as the calls that do it."""
