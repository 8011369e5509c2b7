"""The sharded model on its rank: `parallelize` and `shard`."""
