from __future__ import annotations

import pytest

from nbelastic.elastic.sampler import ShardSampler
from nbelastic.elastic.state import ObjectState, State
from nbelastic.errors import OptionError
from tests.support.world import StaticContext, run_ranks


def test_F1_sync_change_restore_change_commit_restore() -> None:
    def main(context: StaticContext) -> object:
        state = ObjectState(batch=20 + context.rank, epoch=10 + context.rank)
        seen = []

        def look() -> None:
            seen.append((state.batch, state.epoch))

        state.sync()
        look()
        state.batch, state.epoch = 21, 11
        state.restore()
        look()
        state.commit()
        state.batch, state.epoch = 21, 11
        state.commit()
        look()
        state.batch = 99
        state.restore()
        look()
        return seen, context.version

    assert run_ranks(3, main) == [([(20, 10), (20, 10), (21, 11), (21, 11)], 2)] * 3


def test_F2_sampler_in_a_plain_state() -> None:
    def main(context: StaticContext) -> None:
        sampler = ShardSampler(range(32), shuffle=False)
        state = ObjectState(sampler=sampler, epoch=0)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for index in range(8):
                sampler.record_batch(index, 2)
                assert sampler.processed_num == 4 * (index + 1)
        sampler.set_epoch(2)
        sampler.record_batch(0, 2)
        state.commit()
        sampler.record_batch(1, 2)
        state.restore()
        assert sampler.processed_num == 4
        state.sync()
        assert sampler.processed_indices == {0, 1, 2, 3}
        assert len(sampler) == 14
        sampler.set_epoch(3)
        assert (sampler.processed_num, len(sampler)) == (0, 16)

    run_ranks(2, main)


def test_only_named_values_are_kept() -> None:
    state = ObjectState(epoch=0)
    state.note = "mine"
    state.save()
    state.note = "changed"
    state.restore()
    assert state.note == "changed"


@pytest.mark.parametrize("name", ["commit", "sync", "_saved", "on_reset", "leave"])
def test_names_that_a_state_needs_itself_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        ObjectState(**{name: 1})


def test_reset_callbacks_run_in_order_after_reset() -> None:
    calls: list[str] = []

    class Mine(State):
        def reset(self) -> None:
            calls.append("reset")

    state = Mine()
    state.register_reset_callbacks([lambda: calls.append("a"), lambda: calls.append("b")])
    state.register_reset_callbacks([lambda: calls.append("c")])
    state.on_reset()
    assert calls == ["reset", "a", "b", "c"]
