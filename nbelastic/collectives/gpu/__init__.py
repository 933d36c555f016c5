"""Devices, and the communicator for sums on GPUs, in front of the host's."""
