"""In which order the parts of stages and places run, and what each gives the next."""
