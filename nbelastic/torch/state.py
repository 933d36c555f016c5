"""``TorchState``: models, optimizers and all else that training changes, kept and sent exactly."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from nbelastic.elastic.context import current
from nbelastic.elastic.parcel import Parcel
from nbelastic.elastic.sampler import ShardSampler
from nbelastic.elastic.state import ObjectState, check_names
from nbelastic.errors import NotInitialized
from nbelastic.pickling import Pickler
from nbelastic.torch.commit import put_together, take_apart
from nbelastic.torch.copies import Copies, nbytes_of
from nbelastic.torch.deferral import Deferral
from nbelastic.torch.handlers import Structured, change, labels_of, note, things_in
from nbelastic.torch.snapshot import Builder, Recorder
from nbelastic.torch.structure import changes, check_fit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbelastic.elastic.context import Context
    from nbelastic.elastic.sampler import SamplerSnapshot
    from nbelastic.torch.commit import Commit
    from nbelastic.torch.snapshot import Node

__all__ = ["TorchState"]


class TorchState(ObjectState):
    """All that training with PyTorch changes.

    A commit keeps parameters, buffers, optimizer state, the state of learning rate schedulers, of a
    ``GradScaler``, of samplers and of anything else with ``state_dict`` and ``load_state_dict``,
    plain values, and this rank's random generators; ``restore()`` gives back exactly that, in
    place. Parameters of an optimizer belong to it even if their model is not named. Gradients do
    not: ``restore()`` clears them.

    A synchronisation sends all of it but the generators, which stay each rank's own.

    Parameters
    ----------
    model : torch.nn.Module, or list, tuple or dict of them, optional
        The model or models.
    optimizer : torch.optim.Optimizer, or list, tuple or dict of them, optional
        The optimizer or optimizers.
    **values
        Whatever else: objects as above, or plain values that can be copied and pickled. All are
        attributes and may be assigned to; attributes that are not named here are not part of the
        state.

    Attributes
    ----------
    always_copy : bool, default False
        Whether each commit copies all tensors, however it follows steps; see below.

    Notes
    -----
    Once a few commits in a row have each followed a step at once, parameters and optimizer state
    are not copied any more: until the next step they *are* the commit, and nothing can fail between
    a step and its commit. Where that ceases to be so (an operation over all ranks after a step but
    before its commit; a tensor changed by others than the optimizer), the state at the end of that
    step stands in for the commit that is gone: it is as whole, and the same on all ranks. So does
    it if you call ``restore()`` yourself between ``step()`` and ``commit()``: call it before the
    step, or set ``always_copy``. For optimizers of your own: their ``step()`` must change tensors,
    nobody else, and not through ``tensor.data``.

    Copies of tensors are on the device of the tensors, or in the host's memory once the device has
    no more room. Python attributes of a model that are neither parameters, buffers nor extra state
    (``get_extra_state``) are not kept.

    Examples
    --------
    >>> state = TorchState(model, optimizer, epoch=0, sampler=sampler)  # doctest: +SKIP
    >>> state.epoch += 1  # doctest: +SKIP
    >>> state.commit()  # doctest: +SKIP
    """

    always_copy = False

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        self._copies = Copies()
        self._deferral = Deferral(self._note_boundary, self._stand_in)
        self._boundary: Commit | None = None
        self._boundary_copies = Copies()
        self._told: tuple[object, ...] = ()
        super().__init__(model=model, optimizer=optimizer, **values)
        self._built = _structured(self._commit).structure()

    def save(self) -> None:
        """Keep the present values as the last commit, in the memory of the one before."""
        commit = take_apart(self._values(), self.__dict__.get("_commit"))
        held = self._deferral.commit(commit.outlined, _context(), copy=self.always_copy)
        self._copies.take(commit.owners, held)
        self._commit, self._boundary = commit, None
        self._tell_memory(len(held))

    def _tell_memory(self, held: int) -> None:
        """Let people know how much memory state and copies take, if it may have changed."""
        context, tensors = _context(), self._commit.owners
        told = (context, len(tensors), held)
        if context is not None and told != self._told:
            self._told = told
            copied = self._copies.nbytes + self._boundary_copies.nbytes
            context.vitals.memory = (sum(map(nbytes_of, tensors)), copied)

    def restore(self) -> None:
        """Go back to exactly the last commit, or to what stands in for it."""
        self._settle()
        self.__dict__.update(self._commit.restore(self._copies.values))
        self._deferral.restored()

    def prepare_to_join(self) -> Sequence[tuple[int, int]]:
        """Touch as much memory as the first step takes; what a rank has had, it keeps."""
        things = things_in(self._values().values())
        expected = _dense_gradients([each for each in things if isinstance(each, Module)])
        steps = any(isinstance(each, Optimizer) for each in things)
        taken: set[tuple[int, int]] = set()
        for _ in range(3):  # until all of it lies where it fits
            gradients = [torch.zeros_like(parameter) for parameter in expected]
            taken.update((each.data_ptr(), nbytes_of(each)) for each in gradients)
            for each in gradients if steps else []:
                # What the likes of Adam compute on the way; memory that is gone by the next.
                on_the_way = [torch.zeros_like(each) for _ in range(2)]
                taken.update((some.data_ptr(), nbytes_of(some)) for some in on_the_way)
                del on_the_way
            del gradients
        return list(taken)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _settle(self) -> None:
        """If the values of the last commit are gone, have what is there instead stand in."""
        untouched = self._deferral.untouched
        if self._deferral.in_flux or not untouched:
            self._stand_in(untouched)

    def _note_boundary(self) -> None:
        """Note all but the tensors' values at the end of a step."""
        self._boundary = take_apart(self._values(), self._commit)
        self._boundary_copies.take(self._boundary.owners, self._deferral.tensors)

    def _stand_in(self, as_stepped: bool) -> None:
        """Have a state that is newer take the place of a commit that has no copies."""
        if not self._deferral.held:
            return
        if self._boundary is None or not as_stepped:
            self._note_boundary()
        assert self._boundary is not None
        self._commit, self._boundary = self._boundary, None
        self._copies, self._boundary_copies = self._boundary_copies, self._copies
        self._copies.complete()
        self._deferral.copied()
        context = _context()
        if context is not None:
            context.ahead = True

    # -- synchronisation -------------------------------------------------------------------------

    def _samplers(self) -> list[ShardSampler]:
        things = things_in(self._values().values())
        return [each for each in things if isinstance(each, ShardSampler)]

    def _pack(self) -> Parcel:
        values = self._values()
        things = things_in(values.values())
        recorder = Recorder(things, note, duplicate=False)
        nodes = {name: recorder.record(value) for name, value in values.items()}
        trusted = self._deferral.rhythm.known
        present = Structured(things, labels_of(things, values), recorder.noted, recorder.tensors)
        return Parcel(self._head(present, nodes, trusted), recorder.tensors)

    def _pack_commit(self) -> Parcel:
        self._settle()
        commit = self._commit
        head = self._head(_structured(commit), commit.nodes, False)
        devices = [owner.device.type for owner in commit.owners]
        return Parcel(head, self._copies.values, devices)

    def _head(self, present: Structured, nodes: dict[str, Node], trusted: bool) -> bytes:
        """Return all but the tensors, and what has become of the state since it was built."""
        before = changes(self._built, present.structure())
        content = _dump((present.noted, nodes, trusted), present.things)
        return pickle.dumps((present.kinds(), list(nodes), before, content))

    def _samplers_at_commit(self) -> list[tuple[ShardSampler, SamplerSnapshot]]:
        return self._commit.samplers

    def _unpack(self, parcel: Parcel) -> None:
        values = self._values()
        things = things_in(values.values())
        kinds, names, before, content = pickle.loads(parcel.head)
        recorder = Recorder(things, note, duplicate=False)
        mine = Structured(things, labels_of(things, values), recorder.noted, recorder.tensors)
        check_names("the values", self._names, names)
        check_names("the objects", mine.kinds(), kinds, in_order=True)
        noted, nodes, trusted = _load(content, things)
        if not self._aligned:  # else it may be behind those who have changed it since
            for thing in things:
                recorder.record(thing)
            theirs = Structured(things, mine.labels, noted, parcel.tensors)
            check_fit(mine.structure(), theirs.structure(), before)
        keep = parcel.room is not None
        builder = Builder(parcel.tensors, things, change, devices=parcel.devices, keep=keep)
        self.__dict__.update(put_together(builder, noted, nodes))
        if parcel.room is not None:
            for slot, tensor in enumerate(parcel.tensors):
                if slot not in builder.kept:
                    parcel.room.give_back(tensor)
        if trusted:  # this rank runs the same function
            self._deferral.rhythm.trust()


