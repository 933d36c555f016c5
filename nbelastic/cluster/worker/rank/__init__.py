"""Program of a rank's own process, and of the rank server that forks it."""
