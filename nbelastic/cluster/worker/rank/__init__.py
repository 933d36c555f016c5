"""In a rank's own process: its rank server's fork, or a new one, with the training function."""
