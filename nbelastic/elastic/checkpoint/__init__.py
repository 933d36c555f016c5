"""Checkpoints: commits written to files in the background, and read again."""
