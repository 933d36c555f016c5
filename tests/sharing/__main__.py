"""Have many jobs come and go: ``python -m tests.sharing 50000``."""

import argparse

from .test_stream import play

parser = argparse.ArgumentParser(prog="python -m tests.sharing", description=__doc__)
parser.add_argument("number", type=int, help="how many jobs")
parser.add_argument("--seed", type=int, default=0, help="the stream's seed")
options = parser.parse_args()
cluster = play(options.seed, options.number)
print(f"{cluster.number} arrivals and as many departures in {cluster.now:.0f} s of virtual time")
