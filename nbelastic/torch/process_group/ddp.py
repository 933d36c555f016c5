"""DistributedDataParallel over ranks that change.

Its reducer keeps a layout of buckets, which is rebuilt in the order of the first backward, and the
marks of a backward that has failed. Ranks that join begin with another layout. So at its first
forward in a generation every DistributedDataParallel makes its reducer anew, on all ranks alike.

One that is made before the first generation takes part in no collective: a rank that joins others
sets up while these train. In an elastic loop the state brings its parameters. Without a loop they
are broadcast at the first forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed.utils import _sync_module_states, _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel

from nbelastic.torch.distributed_sampler import wrap
from nbelastic.torch.process_group.group import ElasticProcessGroup

# The generation and failures that the reducer of each was made for; of none, if it was made alone.
_marks: weakref.WeakKeyDictionary[Any, tuple[object, ...]] = weakref.WeakKeyDictionary()

_built_in_hooks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
# States of the random generators of PowerSGD, as its hooks were registered, with the hooks' states.
_generators: weakref.WeakKeyDictionary[Any, list[tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def install() -> None:
    """Make each DistributedDataParallel follow the generations of its group; idempotent."""
    for name, around in (
        ("__init__", _around_init),
        # A compiled forward breaks its graph there. What is read of the group is in no graph.
        ("_pre_forward", _disable_dynamo(_around_forward)),
        ("register_comm_hook", _around_hook),
        ("_register_builtin_comm_hook", _around_built_in_hook),
    ):
        wrap(DistributedDataParallel, name, around)


def _around_init(original: Callable[..., Any], ddp: Any, *args: Any, **kwargs: Any) -> None:
    world = dist.group.WORLD if dist.is_initialized() else None
    group = kwargs.get("process_group") or world
    if not isinstance(group, ElasticProcessGroup) or group.generation:
        original(ddp, *args, **kwargs)
        return
    with group.alone():
        original(ddp, *args, **kwargs)
    _marks[ddp] = ()


def _around_forward(original: Callable[..., Any], ddp: Any, *args: Any, **kwargs: Any) -> Any:
    group = ddp.process_group
    if isinstance(group, ElasticProcessGroup):
        mark = (group.generation, group.queue.failures)
        if _marks.get(ddp) != mark:
            if not group.generation and not (ddp.training and torch.is_grad_enabled()):
                with group.alone():  # an evaluation while it sets up
                    return original(ddp, *args, **kwargs)
            _enter_generation(ddp, group)
    return original(ddp, *args, **kwargs)


def _enter_generation(ddp: Any, group: ElasticProcessGroup) -> None:
    alone = _marks.get(ddp) == ()
    if not group.generation:
        group.communicator()  # forms it
    if ddp in _marks:  # else it was made in this generation
        renew(ddp)
    if alone and not group.context.loops:  # in a loop the state brings the parameters
        ignored, ranks = ddp.parameters_to_ignore, ddp.process_group
        _verify_param_shape_across_processes(ranks, ddp._module_parameters)
        _sync_module_states(
            ddp.module, ranks, ddp.broadcast_bucket_size, 0, ignored, ddp.forward_sync_buffers
        )
    _marks[ddp] = (group.generation, group.queue.failures)


def renew(ddp: Any) -> None:
    """Make the reducer of a DistributedDataParallel anew, as in a new wrapper."""
    ddp._has_rebuilt_buckets = False
    ddp.require_forward_param_sync = True
    parameters, sparse = ddp._build_params_for_reducer()
    ddp.reducer._remove_autograd_hooks()  # the new reducer adds its own
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    ddp._static_graph_delay_allreduce_enqueued = False
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    if ddp.mixed_precision is not None:
        ddp.reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
    # PowerSGD begins again: its matrices belong to buckets, and must be the same on all ranks.
    for state, generator in _generators.get(ddp, []):
        state.rng.set_state(generator)
        for each in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            each.clear()
        state.iter = 0  # decides when compression begins, on all ranks in the same step
    for hook, state in ddp._comm_hooks:  # the new reducer has none yet
        dist._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]
    if ddp in _built_in_hooks:
        dist._register_builtin_comm_hook(ddp.reducer, _built_in_hooks[ddp])  # type: ignore[attr-defined]


# -- communication hooks ---------------------------------------------------------------------------


def _around_hook(
    original: Callable[..., Any], ddp: Any, state: Any, hook: Callable[..., Any]
) -> Any:
    generator: Any = getattr(state, "rng", None)
    if hasattr(generator, "get_state") and hasattr(state, "error_dict"):
        # A newcomer's generator begins there, so after a reset all ranks go back to it.
        _generators.setdefault(ddp, []).append((state, generator.get_state()))
    return original(ddp, state, hook)


def _around_built_in_hook(original: Callable[..., Any], ddp: Any, kind: Any) -> Any:
    _built_in_hooks[ddp] = kind  # DDP keeps no record of these
    return original(ddp, kind)
