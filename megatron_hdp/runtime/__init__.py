"""What a rank needs to execute a plan: rings, attention kernels, the token-sum loss, agreement."""
