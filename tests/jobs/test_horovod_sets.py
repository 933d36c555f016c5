"""Process sets, names and joined ranks in a job whose members change (N19)."""

from __future__ import annotations

import os
import signal

from tests.support.clusters import a_crew, sizes


def make_training(directory):
    def train_all():
        import torch

        import nbelastic.torch as hvd

        hvd.init(process_sets=[[0, 2]])
        sets = {}

        def work(state):
            if not sets and state.step == 0:
                for name, ranks in (("even", [0, 2]), ("last", [3]), ("most", [0, 1, 2])):
                    sets[name] = hvd.add_process_set(ranks)
            size = hvd.size()
            seen = []
            for state.step in range(state.step, 30):
                if state.step == 5 and hvd.rank() == 3 and size == 4 and not state.died:
                    os.kill(os.getpid(), signal.SIGKILL)
                if state.step == 6:
                    state.died = True
                for name, some in sets.items():
                    if some.included():
                        one = torch.ones(1)
                        total = hvd.allreduce(one, op=hvd.Sum, process_set=some)
                        assert total.item() == some.size() == len(some.ranks)
                        named = hvd.allreduce(one, op=hvd.Sum, name=name, process_set=some)
                        assert named.item() == some.size()
                assert hvd.allreduce(torch.ones(1), name="all", op=hvd.Sum).item() == size
                if hvd.rank() != state.step % size:
                    hvd.allreduce(torch.ones(1))
                hvd.join()
                state.commit()
            if "last" in sets:
                try:
                    hvd.allreduce(torch.ones(1), process_set=sets["last"])
                except ValueError as error:
                    seen.append(str(error))
            fresh = hvd.add_process_set([size - 1])  # of those that there are
            seen.append({name: some.ranks for name, some in sets.items()})
            return hvd.rank(), size, seen, fresh.ranks

        state = hvd.elastic.ObjectState(step=0, died=False)
        return hvd.elastic.run(work)(state)

    return train_all


def test_N19_sets_follow_their_members_through_a_reset(tmp_path):
    with a_crew(n_workers=4) as crew:
        job = crew.fit(make_training(tmp_path), np=4, min_np=3, max_np=4)
        assert sizes(job)[0] == 4
        assert len(sizes(job)) >= 2, "a member was killed"
        for rank, size, seen, fresh in job.results():
            assert fresh == [size - 1]
            if len(seen) == 1:
                assert seen == [{}], "it has come later, and is in no earlier set"
                assert rank == size - 1
                continue
            message, ranks = seen
            assert "all members of process set 3 (made of ranks [3]) have left the job" in message
            assert ranks == {"even": [0, 2], "last": [], "most": [0, 1, 2]}
