"""Hook into torch to detect a rank that trains without nbelastic.

Runs in a worker, in the threads of ranks. Ranks often run code that was written for
``torch.distributed``. While a rank runs in a process, two functions show that:
``init_process_group`` and ``SyncBatchNorm``. Steps of optimizers show what is trained, which should
be the same on all ranks. All three are hooked where torch is imported already, else when it is
imported, and unhooked when the last rank has ended. Torch's settings are noted at the same time,
and restored.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from nbelastic.cluster.rank_error import summary_of
from nbelastic.elastic.context import current_or_none
from nbelastic.elastic.session import warn
from nbelastic.elastic.supervision import note_step

from .modules import imported
from .settings import keep_settings_of_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from nbelastic.elastic.context import Context
    from nbelastic.elastic.session import Session

__all__ = ["advise", "hooked_torch", "trainers_of"]

_TRAINERS = {
    "accelerate": "accelerate",
    "deepspeed": "DeepSpeed",
    "fastai": "fastai",
    "horovod": "Horovod",
    "ignite": "Ignite",
    "keras": "Keras",
    "lightning": "Lightning",
    "lightning_fabric": "Lightning",
    "pytorch_lightning": "Lightning",
}
"""Libraries for training, by the module that they import."""

GROUP_ADVICE = (
    'Call torch.distributed.init_process_group("nbelastic") first: in a rank it needs neither '
    "address nor rank nor size. Or use nbelastic.torch (DistributedOptimizer, allreduce), which "
    "needs no process group."
)

_NO_GROUP = "process group has not been initialized"

SYNC_WARNING = (
    "torch.nn.SyncBatchNorm uses each rank's own statistics\n"
    "It needs a process group of torch.distributed. Without one it acts as BatchNorm, and its "
    "running statistics differ between ranks.\n"
    "Use hvd.SyncBatchNorm; hvd.convert_sync_batchnorm(model) puts it in the place of this layer."
)


def trainers_of(session: Session) -> tuple[str, ...] | None:
    """Return what trained in a rank that has met no other rank; None where it has met one."""
    if session.generation or session.in_torch_group:
        return None
    names = [name for module, name in _TRAINERS.items() if module in sys.modules]
    transformers = sys.modules.get("transformers")
    if "transformers.trainer" in sys.modules or "Trainer" in vars(transformers or object):
        names.append("Trainer (transformers)")
    elif transformers is not None:
        names.append("transformers")
    if session.in_torch_group is False:
        names.append("torch.distributed with a group of one rank (DDP)")
    return tuple(sorted(set(names)))


@contextlib.contextmanager
def hooked_torch() -> Iterator[None]:
    """Hook torch for the length of a block, together with all other ranks of the process."""
    for name in _HOOKS:
        imported(name)  # another thread may be importing it
    with _lock:
        _finder.users += 1
        if _finder.users == 1:
            _finder.install()
    try:
        yield
    finally:
        with _lock:
            _finder.users -= 1
            if _finder.users == 0:
                _finder.remove()


# -- torch.distributed -----------------------------------------------------------------------------


def _hook_groups(module: ModuleType) -> Callable[[], None]:
    original: Callable[..., None] = module.init_process_group
    there_before = module.is_initialized()

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        context = current_or_none()
        if context is None:
            original(*args, **kwargs)
            return
        # By name, because the room of torch is no part of the cluster's.
        groups = importlib.import_module("nbelastic.torch.process_group")
        groups.answer(original, *args, **kwargs)
        if groups.default_group() is None:
            context.in_torch_group = module.get_world_size() > 1

    def modules() -> list[Any]:
        return [module, sys.modules.get("torch.distributed")]

    for each in modules():
        if getattr(each, "init_process_group", None) is original:
            each.init_process_group = init_process_group

    def unhook() -> None:
        for each in modules():
            if getattr(each, "init_process_group", None) is init_process_group:
                each.init_process_group = original
        if module.is_initialized() and not there_before:
            _end_groups(module)

    return unhook


def _end_groups(module: ModuleType) -> None:
    """End the process groups that ranks have left, or the next rank here could make none."""
    # In a thread: operations that will never end hold it up until they time out.
    ending = threading.Thread(
        target=_destroy_groups, args=(module,), name="nbelastic-torch-groups", daemon=True
    )
    ending.start()
    ending.join(1.0)


def _destroy_groups(module: ModuleType) -> None:
    with contextlib.suppress(Exception):
        module.destroy_process_group()


def advise(error: BaseException) -> None:
    """Add what to do to an error of torch that a group is missing, as DistributedDataParallel's."""
    if issubclass(type(error), (ValueError, RuntimeError)) and _NO_GROUP in summary_of(error):
        _add_advice(error, GROUP_ADVICE)


