"""Members of groups, followed from one generation to the next."""

from __future__ import annotations

import copy

import pytest

from nbelastic.elastic.ranks.context import LocalContext
from nbelastic.elastic.ranks.groups import Group, Members
from nbelastic.errors import NbelasticError


class World(LocalContext):
    """A rank of a job whose generations the test forms."""

    def __init__(self, mine):
        super().__init__()
        self.mine, self.generation, self.present, self.later = mine, 0, [], False

    def starts(self):
        return self.present

    def came_later(self):
        return self.later

    def form(self, *starts, later=False):
        self.generation += 1
        self.present, self.later = list(starts), later
        self.rank, self.size = starts.index(self.mine), len(starts)
        for call in self.after_forming:
            call()


def test_members_are_followed_by_what_they_are():
    world = World(11)
    world.form(10, 11, 12, 13)
    members = Members([0, 1, 3])
    members.bind(world)
    assert members.ranks(world) == [0, 1, 3]
    world.form(13, 11, 14, later=True)
    assert members.ranks(world) == [0, 1]
    assert copy.deepcopy(members).ranks(world) == [0, 1]
    world.form(11, later=True)
    assert members.ranks(world) == [0]


def test_members_named_before_the_first_generation_are_its_ranks():
    world = World(11)
    members = Members([0, 1])
    members.bind_to_first(world)
    assert members.ranks(world) == [0, 1], "a forecast"
    world.form(10, 11, 12)
    world.form(11, 12, 13, later=True)  # no one has asked before
    assert members.ranks(world) == [0]
    assert world.after_forming == ()


def test_a_rank_that_joins_later_is_in_no_group_of_before():
    world = World(13)
    group = Group.of_ranks(world, [0, 1], "pair")
    world.form(11, 13, later=True)
    assert (group.ranks, group.rank, group.size) == ([], -1, 0)
    with pytest.raises(NbelasticError, match=r"members of group 'pair' have left.*elastic loop"):
        group.communicator()


def test_a_rank_that_there_is_not_is_named():
    world = World(10)
    members = Members([0, 2])
    members.bind_to_first(world)
    world.form(10, 11)
    with pytest.raises(ValueError, match=r"ranks \[0, 2\] cannot be formed: there are 2 ranks"):
        members.ranks(world)


def test_operations_of_a_group_are_not_counted_as_those_of_all():
    world = World(10)
    world.form(10)
    Group.of_ranks(world, [0], "one").communicator()
    assert world.exchanges == 0
