import pytest

from nbelastic.elastic.sampler import ShardSampler
from nbelastic.elastic.state import ObjectState, State
from nbelastic.errors import OptionError
from tests.support.world import run_ranks


def test_F1_F2_sync_change_restore_change_commit_restore():
    def main(context):
        sampler = ShardSampler(range(36), shuffle=False)
        state = ObjectState(batch=20 + context.rank, sampler=sampler)
        seen = []

        def change():
            state.batch = 21
            sampler.record_batch(0, 2)

        def look():
            seen.append((state.batch, sampler.processed_num, len(sampler)))

        for call in (
            *(change, state.sync, look),
            *(change, state.restore, look),
            *(state.commit, change, state.commit, look),
            *(lambda: setattr(state, "batch", 99), lambda: sampler.set_epoch(2)),
            *(state.restore, look, state.sync, look),
            *(lambda: sampler.set_epoch(3), look),
        ):
            call()
        return seen, context.version

    sampled = [(6, 10), (6, 10), (12, 10), (12, 10), (12, 8), (0, 12)]
    expected = [(21, *each) for each in sampled]
    assert run_ranks(3, main) == [(expected, 2)] * 3


def test_only_named_values_are_kept():
    state = ObjectState(epoch=0)
    state.note = "mine"
    state.save()
    state.note = "changed"
    state.restore()
    assert state.note == "changed"


@pytest.mark.parametrize("name", ["commit", "sync", "_saved", "on_reset", "leave"])
def test_names_that_a_state_needs_itself_are_refused(name):
    with pytest.raises(OptionError, match=name):
        ObjectState(**{name: 1})


def test_reset_callbacks_run_in_order_after_reset():
    calls = []

    class Mine(State):
        def reset(self):
            calls.append("reset")

    state = Mine()
    state.register_reset_callbacks([lambda: calls.append("a"), lambda: calls.append("b")])
    state.register_reset_callbacks([lambda: calls.append("c")])
    state.on_reset()
    assert calls == ["reset", "a", "b", "c"]
