import json
import subprocess
import sys

FAULTS = 200


def test_200_ranks_killed_or_stopped_inside_collectives_hang_and_corrupt_nobody():
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
    assert told["steps"] > FAULTS, "they were struck before they began"
