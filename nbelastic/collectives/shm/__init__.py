"""Communicator over shared memory, for ranks on one host."""
