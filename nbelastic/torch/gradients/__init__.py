"""Gradients from backward to step: ``DistributedOptimizer`` and its reduction."""
