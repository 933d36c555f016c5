"""Variables of Keras as one object of a state, with positions instead of names.

Keras numbers names by the models that a process has made before (``dense_2``), so names differ
between ranks. Positions do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbelastic.errors import StateMismatch
from nbelastic.torch.state.flatten import Adapter, TensorRef, mapping

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from nbelastic.keras.backends import Backend
    from nbelastic.torch.state.flatten import Flattener, Node, Unflattener
    from nbelastic.torch.state.structure import Structure, TensorNames


class VariablesAdapter(Adapter):
    """Capture and restoration of :class:`Variables`, in place."""

    def capture(self, flattener: Flattener, obj: Variables) -> list[tuple[str, Node]]:
        return [(name, flattener.flatten(tensor)) for name, tensor in obj.tensors()]

    def restore(
        self, unflattener: Unflattener, obj: Variables, content: list[tuple[str, TensorRef]]
    ) -> None:
        if len(obj) != len(content):
            raise StateMismatch(f"expected {len(obj)} variables; came {len(content)}")
        if obj.in_place:
            for (_, tensor), (_, ref) in zip(obj.tensors(), content, strict=True):
                unflattener.tensor(ref, tensor)
            return
        obj.assign([unflattener.value(ref) for _, ref in content])

    def parts(self, label: str, content: Any, names: TensorNames) -> Structure:
        found: Structure = {}
        for name, ref in content:
            found["parameter", f"{label}.{name}"] = names.words[ref]
            names.known.setdefault(ref, f"{label}.{name}")
        return found

    def state_dict(self, content: Any, *, whole: bool = False) -> Node:
        del whole
        return mapping(dict(content))


class Variables:
    """Variables of a model or an optimizer, all of which must exist by now.

    `buffers` are those of PyTorch's modules in the model.
    """

    nbelastic_adapter = VariablesAdapter

    def __init__(
        self, variables: Sequence[Any], backend: Backend, buffers: Sequence[torch.Tensor] = ()
    ) -> None:
        self._variables = list(variables)
        self._backend = backend
        names = [*(each.name for each in self._variables), *["buffer"] * len(buffers)]
        self._names = [f"{number}.{name}" for number, name in enumerate(names)]
        # The variables' own tensors are those of the state, and stay the same. So what was captured
        # once holds for later commits.
        self.in_place = self.nbelastic_complete = backend.in_place
        self._tensors = [*backend.read(self._variables), *buffers] if self.in_place else []

    def __len__(self) -> int:
        """Return the number of variables and buffers."""
        return len(self._names)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return a name and a tensor for each variable."""
        values = self._tensors if self.in_place else self._backend.read(self._variables)
        return list(zip(self._names, values, strict=True))

    def assign(self, values: Sequence[torch.Tensor]) -> None:
        """Give all variables new values, which are copied."""
        self._backend.write(self._variables, values)
