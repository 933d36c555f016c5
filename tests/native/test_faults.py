import json
import subprocess
import sys

FAULTS = 200


def test_200_killed_or_stopped_ranks_hang_or_corrupt_no_other():
    """All others hear of it, no sum is wrong, no two ranks are apart by more than a step."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.native.campaign", str(FAULTS), "100"],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    print(told)
    assert sum(told["faults"].values()) == FAULTS
    assert told["steps"] >= FAULTS
