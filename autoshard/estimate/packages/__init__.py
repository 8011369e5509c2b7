"""A step of the packages that `autoshard plan` writes, by the code that searches and prices plans."""
