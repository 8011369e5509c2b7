"""Files, streams and errors of the operating system, and where the data folders lie."""