def _add_advice(error: BaseException, advice: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(advice)
    elif len(error.args) == 1:  # Python 3.10
        error.args = (f"{error.args[0]}\n{advice}",)


# -- SyncBatchNorm ---------------------------------------------------------------------------------


def _hook_batch_norm(module: ModuleType) -> Callable[[], None]:
    kind: Any = module.SyncBatchNorm
    before = {name: vars(kind).get(name) for name in ("__init__", "__setstate__")}

    def hook(name: str) -> Callable[..., None]:
        original = getattr(kind, name)

        @functools.wraps(original)
        def made(self: object, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            context = current_or_none()
            if context is not None and context.size > 1:
                _check_group_later(context, self)

        return made

    for name in before:
        setattr(kind, name, hook(name))

    def unhook() -> None:
        for name, method in before.items():
            if method is None:
                delattr(kind, name)
            else:
                setattr(kind, name, method)

    return unhook


def _check_group_later(context: Context, module: Any) -> None:
    """Warn at an operation between ranks after `module` has trained without a group of torch's."""
    check = next((each for each in context.before_exchange if isinstance(each, _GroupCheck)), None)
    if check is None:
        check = _GroupCheck(context)
        context.before_exchange += (check,)
    check.modules.add(module)


def _has_trained(module: Any) -> bool:
    """Return whether a norm is in training and has counted a batch, without a look at a device."""
    counter = getattr(module, "num_batches_tracked", None)
    return bool(module.training) and (counter is None or counter._version > 0)


class _GroupCheck:
    def __init__(self, context: Context) -> None:
        self._context = context
        self.modules: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self) -> None:
        context = self._context
        if not any(map(_has_trained, self.modules)):
            return
        context.before_exchange = tuple(each for each in context.before_exchange if each != self)
        if context.size > 1 and (context.in_torch_group is False or not _has_group()):
            warn(context, SYNC_WARNING)


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


# -- optimizers ------------------------------------------------------------------------------------


def _hook_optimizers(module: ModuleType) -> Callable[[], None]:
    def stepped(optimizer: Any, *_: object) -> None:
        context = current_or_none()
        if context is not None:
            note_step(context, optimizer)

    remove: Callable[[], None] = module.register_optimizer_step_post_hook(stepped).remove
    return remove


# -- hooks -----------------------------------------------------------------------------------------

_HOOKS: dict[str, Callable[[ModuleType], Callable[[], None]]] = {
    "torch": keep_settings_of_torch,
    "torch.distributed.distributed_c10d": _hook_groups,
    "torch.nn.modules.batchnorm": _hook_batch_norm,
    "torch.optim.optimizer": _hook_optimizers,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Hooks modules as they are imported. It finds nothing itself."""

    def __init__(self) -> None:
        self.users = 0
        self._unhook: list[Callable[[], None]] = []

    def install(self) -> None:
        """Hook what is imported, and wait for the rest."""
        sys.meta_path.insert(0, self)
        for name, hook in _HOOKS.items():
            if name in sys.modules:
                self._unhook.append(hook(sys.modules[name]))

    def remove(self) -> None:
        """Take all hooks away."""
        with contextlib.suppress(ValueError):  # user code may have cleared the list
            sys.meta_path.remove(self)
        while self._unhook:
            self._unhook.pop()()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own specification, with a hook for when it is loaded."""
        hook = _HOOKS.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if hook else None
        if hook is None or spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            with _lock:
                if self.users:
                    self._unhook.append(hook(module))

        loader.exec_module = exec_module
        return spec


_lock = threading.RLock()
_finder = _Finder()
