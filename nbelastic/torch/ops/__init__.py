"""Horovod's collective operations on tensors and objects."""
