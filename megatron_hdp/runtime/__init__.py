"""Execution of a plan's micro-batches on one rank: rings, attention kernels and the token-sum loss."""
