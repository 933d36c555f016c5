"""Collective operations over NCCL: between GPUs of one host or several."""
