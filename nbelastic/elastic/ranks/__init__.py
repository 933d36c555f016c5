"""Surroundings of a rank: its session, generations, warm-up, measurements."""
