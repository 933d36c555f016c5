"""How tensors travel: as the user wants it, as all ranks can, and as the job then says."""

import pytest

from nbelastic.errors import NoProgress
from tests.support.clusters import a_crew


def in_two_loops():
    """Sum over all ranks in each of two elastic loops: two generations."""
    import torch

    import nbelastic.torch as hvd

    hvd.init()
    sums = []

    @hvd.elastic.run
    def loop(state):
        sums.append(hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist())

    loop(hvd.elastic.ObjectState())
    loop(hvd.elastic.ObjectState())
    return sums


def the_native_part():
    from nbelastic import native

    return native.core is not None, native.missing


@pytest.fixture(scope="module")
def bare_crew(tmp_path_factory):
    """A crew of processes where the package has been installed without a compiler."""
    folder = tmp_path_factory.mktemp("without-native")
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.modules['nbelastic.native._core'] = None\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.syspath_prepend(folder)  # which workers are given, and give to their ranks
        with a_crew() as crew:  # a template of theirs starts with that folder, too
            yield crew


def details(job, kind):
    return [event.detail for event in job.history if event.kind == kind]


def test_without_gpus_the_job_goes_on_and_says_why(crew):
    job = crew.fit(in_two_loops, np=2, backend="nccl")
    assert job.results() == [[[2.0] * 3] * 2] * 2
    assert job.status.backend == "shm"
    (detail,) = details(job, "backend")
    assert detail == (
        "tensors go over shared memory: tensors of GPUs are reduced in the memory of the host: "
        "rank 0 has used no GPU"
    )


def test_without_a_word_the_fastest_is_taken_that_all_can_do_and_status_says_which(crew):
    job = crew.fit(in_two_loops, np=2)
    able = all(there for there, _ in crew.client.run(the_native_part).values())
    assert job.status.backend == ("shm" if able else "gloo")
    way = "shared memory" if able else "Gloo"
    assert details(job, "formed") == [f"2 ranks over {way}"] * 2
    assert len(details(job, "backend")) == (0 if able else 1)


def test_without_the_native_part_a_job_runs_over_gloo_and_says_so_once(bare_crew):
    assert bare_crew.fit(the_native_part, np=1).results() == [(False, "it was not built")]
    job = bare_crew.fit(in_two_loops, np=2)
    assert job.results() == [[[2.0] * 3] * 2] * 2
    assert job.status.backend == "gloo"
    assert details(job, "formed") == ["2 ranks over Gloo"] * 2
    (said,) = details(job, "backend")
    assert said.startswith("tensors go over Gloo: rank 0: ")
    assert "C++" in said


def test_who_insists_on_shared_memory_is_told_why_there_is_none(bare_crew):
    with pytest.raises(NoProgress, match=r"backend='shm', but memory cannot be shared: rank 0"):
        bare_crew.fit(in_two_loops, np=2, backend="shm")
