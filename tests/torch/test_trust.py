"""A newcomer takes the word of the others on how commits follow steps."""

from __future__ import annotations

import pytest

from nbelastic.torch.state.lazy_commit import LEARNED
from nbelastic.torch.state.torch_state import TorchState
from tests.support.world import StaticContext, run_ranks
from tests.torch.nets import adam, everything, new_net, train


@pytest.mark.parametrize("commits", [0, LEARNED + 1])
def test_a_newcomer_copies_as_little_as_the_others_do(commits: int) -> None:
    nets = [new_net(rank) for rank in range(2)]

    def main(context: StaticContext) -> object:
        generation, context.generation = context.generation, 0
        net = nets[context.rank]
        optimizer = adam(net)
        state = TorchState(net, optimizer, steps=0)

        def steps_with_commits(count: int) -> None:
            for _ in range(count):
                train(net, optimizer, seed=state.steps)
                state.steps += 1
                state.commit()

        if context.rank == 0:
            steps_with_commits(commits)
        context.generation = generation
        state.align([1])
        state.save()
        copied = [state._lazy.uncopied]
        received = everything(state)
        train(net, optimizer)
        train(net, optimizer)
        state.restore()  # two steps and no commit: the second had copies made
        steps_with_commits(1)
        copied.append(state._lazy.uncopied)
        return copied, received, everything(state)

    first, second = run_ranks(2, main)
    assert first == second
    assert first[0][0] == bool(commits)