def _structured(commit: Commit) -> Structured:
    return Structured(commit.things, commit.outlined.labels, commit.noted, commit.owners)


def _dense_gradients(models: Iterable[Module]) -> list[Parameter]:
    """Return the parameters that will have a gradient of their size, in the host's memory."""
    parts = dict.fromkeys(part for model in models for part in model.modules())
    found = dict.fromkeys(
        parameter
        for part in parts
        if not getattr(part, "sparse", False)  # an embedding's may be much smaller
        for parameter in part.parameters(recurse=False)
        if parameter.requires_grad and parameter.is_cpu and not is_lazy(parameter)
    )
    return list(found)


def _context() -> Context | None:
    """Return this rank's context, if there is one yet."""
    try:
        return current()
    except NotInitialized:
        return None


# Values may refer to models and optimizers of the state; for the receiver these are its own.


class _Pickler(Pickler):
    def __init__(self, file: io.BytesIO, things: Sequence[object]) -> None:
        super().__init__(file)
        self._numbers = {id(thing): number for number, thing in enumerate(things)}

    def persistent_id(self, obj: object) -> int | None:
        return self._numbers.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, things: Sequence[object]) -> None:
        super().__init__(file)
        self._things = things

    def persistent_load(self, pid: Any) -> object:
        return self._things[pid]


def _dump(value: object, things: Sequence[object]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, things).dump(value)
    return file.getvalue()


def _load(data: bytes, things: Sequence[object]) -> Any:
    return _Unpickler(io.BytesIO(data), things).load()
