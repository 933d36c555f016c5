"""Numbers of slots given to jobs, under what the slots allow.

Slots are matched with jobs: a job that could use others makes way for one that cannot (augmenting
paths in a flow network).
"""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .model import SlotGroup, Want

Node: TypeAlias = "tuple[str, str] | tuple[str, str, str] | int"
"""A job, a job on a host, or a group of slots."""


class Allocation:
    """Slots given to jobs so far; at first none."""

    def __init__(self, wants: Sequence[Want], groups: Sequence[SlotGroup]) -> None:
        self.count = {want.job: 0 for want in wants}
        self.used: list[dict[str, int]] = [{} for _ in groups]  # slots of each job, by group
        self._free = [group.size for group in groups]
        self._hosts = [group.host for group in groups]
        self._cap = {want.job: want.per_host for want in wants}
        self._on_host: dict[tuple[str, str], int] = {}
        able = [len(groups) if g.jobs is None else len(g.jobs) for g in groups]
        scarce_first = sorted(range(len(groups)), key=lambda number: (able[number], number))
        self._groups: dict[tuple[str, str], list[int]] = {}
        self._of_job: dict[str, list[str]] = {want.job: [] for want in wants}
        for number in scarce_first:
            allowed, host = groups[number].jobs, groups[number].host
            for job in self.count if allowed is None else sorted(allowed & self.count.keys()):
                if (job, host) not in self._groups:
                    self._of_job[job].append(host)
                self._groups.setdefault((job, host), []).append(number)

    def give(self, job: str, group: int) -> bool:
        """Give a job a free slot of a group; return whether it can have one."""
        host = self._hosts[group]
        if group not in self._groups.get((job, host), ()):
            return False
        return self._may_have(job, host) and self._give(job, host, (group,))

    def _give(self, job: str, host: str, groups: Iterable[int]) -> bool:
        """Give a job a free slot of any of some groups of a host, if there is one."""
        for group in groups:
            if self._free[group]:
                self._free[group] -= 1
                self._change(job, group, 1)
                self._on_host[job, host] = self._on_host.get((job, host), 0) + 1
                self.count[job] += 1
                return True
        return False

    def add(self, job: str) -> bool:
        """Give a job one slot more; return whether there is one."""
        if not any(self._free):
            return False
        for host in self._of_job[job]:
            if self._may_have(job, host) and self._give(job, host, self._groups[job, host]):
                return True  # no other job has to make way
        before: dict[Node, Node] = {}
        queue: deque[Node] = deque([("job", job)])
        while queue:
            node = queue.popleft()
            if isinstance(node, int) and self._free[node]:
                self._follow(before, node)
                self.count[job] += 1
                return True
            for following in self._edges(node):
                if following not in before and following != ("job", job):
                    before[following] = node
                    queue.append(following)
        return False

    def _edges(self, node: Node) -> Iterator[Node]:
        """Yield where a slot more could come from, or where one could go instead."""
        if isinstance(node, int):
            for job, number in self.used[node].items():
                if number:
                    yield ("on", job, self._hosts[node])
        elif len(node) == 2:
            for host in self._of_job[node[1]]:
                if self._may_have(node[1], host):
                    yield ("on", node[1], host)
        else:
            yield from self._groups[node[1], node[2]]
            if self._on_host.get((node[1], node[2]), 0):
                yield ("job", node[1])

    def _may_have(self, job: str, host: str) -> bool:
        cap = self._cap[job]
        return cap is None or self._on_host.get((job, host), 0) < cap

    def _follow(self, before: dict[Node, Node], end: int) -> None:
        """Move slots along a path that ends in a group with a free one."""
        self._free[end] -= 1
        node: Node = end
        while node in before:
            earlier = before[node]
            if isinstance(node, int) and not isinstance(earlier, int):
                self._change(earlier[1], node, 1)
            elif isinstance(earlier, int) and not isinstance(node, int):
                self._change(node[1], earlier, -1)
            elif not isinstance(node, int) and not isinstance(earlier, int):
                on, by = (node, 1) if len(node) == 3 else (earlier, -1)
                if len(on) == 3:
                    key = on[1], on[2]
                    self._on_host[key] = self._on_host.get(key, 0) + by
            node = earlier

    def _change(self, job: str, group: int, by: int) -> None:
        used = self.used[group]
        used[job] = used.get(job, 0) + by

    def remove(self, job: str, number: int) -> None:
        """Take so many slots back from a job."""
        for group, used in enumerate(self.used):
            taken = min(number, used.get(job, 0))
            if taken:
                self._change(job, group, -taken)
                self._free[group] += taken
                self._on_host[job, self._hosts[group]] -= taken
                self.count[job] -= taken
                number -= taken

    def save(self) -> Allocation:
        """Return a copy."""
        return copy.deepcopy(self)
