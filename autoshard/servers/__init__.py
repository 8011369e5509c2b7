"""Parameter servers: what is asked of them, the plan of a worker and its servers, and the files of their package."""
