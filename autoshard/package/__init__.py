"""The files of a package, and the folder that they are written to."""
