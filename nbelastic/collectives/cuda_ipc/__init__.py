"""Collective operations in GPU memory that all ranks of a host can read."""
