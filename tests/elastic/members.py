"""Members of a world that never changes, who keep checkpoints as those of a job do."""

import contextlib
import itertools
import threading
from pathlib import Path

from nbelastic.collectives import SoloCommunicator
from nbelastic.elastic.checkpoint.files import CheckpointSpec
from nbelastic.elastic.checkpoint.manager import CheckpointManager
from nbelastic.elastic.ranks.context import activate
from nbelastic.elastic.ranks.runtime import RankRuntime, RankSpec
from nbelastic.elastic.ranks.session import Session
from nbelastic.errors import Leaving
from nbelastic.messages import FRESH, LoopDone, Member, Place, Plan, RankReady, Slot
from tests.support.world import run_ranks


def make_member(
    context, url, *, run="a", every=1, resume=False, version=FRESH, notes=None, patience=60.0
):
    """Make a member of a static world look like a session, and return the plan of that world."""
    context.spec = RankSpec(
        job="job",
        start=context.rank,
        place=Place(context.rank, context.size, 0, 1, 0, 1),
        bind="127.0.0.1",
        checkpoint=CheckpointSpec(
            url=str(url), run=run, every=every, resume=resume, patience=patience
        ),
    )
    context.moves = 0
    context.notes = [] if notes is None else notes
    context.note = lambda _, detail: context.notes.append(detail)
    slots = [Slot(f"S{rank}", f"tcp://{rank}", str(rank), "host") for rank in range(context.size)]
    members = tuple(Member(rank, slot, ("", 0), version) for rank, slot in enumerate(slots))
    return Plan(context.generation, members, loop=1)


def begin(context, state, checkpoints, plan):
    """Do what the elastic loop does once a generation has formed."""
    resized, behind = checkpoints.begin(plan)
    state.align(behind)
    state.save()
    context.version = max(plan.version, checkpoints.commits)
    checkpoints.begun = True
    return resized


@contextlib.contextmanager
def keeping(context, state, url, loop=1, **options):
    """Keep checkpoints of a state, in a loop whose generation has formed."""
    plan = make_member(context, url, **options)
    with contextlib.suppress(Leaving), CheckpointManager(context, state, loop) as checkpoints:
        begin(context, state, checkpoints, plan)
        yield checkpoints


def written(checkpoints):
    """Wait until nothing is under way."""
    checkpoints._writer.wait()


def job(url, build, train=None, **options):
    """Have a job of one rank build a state, and train and commit it, unless there is no `train`.

    Returns the state, the job's notes, and what `train` has returned.
    """

    def rank(context):
        state, result = build(), None
        with keeping(context, state, url, **options) as checkpoints:
            if train is not None:
                result = train(state)
                state.commit()
                written(checkpoints)
                checkpoints.finish()
        return state, context.notes, result

    return run_ranks(1, rank)[0]


def resumed(url, build, train=None, *, run="z", resume=True, **options):
    """Have a job go on from what is at `url`; see :func:`job`."""
    return job(url, build, train, run=run, resume=resume, **options)


def one_rank(function, plans=(), start=0, **spec):
    """Call a function as a rank of a job that has no others; return what it has reported.

    Before its first event is the memory of its first step. Each plan has a version, and the starts
    of its members; by default they are this rank's.
    """
    told, left, numbers = [], iter(plans), itertools.count(1)

    def report(event):
        told.append(event)
        if isinstance(event, RankReady):
            version, *starts = next(left, (event.version, start))
            members = (Member(s, Slot(f"w{s}", "", "", ""), ("", 0), version) for s in starts)
            plan = Plan(next(numbers), tuple(members), event.loop)
            threading.Thread(target=session.on_plan, args=[plan]).start()
        elif isinstance(event, LoopDone):
            session.on_release(event.generation)

    place = Place(0, 1, 0, 1, 0, 1)
    spec = RankSpec(job="job", start=start, place=place, bind="127.0.0.1", **spec)
    solo = lambda terms: SoloCommunicator(generation=terms.generation)  # noqa: E731
    session = Session(spec, report, RankRuntime(connect=solo, on_set_up=told.append))
    with activate(session):
        function()
    session.close()
    return told


def nothing(state):
    """Train for no step."""


def files_in(directory):
    return sorted(path.name for path in Path(directory).rglob("*") if path.is_file())
