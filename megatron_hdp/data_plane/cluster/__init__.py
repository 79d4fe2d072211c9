"""One node's part of a Ray cluster: made for a job and ended with it, or joined."""
