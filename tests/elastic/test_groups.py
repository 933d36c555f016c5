"""Members of groups, followed from one generation to the next."""

import copy

import pytest

from nbelastic.elastic.ranks.context import Context, current
from nbelastic.elastic.ranks.groups import Group, Members
from nbelastic.errors import NbelasticError
from nbelastic.messages import FRESH
from tests.elastic.members import one_rank


class World(Context):
    """A rank of a job whose generations the test forms."""

    def __init__(self, mine):
        super().__init__()
        self.mine, self.generation, self.present, self.first = mine, 0, [], None

    def starts(self):
        return self.present

    def first_starts(self):
        return self.first

    def form(self, *starts, later=False):
        self.generation += 1
        self.present = list(starts)
        if self.first is None:
            self.first = [] if later else self.present
        self.rank, self.size = starts.index(self.mine), len(starts)


def test_members_are_followed_by_what_they_are():
    world = World(11)
    world.form(10, 11, 12, 13)
    members = Members([0, 1, 3], world.starts())
    assert members.ranks(world) == [0, 1, 3]
    world.form(13, 11, 14)
    assert members.ranks(world) == [0, 1]
    assert copy.deepcopy(members).ranks(world) == [0, 1]
    world.form(11)
    assert members.ranks(world) == [0]


def test_members_named_before_the_first_generation_are_its_ranks():
    world = World(11)
    members = Members([0, 1])
    assert members.ranks(world) == [0, 1], "a forecast"
    world.form(10, 11, 12)
    world.form(11, 12, 13)  # no one has asked before
    assert members.ranks(world) == [0]
    with pytest.raises(ValueError, match=r"ranks \[0, 7\] cannot be formed: there are 3 ranks"):
        Members([0, 7]).ranks(world)


def test_a_rank_that_joins_later_is_in_no_group_of_before():
    world = World(13)
    group = Group.of_ranks(world, [0, 1], "pair")
    world.form(11, 13, later=True)
    assert (group.ranks, group.rank, group.size) == ([], -1, 0)
    with pytest.raises(NbelasticError, match=r"members of group 'pair' have left.*elastic loop"):
        group.communicator()


def test_operations_of_a_group_are_not_counted_as_those_of_all():
    world = World(10)
    world.form(10)
    Group.of_ranks(world, [0], "one").communicator()
    assert world.exchanges == 0


@pytest.mark.parametrize("version", [FRESH, 3])
def test_ranks_named_in_a_later_generation_by_init_are_those_of_the_first(version):
    found = []

    def rank():
        for _ in range(2):
            current().form(1)
        found.extend(Members([0, 1]).ranks(current()))

    one_rank(rank, [(version, 10, 11), (4, 11, 12)], start=11)
    assert found == [0] * (version == FRESH), "else it had joined"
