"""Communicators over Gloo: torch's own build, or the package ``pygloo``."""
