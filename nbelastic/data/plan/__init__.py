"""Plan of an epoch: rows and rank of each micro-batch; pure.

It depends on seeds and sizes, and on what ranks have agreed on, so each rank computes the
same plan by itself. The linter refuses torch, clocks and threads here.
"""
