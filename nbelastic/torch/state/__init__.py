"""State of training with PyTorch: capture, commits, and comparison of structures."""
