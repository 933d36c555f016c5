"""Random programs of ranks that do not always do the same: each ends, and rightly.

``python -m tests.campaign N`` plays N programs on each kind of communicator; a number of a seed
after it begins there. ``python -m tests.campaign 1 SEED`` plays one that failed again.
"""
