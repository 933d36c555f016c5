"""Rendezvous of the ranks of a generation: server, client and authentication."""
