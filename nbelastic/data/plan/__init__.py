"""Plan of an epoch: rows and rank of each micro-batch; pure.

It depends on seeds, sizes and the times that ranks have told each other, so each rank computes the
same plan by itself. The linter refuses torch, clocks and threads here.
"""
