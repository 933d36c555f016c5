"""A job on the workers of a cluster manager, from which workers leave as planned."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tests.support.clusters import kinds, sizes, until
from tests.support.training import Workload, check, check_nothing_redone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbelastic
    from tests.support.clusters import Crew


@contextlib.contextmanager
def a_job_that_loses_nothing(
    crew: Crew, folder: Path, formed: list[int], **options: int
) -> Iterator[nbelastic.Job]:
    """Train while workers leave; check the sizes, and that no step was lost or done again."""
    work = Workload(folder, epochs=1000, until_told=True)
    job = crew.fit(work, np=formed[0], min_np=1, block=False, **options)
    try:
        until(lambda: job.status.commits > 5 or job.done(), "commits", 120)
        yield job
        (folder / "enough").touch()
        results = job.results(120)
    finally:
        job.cancel()
    check(results, work)
    assert sizes(job) == formed
    assert kinds(job).count("left") == len(formed) - 1
    assert not {"lost", "restarted"}.intersection(kinds(job)), kinds(job)
    check_nothing_redone(results)


def shrinks(job: nbelastic.Job, size: int) -> None:
    """Wait until a job's newest generation has formed with so many ranks."""
    until(lambda: sizes(job)[-1:] == [size] or job.done(), f"{size} ranks", 120)
