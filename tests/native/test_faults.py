import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("faults", [24, pytest.param(2000, marks=pytest.mark.nightly)])
def test_ranks_that_are_killed_or_stopped_hang_or_corrupt_no_other(faults):
    """All others hear of it, no sum is wrong, no two ranks are apart by more than a step."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.native.campaign", str(faults), "100"],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    print(told)
    assert sum(told["faults"].values()) == faults
    assert told["steps"] >= faults
