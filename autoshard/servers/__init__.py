"""Parameter servers: the request, the plan of workers and servers, and the files of their package."""
