"""The split model on its rank: `parallelize` and `shard`."""
