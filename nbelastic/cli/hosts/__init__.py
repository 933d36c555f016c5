"""Hosts: discovery, changes, and a cluster with a worker for each slot."""
