"""Files, streams and errors of the operating system, and the locations of the data folders."""
