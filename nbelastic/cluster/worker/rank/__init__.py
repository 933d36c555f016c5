"""Programs of a rank's own process and of its rank server."""
