"""An estimate as the command prints it, and what the allocator of a device reserves for it."""
