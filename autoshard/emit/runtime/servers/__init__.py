"""Parameter servers: the work of servers and workers, and the dispatch of shares, independent of the transport."""
