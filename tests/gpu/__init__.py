"""The training command on one GPU; the same tests run on a CPU where that makes sense."""
