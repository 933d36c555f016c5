"""``TorchState``: models, optimizers and all else that training changes, kept and sent exactly."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

from nbelastic.elastic.sampler import ShardSampler
from nbelastic.elastic.state import ObjectState
from nbelastic.elastic.transfer import Parcel
from nbelastic.errors import NbelasticError
from nbelastic.torch.copies import Copies
from nbelastic.torch.generators import GeneratorStates
from nbelastic.torch.handlers import change, note, things_in
from nbelastic.torch.snapshot import Builder, Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from nbelastic.elastic.sampler import SamplerSnapshot
    from nbelastic.torch.snapshot import Node, Thing

__all__ = ["TorchState"]


@dataclass(frozen=True)
class _Commit:
    """What a commit is made of, besides the copies of the tensors."""

    nodes: dict[str, Node]
    noted: list[Thing]
    things: list[object]
    owners: list[torch.Tensor]
    addresses: list[int]
    samplers: list[tuple[ShardSampler, SamplerSnapshot]]
    generators: GeneratorStates


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

    Notes
    -----
    Copies of tensors are on the device of the tensors, or in the host's memory once the device has
    no more room. Python attributes of a model that are neither parameters, buffers nor extra state
    (``get_extra_state``) are not kept.

    Examples
    --------
    >>> state = TorchState(model, optimizer, epoch=0, sampler=sampler)  # doctest: +SKIP
    >>> state.epoch += 1  # doctest: +SKIP
    >>> state.commit()  # doctest: +SKIP
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        self._copies = Copies()
        super().__init__(model=model, optimizer=optimizer, **values)

    def save(self) -> None:
        """Keep the present values as the last commit, in the memory of the one before."""
        values = self._values()
        things = things_in(values.values())
        recorder = Recorder(things, note)
        nodes = {name: recorder.record(value) for name, value in values.items()}
        owners = recorder.tensors
        self._copies.take(owners)
        self._commit = _Commit(
            nodes,
            recorder.noted,
            things,
            owners,
            [owner.data_ptr() for owner in owners],
            [(each, each.snapshot()) for each in things if isinstance(each, ShardSampler)],
            GeneratorStates(),
        )

    def restore(self) -> None:
        """Go back to exactly the last commit."""
        commit = self._commit
        builder = Builder(
            self._copies.values,
            commit.things,
            change,
            owners=commit.owners,
            addresses=commit.addresses,
        )
        self._build(builder, commit.noted, commit.nodes)
        for sampler, snapshot in commit.samplers:
            sampler.go_back(snapshot)
        commit.generators.restore()

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _build(self, builder: Builder, noted: list[Thing], nodes: dict[str, Node]) -> None:
        for thing in noted:  # first: tensors that they share with values stay theirs
            builder.build(thing)
        built = {name: builder.build(node) for name, node in nodes.items()}
        builder.flush()
        self.__dict__.update(built)

    # -- synchronisation -------------------------------------------------------------------------

    def _samplers(self) -> list[ShardSampler]:
        things = things_in(self._values().values())
        return [each for each in things if isinstance(each, ShardSampler)]

    def _pack(self) -> Parcel:
        values = self._values()
        things = things_in(values.values())
        recorder = Recorder(things, note, duplicate=False)
        nodes = {name: recorder.record(value) for name, value in values.items()}
        return Parcel(_dump((_kinds(things), recorder.noted, nodes), things), recorder.tensors)

    def _pack_commit(self) -> Parcel:
        commit = self._commit
        head = _dump((_kinds(commit.things), commit.noted, commit.nodes), commit.things)
        devices = [owner.device.type for owner in commit.owners]
        return Parcel(head, self._copies.values, devices)

    def _samplers_at_commit(self) -> list[tuple[ShardSampler, SamplerSnapshot]]:
        return self._commit.samplers

    def _unpack(self, parcel: Parcel) -> None:
        things = things_in(self._values().values())
        kinds, noted, nodes = _load(parcel.head, things)
        if kinds != _kinds(things):
            raise NbelasticError(
                f"the state of this rank holds {_kinds(things)}, that of the others {kinds}: "
                "build the same state on all ranks"
            )
        builder = Builder(parcel.tensors, things, change, devices=parcel.devices)
        self._build(builder, noted, nodes)


def _kinds(things: Sequence[object]) -> list[str]:
    return [type(thing).__qualname__ for thing in things]


# Values may refer to models and optimizers of the state; for the receiver these are its own.


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
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
