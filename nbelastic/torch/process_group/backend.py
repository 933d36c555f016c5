"""Back end ``"nbelastic"`` of torch.distributed.

Private parts of ``torch.distributed.distributed_c10d`` are used here and in :mod:`.ddp` only. Its
public functions make groups by the names of built-in back ends, and cache who is in them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from nbelastic.elastic.ranks.context import Context, current, current_or_none, initialize
from nbelastic.elastic.ranks.groups import Group
from nbelastic.elastic.ranks.session import Session
from nbelastic.errors import NbelasticError
from nbelastic.torch.distributed_sampler import wrap
from nbelastic.torch.process_group import ddp
from nbelastic.torch.process_group.group import NAME, ElasticProcessGroup

# Back ends that trainers name by themselves; in a job they get the job's ranks.
_OWN = {"", "gloo", "nccl", "undefined", NAME}


def install() -> None:
    """Make the back end known to torch; idempotent."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    ddp.install()
    wrap(c10d, "init_process_group", answer)
    dist.init_process_group = c10d.init_process_group  # `dist` has a name of its own for it


def default_group() -> ElasticProcessGroup | None:
    """Return the default group of this process, if it is of this back end."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return group if isinstance(group, ElasticProcessGroup) else None


def answer(
    original: Callable[..., Any],
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Answer ``init_process_group``: with the job's ranks, unless a store is named."""
    names = set(str(backend or "").lower().replace("cpu:", "").replace("cuda:", "").split(","))
    ours = NAME in names
    in_job = isinstance(current_or_none(), Session)
    addressed = (init_method or "env://").partition("?")[0] != "env://"
    # A store is for a world of the caller's own, also by the name of this back end.
    if store is not None or (not ours and (not in_job or addressed or not names <= _OWN)):
        original(backend, init_method, timeout, world_size, rank, store, *args, **kwargs)
        return
    initialize()  # outside of a job: a world of one rank
    context = current()
    _check_place(context, rank, world_size)
    store = HashStore()  # torch asks for one; ranks meet at the job's own server
    original(NAME, None, timeout, world_size=context.size, rank=context.rank, store=store)
    group = default_group()
    assert group is not None
    # Caches of the world are up to date from generation to generation.
    others = tuple(each for each in context.after_forming if each is not _refresh)
    context.after_forming = (*others, _refresh)
    _refresh()
    if not ours and names != {""}:
        named = ",".join(sorted(names))
        context.note("remark", f"torch.distributed's back end {named!r} is the job's own here")


def _check_place(context: Context, rank: int, size: int) -> None:
    """Refuse a place of the caller's own; trainers pass on those of the environment."""
    sizes = (-1, context.size, int(os.environ.get("WORLD_SIZE", "-1")))
    ranks = (-1, context.rank, int(os.environ.get("RANK", "-1")))
    if size not in sizes or rank not in ranks:
        raise NbelasticError(
            f"init_process_group(rank={rank}, world_size={size}): this is rank {context.rank} of "
            f"{context.size}, and both change with the ranks of the job; leave them out"
        )


def _refresh() -> None:
    """Write the present world to where torch and its trainers look it up."""
    group = default_group()
    if group is None:
        return
    world: Any = c10d._world
    for each in list(world.pg_map):
        if isinstance(each, ElasticProcessGroup):
            each.queue.drop()
            # Torch fills it when a group is made, and translates ranks by it ever after.
            world.pg_group_ranks[each] = {rank: place for place, rank in enumerate(each.ranks)}
    states, context = sys.modules.get("accelerate.state"), group.context  # if it is in use
    for name in ("PartialState", "AcceleratorState"):  # the second has a copy of the first
        shared = getattr(getattr(states, name, None), "_shared_state", None)
        if shared and "num_processes" in shared:
            shared["num_processes"] = context.size
            shared["process_index"] = context.rank
            shared["local_process_index"] = context.local_rank


def _create(options: Any, _: Any = None) -> ElasticProcessGroup:
    """Make a group when torch does not ask the default group for it."""
    context, ranks = current(), list(options.global_ranks_in_group)  # none for the default group
    its = Group.of_ranks(context, ranks, str(options.group_id)) if ranks else None
    return ElasticProcessGroup(context, options.timeout, its)


with contextlib.suppress(RuntimeError):  # a build of torch without distributed
    install()
