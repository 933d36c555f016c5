"""In a rank's own process, which its rank server has forked."""
