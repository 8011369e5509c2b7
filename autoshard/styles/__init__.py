"""Plans that people know by name, as what they leave of a problem: data parallelism, FSDP, Megatron, both."""
