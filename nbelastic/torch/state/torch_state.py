"""State of training with PyTorch, committed, restored and sent exactly."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from nbelastic.data import Loader
from nbelastic.data.sources.map_source import USUAL_CAUSES, difference, sample_of
from nbelastic.data.sources.row_source import DataSample
from nbelastic.elastic.ranks.context import current_or_none, zero_is_source
from nbelastic.elastic.sampler import SamplerProgress, ShardSampler
from nbelastic.elastic.state import ObjectState, check_names, naming, public
from nbelastic.elastic.state.state_payload import StatePayload, dump, load
from nbelastic.elastic.training_checks import sample
from nbelastic.errors import OptionError, StateMismatch
from nbelastic.torch.environment import device, in_words
from nbelastic.torch.gradients.optimizer import accumulates, is_distributed, is_pending
from nbelastic.torch.rates import WhileAlive, adjusts_to_size
from nbelastic.torch.state.adapters import SamplerAdapter, adapter_for, objects_in
from nbelastic.torch.state.buffer_means import BufferMeans
from nbelastic.torch.state.commit import Commit, Copies, make_commit
from nbelastic.torch.state.flatten import Unflattener
from nbelastic.torch.state.handlers import StateHandler, own_handler
from nbelastic.torch.state.lazy_commit import LazyCommit
from nbelastic.torch.state.structure import changes, check_fit

_ACCELERATES = (
    "what accelerate has prepared is in a TorchState\n"
    "It does not have the progress in accelerate's loaders, nor its gradient scaler: after a "
    "change of membership rows of an epoch are repeated.\n"
    "Use nbelastic.accelerate.AccelerateState(accelerator, epoch=0) in its place."
)


class TorchState(ObjectState):
    """State of training with PyTorch: models, optimizers, and values.

    A commit keeps parameters, buffers, optimizer state, the state of learning rate schedulers, of a
    ``GradScaler``, of samplers and of other objects with ``state_dict`` and ``load_state_dict``,
    plain values, and this rank's random generators. ``restore()`` restores exactly these, in place.
    Parameters of an optimizer are included even if their model is not named. Gradients are not:
    ``restore()`` clears them.

    A synchronisation sends all of it except the random generators, which each rank has for itself.

    Parameters
    ----------
    model : torch.nn.Module, or list, tuple or dict of them, optional
        The model or models.
    optimizer : torch.optim.Optimizer, or list, tuple or dict of them, optional
        The optimizer or optimizers.
    **values
        Further objects as above, or plain values that can be copied and pickled. All are
        attributes and may be assigned to. Attributes that are not named here are not part of the
        state. A value with a handler of yours (``elastic.state.set_handler_registry``) is kept by
        that: each commit then copies all tensors.

    Attributes
    ----------
    always_copy : bool, default False
        Whether each commit copies all tensors, even right after a step; see below.

    Notes
    -----
    Parameters and optimizer state are not copied any more once three commits in a row have each
    directly followed a step, or one commit if they take 256 MB or more. Until the next step they
    *are* the commit. When an operation between ranks comes between a step and its commit, or when
    something other than the optimizer changes a tensor, the values of the commit are gone. Then the
    state at the end of the step replaces it, which is complete and the same on all ranks, and all
    later commits are copied. The same happens if you call ``restore()`` yourself between ``step()``
    and ``commit()``: call it before the step, or set ``always_copy``. Only the ``step()`` of an
    optimizer of your own may change its tensors, and not through ``tensor.data``. Where something
    else does so before each step, as a weight decay by hand, values that are compared before the
    first steps show it, and all commits are copied. Set ``always_copy`` if it begins later, or
    changes few values.

    Copies of tensors are on the tensors' device, or in the host's memory once the device is full.
    Of a model, parameters, buffers, extra state (``get_extra_state``) and plain attributes of its
    modules are kept: modes, numbers, strings and tuples of them. Other attributes are not.

    Examples
    --------
    >>> state = TorchState(model, optimizer, epoch=0, sampler=sampler)  # doctest: +SKIP
    >>> state.epoch += 1  # doctest: +SKIP
    >>> state.commit()  # doctest: +SKIP
    """

    always_copy = False

    _loaders: Sequence[Loader] = ()
    _accumulating: Sequence[Optimizer] = ()
    _data: Sequence[DataSample | None] | None = None  # of the datasets as they were built
    _handlers: Mapping[str, StateHandler] = MappingProxyType({})  # the user's, by names of values

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        self._copies = Copies()
        self._lazy = LazyCommit(self._capture_step, self._replace_commit)
        self._stepped: Commit | None = None
        self._stepped_copies = Copies()
        self._reported: tuple[object, ...] = ()
        values = {"model": model, "optimizer": optimizer, **values}
        found = {name: own_handler(value) for name, value in values.items()}
        handlers = {name: handler for name, handler in found.items() if handler is not None}
        self._check_free(handlers)
        self.__dict__.update((name, values.pop(name)) for name in handlers)
        objects = objects_in(values).values()
        _check_models(objects)
        context = current_or_none()
        modules = [type(each).__module__ for each in objects]
        if context is not None and any(name.startswith("accelerate.") for name in modules):
            context.warn(_ACCELERATES)
        super().__init__(**values)
        if handlers:  # only from here on, because a handler's first save is its constructor
            self._handlers = handlers
            self.always_copy = True  # theirs do not follow a step that replaces a commit
        self._loaders = self._take_part_in_steps()
        self._built = self._commit.structure()  # before training changes it

    def _take_part_in_steps(self) -> list[Loader]:
        """Connect the loaders in this state with its epoch, and with the buffers of its models."""
        loaders, optimizers = self._objects(Loader), self._objects(Optimizer)
        self._accumulating = [each for each in optimizers if is_distributed(each)]
        if loaders and optimizers and not any(map(is_distributed, optimizers)):
            raise OptionError(
                f"TorchState: with a Loader, wrap the {type(optimizers[0]).__name__} by "
                "hvd.DistributedOptimizer(…). It averages over the micro-batches of a step, on one "
                "rank as on many"
            )
        if loaders and any(map(adjusts_to_size, optimizers)):
            raise OptionError(
                "TorchState: an LRScaler adjusts rates to a batch that grows with the number of "
                "ranks, and with a Loader it does not grow; leave it out"
            )
        for loader in loaders:
            if any(loader is each for each in self._loaders):
                continue
            if "epoch" in self._names:
                loader.follow(self)
            loader.participants.append(
                BufferMeans(
                    WhileAlive(self._modules),  # the loader may outlive this state
                    loader.forgo_exactness,
                    loader.buffers,
                    WhileAlive(self._running_means),
                )
            )
        return loaders

    def on_reset(self) -> None:
        """Run :meth:`reset` and the reset callbacks.

        Raises
        ------
        OptionError
            A callback has changed a learning rate, though a loader keeps the batch as it is, or an
            :class:`~nbelastic.torch.elastic.LRScaler` does that by itself.
        """
        before = self._rates()
        super().on_reset()
        scales = any(map(adjusts_to_size, self._objects(Optimizer)))
        if (self._loaders or scales) and self._rates() != before:
            why = "an LRScaler multiplies the rates by itself"
            if self._loaders:
                why = "the batch of a Loader is the same for any number of ranks"
            raise OptionError(f"a reset callback changes a learning rate: {why}. Remove it")

    def _batch(self) -> int:
        if self._loaders and "batch" not in self._names:
            return max(self._loaders[0].step - 1, 0)
        return super()._batch()

    def commit(self) -> None:
        super().commit()
        for loader in self._loaders:
            loader.balancer.committed()  # not if the generation ends with this commit

    def save(self) -> None:
        """Keep the present values as the last commit, in the memory of the one before.

        Raises
        ------
        RuntimeError
            A step of a loader is under way, or some of the backward passes of a step are done. The
            commit would count them as done, without their gradients.
        """
        self._refuse_within_a_step("commit()")
        for name, handler in self._handlers.items():
            if self.__dict__[name] is handler.value:
                handler.save()
            else:
                handler.set_value(self.__dict__[name])
        values = self._values()
        with naming(values, self._objects):
            commit = make_commit(values, self.__dict__.get("_commit"))
        uncopied = self._lazy.commit(commit, current_or_none(), copy=self.always_copy)
        self._copies.take(commit.tensors, uncopied)
        self._commit, self._stepped = commit, None
        self._report_memory(len(uncopied))
        if self._loaders and (context := current_or_none()) is not None:
            context.telemetry.data = tuple(loader.rows_in_commit() for loader in self._loaders)

    def make_room(self, error: Exception) -> bool:
        kinds = (torch.OutOfMemoryError, MemoryError)  # of a device, or of the process
        if not isinstance(error, kinds) and "can't allocate memory" not in str(error):
            return False
        under_way = [loader for loader in self._loaders if loader.can_make_room]
        for loader in under_way:
            loader.make_room(in_words(device()))
        return bool(under_way)

    def check_host_updates(self) -> None:
        """Check whether ranks are about to join or leave, without saving.

        Raises
        ------
        HostsUpdatedInterrupt
            As for :meth:`commit`.
        RuntimeError
            A step of a loader, or of several backward passes, is under way; see :meth:`save`.
        """
        self._refuse_within_a_step("check_host_updates()")
        super().check_host_updates()

    def _refuse_within_a_step(self, call: str) -> None:
        begun = any(loader.incomplete for loader in self._loaders)
        if begun or (self._loaders and any(map(is_pending, self._objects()))):
            raise RuntimeError(
                f"state.{call} was called in a step of the loader, before optimizer.step(): "
                "training would go on without the rows of the step. Call it after optimizer.step()"
            )
        if any(map(accumulates, self._accumulating)):
            raise RuntimeError(
                f"state.{call} was called between the backward passes of one step "
                "(backward_passes_per_step): after a failure training would go on without the "
                "gradients that are accumulated. Call it after optimizer.step()"
            )

    def _report_memory(self, uncopied: int) -> None:
        """Report how much memory state and copies take, if it may have changed."""
        context, tensors = current_or_none(), self._commit.tensors
        reported = (context, len(tensors), uncopied)
        if context is not None and reported != self._reported:
            self._reported = reported
            copied = self._copies.nbytes + self._stepped_copies.nbytes
            context.telemetry.memory = (sum(each.nbytes for each in tensors), copied)

    def restore(self) -> None:
        self._lazy.settle()
        self.__dict__.update(self._commit.restore(self._copies.values))
        self._lazy.restored()
        for name, handler in self._handlers.items():
            handler.restore()
            self.__dict__[name] = handler.value

    def _come_together(
        self, *, behind: Sequence[int], receivers: Sequence[int], resumed: bool
    ) -> None:
        super()._come_together(behind=behind, receivers=receivers, resumed=resumed)
        if receivers and self._handlers:
            with zero_is_source():  # handlers of Horovod's send from rank 0
                for name, handler in self._handlers.items():
                    handler.value = self.__dict__[name]
                    handler.sync()
                    self.__dict__[name] = handler.value

    def _objects(self, kind: type | tuple[type, ...] = object) -> list[Any]:
        return [each for each in objects_in(self._values()).values() if isinstance(each, kind)]

    def _rates(self) -> list[float]:
        groups = [group for each in self._objects(Optimizer) for group in each.param_groups]
        return [float(group.get("lr", 0.0)) for group in groups]

    def _capture_step(self) -> None:
        """Capture the state at the end of a step, without the optimizers' tensors."""
        self._stepped = make_commit(self._values(), self._commit)
        self._stepped_copies.take(self._stepped.tensors, self._lazy.tensors)

    def _replace_commit(self, as_stepped: bool) -> None:
        """Replace an uncopied commit by a newer state, which is copied."""
        if self._stepped is None or not as_stepped:
            self._capture_step()
        assert self._stepped is not None
        self._commit, self._stepped = self._stepped, None
        self._copies, self._stepped_copies = self._stepped_copies, self._copies
        self._copies.complete()
        self._lazy.uncopied = False
        context = current_or_none()
        if context is not None:
            context.ahead = True  # ranks that restored the commit are behind

    def _step_bytes(self) -> int:
        parts = {part for each in self._modules() for part in each.modules()}
        parameters = {
            parameter
            for part in parts
            if not getattr(part, "sparse", False)  # an embedding's gradient may be much smaller
            for parameter in part.parameters(recurse=False)
            if parameter.requires_grad and parameter.is_cpu
        }
        sizes = sorted(each.numel() * each.element_size() for each in parameters)
        # Adam and its like need two temporary tensors for each parameter in turn.
        return sum(sizes) + (2 * sum(sizes[-1:]) if self._objects(Optimizer) else 0)

    def _modules(self) -> list[Module]:
        return self._objects(Module)

    def _running_means(self) -> Iterable[torch.Tensor]:
        """Return means of batches that are no buffers of modules."""
        return ()

    def _sample(self) -> tuple[float, ...]:
        return sample(self._objects())

    # -- synchronisation -------------------------------------------------------------------------

    def _samplers(self) -> list[ShardSampler]:
        return self._objects(ShardSampler)

    def _pack(self) -> StatePayload:
        if self._data is None:
            self._data = _data_samples(self._objects())
        commit = make_commit(self._values(), self._commit)
        return self._payload(commit, commit.tensors, self._data, trusted=self._lazy.trusted)

    def _unwritable(self) -> list[str]:
        return list(self._handlers)

    def _pack_commit(self) -> StatePayload:
        self._lazy.settle()
        found = self._commit.names()
        names = [found.get(id(t), f"tensor.{n}") for n, t in enumerate(self._commit.tensors)]
        return replace(self._payload(self._commit, self._copies.values), names=names)

    def _payload(
        self,
        commit: Commit,
        tensors: Sequence[torch.Tensor],
        data: Sequence[DataSample | None] = (),
        *,
        trusted: bool = False,
    ) -> StatePayload:
        """Return a commit with its tensors' values, and the changes since the state was built."""
        before = changes(self._built, commit.structure())
        things = [*commit.objects, *commit.tensors]
        contents = [part.content for part in commit.parts]
        with naming(self._values(), lambda: things, sent=True):
            content = dump((contents, commit.values, trusted, self._more()), things)
        adapters = [type(adapter_for(obj)) for obj in commit.objects]
        parts = (data, commit.kinds(), list(commit.values), before, content, adapters)
        devices = [tensor.device.type for tensor in commit.tensors]
        return StatePayload(pickle.dumps(parts), tensors, devices)

    @staticmethod
    def _as_dict(payload: StatePayload, samplers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        *_, content, adapters = pickle.loads(payload.head)
        objects: list[dict[str, Any]] = [{} for _ in adapters]
        contents, values, *_ = load(content, [*objects, *payload.tensors])
        memo: dict[int, Any] = {id(tensor): tensor for tensor in payload.tensors}
        left = iter(samplers)
        for obj, adapter, captured in zip(objects, adapters, contents, strict=True):
            built = next(left) if adapter is SamplerAdapter else adapter().state_dict(captured)
            memo[id(obj)] = obj if isinstance(built, dict) else built
            if isinstance(built, dict):  # values that refer to the object have this dict already
                obj.update(built)
        return copy.deepcopy(values, memo)

    def _progress_at_commit(self) -> list[SamplerProgress]:
        return [snapshot.progress for _, snapshot in self._commit.samplers]

    def _unpack(self, payload: StatePayload) -> None:
        data, kinds, names, before, content, _ = pickle.loads(payload.head)
        check_names("the values", public(self._names), public(names))
        mine = make_commit(self._values(), self._commit)
        check_names("the objects", mine.kinds(), kinds, in_order=True)
        contents, values, trusted, more = load(content, [*mine.objects, *payload.tensors])
        pairs = zip(mine.parts, contents, strict=True)
        parts = [part._replace(content=content) for part, content in pairs]
        theirs = replace(mine, parts=parts, values=values)
        if not self._aligned:  # else it may be behind ranks that have changed it since
            check_fit(mine.structure(), theirs.structure(), before)
        if data:  # checkpoints have none
            _check_data(_data_samples(mine.objects), data)
        devices = dict(zip(map(id, payload.tensors), payload.devices, strict=True))
        keep = payload.buffer is not None
        unflattener = Unflattener(mine.objects, devices=devices, keep=keep)
        self._take(*theirs.rebuild(unflattener), more)
        if trusted:  # else the first commit would copy everything, while other ranks wait
            self._lazy.trust()
        if payload.buffer is not None:
            for tensor in payload.tensors:
                if id(tensor) not in unflattener.kept:
                    payload.buffer.give_back(tensor)


def _check_models(objects: Iterable[object]) -> None:
    """Refuse models that lazy modules have not made yet, or FSDP2 has sharded over the ranks."""
    for model in objects:
        if not isinstance(model, Module):
            continue
        kind = type(model).__name__
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if is_lazy(parameter):
                raise OptionError(
                    f"TorchState({kind}): {name!r} of a lazy module is not initialised; call the "
                    "model on a batch before the state is made, as for DistributedDataParallel"
                )
            if hasattr(parameter, "placements"):  # a DTensor
                raise OptionError(
                    f"TorchState({kind}): parameter {name!r} is sharded over the ranks, as by "
                    "fully_shard(), and a rank that fails would take its part along. In an elastic "
                    "loop use DistributedDataParallel; without one, in a job of a fixed size, "
                    "FSDP2 works"
                )


def _data_samples(objects: Iterable[object]) -> list[DataSample | None]:
    """Return digests of the datasets of loaders and samplers, in the order of these."""
    found = []
    for each in objects:
        if isinstance(each, Loader):
            found.append(each.data_sample())
        elif isinstance(each, ShardSampler):
            found.append(sample_of(each.dataset, fetches=False))
    return found


def _check_data(mine: Sequence[DataSample | None], theirs: Sequence[DataSample | None]) -> None:
    """Refuse to train on other data than the rank that has sent its state."""
    for one, other in zip(mine, theirs, strict=True):
        found = difference(one, other) if one is not None and other is not None else ""
        if found:
            context = current_or_none()
            ranks = "" if context is None else f" on ranks {context.source} and {context.rank}"
            raise StateMismatch(f"the datasets are not the same{ranks}: {found}. {USUAL_CAUSES}")
