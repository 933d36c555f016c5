"""Statistics of batches in models, averaged over the micro-batches of a step.

Batch norm keeps running means of what it sees, so after a step its buffers would depend on which
micro-batches a rank has computed, and in which order. Here each micro-batch begins with the buffers
of the step's start, and the new values are averaged along the tree of the gradients. A running mean
is linear in the statistics of its batch, so that is the running mean over the whole step, the same
on all ranks and for every number of ranks.

Other buffers have no such rule. A user may give a function for one, which gets its values after all
micro-batches of the step. Without a function, each rank would have its own value, so a change is
reported.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.nn.modules.batchnorm import _NormBase

from nbelastic.collectives import Communicator, Op
from nbelastic.elastic.ranks.context import current
from nbelastic.elastic.ranks.step_share import StepShare
from nbelastic.elastic.state.transfer import allgather_object
from nbelastic.errors import OptionError
from nbelastic.torch.gradients.tree_sums import MicroBatchSum, sum_over_ranks

_MOST_NAMES = 5  # buffers that an error names


class BufferMeans:
    """Participant in the steps of a loader that averages buffers of models."""

    def __init__(
        self,
        models: Callable[[], Iterable[torch.nn.Module] | None],
        forgo_exactness: Callable[[str], None],
        functions: Mapping[str, Callable[..., torch.Tensor]],
        more: Callable[[], Iterable[torch.Tensor] | None],
    ) -> None:
        self._models = models
        self._more = more
        self._forgo = forgo_exactness
        self._functions = functions
        self._checked = not functions
        self._share: StepShare | None = None
        self._found = False
        self._means: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []
        self._others: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._starts: dict[torch.Tensor, torch.Tensor] = {}  # values at the step's start
        self._largest: list[torch.Tensor] = []
        self._sums: list[MicroBatchSum] = []
        self._given: list[tuple[str, torch.Tensor]] = []  # buffers with functions
        # Theirs after each micro-batch of this rank.
        self._values: dict[int, list[torch.Tensor]] = {}

    def begin(self, share: StepShare) -> None:
        """Begin a step. Buffers are looked for later, because the model's mode may still change."""
        self._share, self._found = share, False

    def before(self, number: int) -> None:
        """Set all means, counts and buffers with functions to their values at the step's start."""
        del number
        self._find()
        _copy([*self._starts], self._starts.values())

    @torch.no_grad()
    def after(self, number: int) -> None:
        """Take the new values of a micro-batch."""
        share = self._share
        assert share is not None
        weight = share.row_weights[number]
        taken = torch.tensor(weight, dtype=torch.float32)
        for value, total in zip(
            [*(b * weight for b in self._means), taken], self._sums, strict=True
        ):
            total.add(number, value)
        if self._given:
            self._values[number] = [buffer.detach().cpu().clone() for _, buffer in self._given]
        if self._counts:
            torch._foreach_maximum_(self._largest, self._counts)  # a step counts as one batch
        if share.exact:
            for name, buffer in self._others.items():
                if buffer._version != self._versions[name]:
                    self._versions[name] = buffer._version
                    self._forgo(
                        f"the buffer {name} of a model changes in training and is no running mean, "
                        "so each rank has its own; Loader(buffers=…) takes a function for it"
                    )

    @torch.no_grad()
    def end(self) -> None:
        """Average over all micro-batches. All ranks call this at the same point."""
        self._find()
        share = self._share
        assert share is not None
        if self._means:
            self._average(current().communicator(), share)
        if self._given:
            self._apply_functions(current().communicator())

    def _average(self, communicator: Communicator, share: StepShare) -> None:
        like = [*self._means, torch.empty((), dtype=torch.float32)]
        *totals, weight = sum_over_ranks(communicator, share, self._sums, like)
        self._sums = []
        if not weight:  # the step was passed over
            for buffer in (*self._means, *self._counts):
                buffer.copy_(self._starts[buffer])
            return
        torch._foreach_div_(totals, float(weight))
        _copy(self._means, totals)
        largest, blocks = self._largest, share.blocks_of(communicator.size)
        idle = any(  # a rank without a micro-batch has counted nothing; known alike on all ranks
            not any(share.row_weights[number] for number in blocks.block(rank))
            for rank in range(communicator.size)
        )
        if largest and idle:
            flat = torch.stack([count.to("cpu", torch.int64) for count in largest])
            communicator.allreduce(flat, Op.MAX)
            largest = list(flat.unbind())
        _copy(self._counts, largest)

    def _apply_functions(self, communicator: Communicator) -> None:
        """Set buffers to the results of their functions, equal on all ranks."""
        of_all: dict[int, list[torch.Tensor]] = {}
        for of_rank in allgather_object(communicator, self._values):
            of_all.update(of_rank)
        in_order = [of_all[number] for number in sorted(of_all)]  # alike for any number of ranks
        for position, (name, buffer) in enumerate(self._given):
            start = self._starts[buffer]
            if not in_order:
                buffer.copy_(start)  # the step was passed over
                continue
            values = torch.stack([row[position] for row in in_order])
            found = self._functions[self._pattern_of(name)](start, values.to(buffer.device))
            if not isinstance(found, torch.Tensor) or found.shape != buffer.shape:
                shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found)
                raise OptionError(
                    f"Loader(buffers=…): the function for {name} returned {shape}; it must return "
                    f"a tensor of shape {tuple(buffer.shape)}, as the buffer has"
                )
            buffer.copy_(found)

    def _find(self) -> None:
        """Look for the buffers, once in a step."""
        if self._found:
            return
        self._found = True
        share = self._share
        assert share is not None
        models = [*(self._models() or ())]
        named = {  # by identity, because several models may have equal names
            buffer: (f"{path}.{key}".lstrip("."), module)
            for model in models
            for path, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        }
        means: list[torch.Tensor] = []
        self._counts, self._given, self._others = [], [], {}
        for buffer, (name, module) in named.items():
            if self._pattern_of(name) and module.training:
                self._given.append((name, buffer))
            elif not isinstance(module, _NormBase):
                self._others[name] = buffer
            elif module.training:
                (means if buffer.is_floating_point() else self._counts).append(buffer)
        self._means = list(dict.fromkeys([*means, *(self._more() or ())]))
        self._versions = {name: buffer._version for name, buffer in self._others.items()}
        self._largest = [buffer.detach().clone() for buffer in self._counts]
        self._sums = [MicroBatchSum(share) for _ in [*self._means, "weights"]]
        self._values = {}
        changing = (*self._means, *self._counts, *(buffer for _, buffer in self._given))
        self._starts = {buffer: buffer.detach().clone() for buffer in changing}
        if models and not self._checked:
            self._check_patterns([name for name, _ in named.values()])

    def _pattern_of(self, name: str) -> str:
        """Return the first pattern that matches a buffer's name, or an empty text."""
        return next((each for each in self._functions if fnmatch.fnmatchcase(name, each)), "")

    def _check_patterns(self, names: Sequence[str]) -> None:
        """Refuse a pattern that matches nothing, once the models are known."""
        self._checked = True
        for pattern in self._functions:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                shown = ", ".join(names[:_MOST_NAMES]) or "none"
                more = ", …" if len(names) > _MOST_NAMES else ""
                raise OptionError(
                    f"Loader(buffers=…): no buffer of the state's models matches {pattern!r}; "
                    f"there are: {shown}{more}"
                )


@torch.no_grad()
def _copy(into: Sequence[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    for buffer, value in zip(into, values, strict=True):
        buffer.copy_(value)
