"""The text of an estimate, and the memory that a device's allocator reserves."""
