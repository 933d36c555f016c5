"""Process sets, names and joined ranks: members and order of operations."""
