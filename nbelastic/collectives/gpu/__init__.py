"""Devices, and the communicator that reduces on them in front of the host's."""
