"""``elastic.fit`` on real workers that are killed, leave and join."""

from __future__ import annotations

import pytest

from nbelastic.errors import RankFailed
from tests.keras.conftest import BACKEND
from tests.keras.training import Fault, Training
from tests.support.clusters import kinds, sizes, until

pytestmark = pytest.mark.slow


def check(results, work):
    """Check what must be true of every training: ranks agree, and no sample was missed."""
    first = results[0]
    for each in results:
        for name in ("digest", "history", "epochs", "wait", "plateau", "best", "told"):
            assert each[name] == first[name], name
        assert each["begins"] == 1
        assert each["own"] == (True, True)
    assert first["epochs"] == list(range(len(first["epochs"]))) == first["told"]
    lines = [line.split(",")[0] for line in (work.marks / "log.csv").read_text().splitlines()]
    assert lines == ["epoch", *map(str, first["epochs"])]
    for seen in first["history"]["seen"] if not work.stops else ():
        least, most = seen % 1000, seen // 1000
        assert least == 1
        assert most <= 2  # shares of different lengths are padded


def test_it_trains(keras_crew, tmp_path):
    work = Training(tmp_path)
    job = keras_crew.fit(work, np=3)
    check(job.results(), work)
    assert sizes(job) == [3]
    assert all(seen == 1001 for seen in job.results()[0]["history"]["seen"])
    assert (tmp_path / "best.keras").exists()


def test_a_killed_worker(keras_crew, tmp_path):
    work = Training(
        tmp_path, faults=(Fault(1, 1, 2), Fault(0, 2, 1, "whole")), epochs=5, patience=9
    )
    job = keras_crew.fit(work, np=3, min_np=2)
    check(job.results(), work)
    assert sizes(job) == [3, 2, 3]
    assert sum(each["newcomer"] for each in job.results()) == 1
    assert job.results()[0]["epochs"] == [0, 1, 2, 3, 4]
    assert "skip_synchronize" not in str(job.logs()), "Keras' own step is no mistake of the user's"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_killed_at_the_end_of_an_epoch(keras_crew, tmp_path, rank):
    work = Training(tmp_path, faults=(Fault(rank, 1, 0, "end"),), patience=9)
    job = keras_crew.fit(work, np=2, min_np=1)
    check(job.results(), work)
    assert sizes(job)[:2] == [2, 1]


@pytest.mark.backends("torch")
def test_with_a_loader_kills_and_a_join_change_nothing(keras_crew, tmp_path):
    """Bits of the model, EarlyStopping, ReduceLROnPlateau and History as without any fault."""
    marks = [tmp_path / name for name in ("undisturbed", "disturbed")]
    for each in marks:
        each.mkdir()
    plain = Training(marks[0], loader=True, epochs=8)
    expected = keras_crew.fit(plain, np=3).results()[0]
    faults = (
        *(Fault(1, 0, 2), Fault(0, 1, 1, "whole"), Fault(0, 2, 0), Fault(1, 2, 2)),
        Fault(0, 3, 1, "whole"),
    )
    work = Training(marks[1], faults, loader=True, epochs=8)
    job = keras_crew.fit(work, np=3, min_np=1)
    check(job.results(), work)
    found = job.results()[0]
    assert [event.kind for event in job.history].count("lost") == 3
    assert max(sizes(job)[1:]) > min(sizes(job))  # some have joined
    assert found["digest"] == expected["digest"]
    assert found["epochs"] == expected["epochs"]
    for name in ("wait", "plateau"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert found["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        assert found["history"][name] == pytest.approx(values, rel=1e-5), name


def test_ranks_leave_and_join_without_a_fault(keras_crew, tmp_path):
    """With a DataLoader and a train_step of the user's; nothing is rolled back."""
    faults = (Fault(0, 1, 1, "wait"), Fault(0, 2, 1, "wait"))
    work = Training(tmp_path, faults, epochs=4, patience=9, own_step=True, loads=BACKEND == "torch")
    job = keras_crew.fit(work, np=3, min_np=1, block=False)
    for number, ranks in enumerate((2, 3)):
        until((tmp_path / f"fault-{number}").exists, "the rank waits", timeout=60)
        job.scale(max_np=ranks)
    check(job.results(), work)
    assert sizes(job) == [3, 2, 3]
    assert "lost" not in kinds(job)


def test_all_ranks_stop_where_one_does(keras_crew, tmp_path):
    work = Training(tmp_path, faults=(Fault(1, 1, 0, "stop"),), epochs=9, patience=9)
    job = keras_crew.fit(work, np=2)
    check(job.results(), work)
    assert job.results()[0]["epochs"] == [0, 1]


def test_an_error_of_the_user(keras_crew, tmp_path):
    work = Training(tmp_path, faults=tuple(Fault(rank, 1, 1, "raise") for rank in range(3)))
    job = keras_crew.fit(work, np=3, block=False)
    with pytest.raises(RankFailed, match="a mistake of the user's"):
        job.results()
    assert "restarted" not in kinds(job)
