"""Collective operations in the memory of GPUs that the ranks of one host can all read."""
