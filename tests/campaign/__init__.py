"""Random programs of ranks that do not always do the same: each ends, and rightly.

``CAMPAIGN=FIRST:COUNT pytest tests/campaign`` plays so many programs, the first of this seed.
"""
