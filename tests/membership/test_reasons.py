"""Each reason is a sentence that says what failed, and why."""

from __future__ import annotations

import pytest

from nbelastic import messages as ev
from nbelastic import messages as why
from nbelastic.membership import Machine

ONE, TWO = why.RankId(0, 0, "tcp://A0"), why.RankId(5, None, "tcp://B0")
GONE = why.Lost(ONE, ev.LossReason.WORKER_GONE)
STALLED = why.Lost(ONE, ev.LossReason.STALLED, seconds=20.0)
RAISED = why.Lost(TWO, ev.LossReason.RAISED, "ValueError: x")
GAVE_UP = why.GenerationLeft(ONE, True, "loss is nan")
SAME = why.Tally(why.Counted.SAME_WORKER, 4, 4, 5)
SENTENCES = [
    (GONE, "rank 0 on tcp://A0: its worker left the cluster"),
    (RAISED, "start 5 on tcp://B0: ValueError: x"),
    (why.Exclusion("worker", "tcp://A0", None), "worker tcp://A0 is excluded for good"),
    (why.Exclusion("host", "A", 10.24), "host A is excluded for 10.2 s"),
    (why.Exclusion("host", "A", 40.0, 3), "host A is excluded for 40.0 s, 3 times in a row"),
    (GAVE_UP, "rank 0 on tcp://A0: loss is nan"),
    (why.GenerationLeft(ONE, False), "rank 0 on tcp://A0: left its generation unasked"),
    (
        why.Notice(why.NoticeSource.AZURE, name="w3", revoked=True),
        "worker w3 stays: Azure has revoked its notice",
    ),
    (
        why.Notice(why.NoticeSource.AWS, "terminate", 114.2, "w3"),
        "worker w3 leaves in 1:54: AWS spot (terminate)",
    ),
    (
        why.Notice(why.NoticeSource.AWS, "rebalance", name="w3", soft=True),
        "worker w3 leaves once another is ready: AWS spot (rebalance)",
    ),
    (why.Sharing(3, 6, ("resnet", "bert"), 2), "3 of 6 slots: shares with resnet, bert"),
    (why.Sharing(0, 6, ("a", "b", "c"), 5), "0 of 6 slots: shares with a, b, c and 2 more"),
    (
        why.Sharing(1, 6, ("bert",), 1, suspended=True),
        "suspended: 1 of 6 slots for its state, while others go first: bert",
    ),
    (
        why.Sharing(0, 6, ("bert",), 1, suspended=True),
        "suspended: its state is in its checkpoint, while others go first: bert",
    ),
    (SAME, "the same worker was lost 4 times in a row at commit 5; the limit is 4"),
    (
        why.NoNewCommit((GONE,), SAME, "B0 was killed by signal 11 (SIGSEGV)"),
        f"{GONE} ({SAME}, without progress; before that, B0 was killed by signal 11 (SIGSEGV))",
    ),
    (why.NoNewCommit((GAVE_UP,), SAME, "loss is nan"), f"{GAVE_UP} ({SAME}, without progress)"),
    (
        why.Tally(why.Counted.SAME_WORKER, 4, 4, ev.FRESH),
        "the same worker was lost 4 times in a row before the first generation; the limit is 4",
    ),
]

LONG = [
    (why.NONE_STAYS, ["no checkpoint", "Pass checkpoint="]),
    (why.CutOff(ONE, "it was killed"), ["rank 0 was cut off", "it was killed\n", "exit_timeout"]),
    (
        why.RankError("ValueError: x"),
        ["a rank raised ValueError: x\n", "whose rank raises"],
    ),
    (why.RanksAt("late: {ranks}.", (TWO,) * 6), ["on tcp://B0; start", "B0; and 2 more."]),
    (why.PLACES_DIFFER, ["different places", "same order"]),
    (why.PastFirstLoop(2), ["no rank can join any more", "elastic loop 2", "into one"]),
    (why.PastFirstLoop(2, 1, 3), ["1 of at least 3 ranks are left, and none can join"]),
    (why.WEIGHTS_DIFFER, ["different parameters\n", "not wrapped", "hvd.elastic.KerasState("]),
]


@pytest.mark.parametrize(("reason", "sentence"), SENTENCES, ids=lambda each: type(each).__name__)
def test_a_reason_as_a_sentence(reason: why.Reason, sentence: str) -> None:
    assert str(reason) == sentence


@pytest.mark.parametrize(("reason", "facts"), LONG, ids=lambda each: type(each).__name__)
def test_a_long_sentence_has_the_facts(reason: why.Reason, facts: list[str]) -> None:
    assert [fact for fact in facts if fact not in str(reason)] == []


def test_all_reasons_are_here_and_survive_a_message() -> None:
    reasons = [reason for reason, _ in [*SENTENCES, *LONG]]
    assert set(why.Reason.__subclasses__()) == {*map(type, reasons)}
    assert [ev.decode(ev.encode(reason), ev.AnyReason) for reason in reasons] == reasons


@pytest.mark.parametrize("loss", ev.LossReason)
def test_each_loss_has_words(loss: ev.LossReason) -> None:
    words = str(why.Lost(ONE, loss, "detail", 3.0))
    assert words.startswith("rank 0 on tcp://A0: ")
    assert "{" not in words


@pytest.mark.parametrize("unused", ev.UnusedReason)
def test_each_unused_worker_has_words(unused: ev.UnusedReason) -> None:
    assert "{" not in ev.UnusedWorker("a", unused, "detail").why


def test_ways_of_tensors() -> None:
    assert [ev.over(backend) for backend in ("", "solo", "pygloo")] == ["", "", "over pygloo"]
    assert ev.over("hierarchical") == "over shared memory and Gloo"
    assert ev.over("cuda_ipc") == "over CUDA IPC"
    assert ev.over("nccl") == "over NCCL"


def test_the_failed_operations_of_others_are_no_causes_beside_the_loss() -> None:
    roster = Machine(ev.Limits()).roster
    roster.reset_causes += [GAVE_UP]
    assert roster.causes() == (GAVE_UP,)
    roster.reset_causes += [RAISED, GAVE_UP, RAISED]
    assert roster.causes() == (RAISED,)
