"""Well-known plans as restrictions of a problem: data parallelism, FSDP, Megatron, combinations."""
