"""Devices, and the communicator that reduces there, in front of the host's."""
