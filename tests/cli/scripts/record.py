"""The log of ``train.py``, a module of the script's folder that travels with it."""

import json


def note(path, epoch, size):
    """Add a line on an epoch, once."""
    with open(path, "a+") as log:
        log.seek(0)
        if epoch not in [json.loads(line)["epoch"] for line in log]:
            print(json.dumps({"epoch": epoch, "size": size}), file=log, flush=True)
