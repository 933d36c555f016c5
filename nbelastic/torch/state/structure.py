"""Structure of a state, compared before its values are taken over.

Values come from another rank or from a checkpoint.

A *structure* describes each part of a state: the type and shape of each parameter and buffer, the
parameters in each group of an optimizer. Parts are named as in code (``model.head.weight``). The
sender also describes its state as it was built, because training may have changed it since. A rank
can take over the values if its state is as the sender's is, or as the sender's was built.
"""

from __future__ import annotations

import torch

from nbelastic.errors import StateMismatch

OWN = "a tensor in no model: "  # prefix of a group's parameter that is in no model of the state

# Text that describes a part, or a text for each parameter of a group.
Description = str | tuple[str, ...]

Key = tuple[str, str]  # kind and name of a part

Structure = dict[Key, Description]  # descriptions of all parts

# Kinds of parts that a rank cannot make, and cannot do without.
_ON_BOTH = frozenset({"parameter", "extra state of"})

# Kind of parts that may appear and vanish: tensors in state dicts of other objects.
_IF_ON_BOTH = "tensor"

# Kinds of parts that must be equal once training has changed them; else ranks may differ.
_IF_CHANGED = frozenset({"class of", "function"})

_LISTED = 5  # most differences that an error lists


def word_for(tensor: torch.Tensor) -> str:
    """Return a text of a tensor's type and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def changes(built: Structure, present: Structure) -> dict[Key, Description | None]:
    """Return the parts that were different when the state was built; None for new parts."""
    keys = dict.fromkeys([*built, *present])
    return {key: built.get(key) for key in keys if built.get(key) != present.get(key)}


def check_fit(expected: Structure, came: Structure, before: dict[Key, Description | None]) -> None:
    """Check that a state can take over the values of another.

    The values `came` from a state that has changed since it was built, as its :func:`changes`
    `before` say. The message names the parts, with what was expected and what came.
    """
    found = []
    late = False
    for key in dict.fromkeys([*expected, *came]):
        mine, theirs = expected.get(key), came.get(key)
        if _fits(key[0], mine, theirs) or (key[0] in _IF_CHANGED and key not in before):
            continue
        changed_since = mine == before.get(key, theirs)
        if changed_since and _can_follow(key[0], mine, theirs):
            continue
        late = late or changed_since
        found.append(f"{' '.join(key)}: expected {_say(mine, theirs)}, came {_say(theirs, mine)}")
    if found:
        more = [f"and {len(found) - _LISTED} more"] if len(found) > _LISTED else []
        text = "; ".join([*found[:_LISTED], *more])
        if late:
            text += (
                ". This was added or changed after training began, and a rank that joins builds "
                "its state anew: build all of it before the state is made, freeze what is "
                "trained later (requires_grad_(False)), and switch functions by a flag"
            )
        raise StateMismatch(text)


def _fits(kind: str, mine: Description | None, theirs: Description | None) -> bool:
    if mine is None or theirs is None:
        return kind == _IF_ON_BOTH
    return mine == theirs


def _can_follow(kind: str, mine: Description | None, theirs: Description | None) -> bool:
    """Return whether this rank's freshly built state can load the sender's."""
    if kind in _IF_CHANGED:
        return False
    if kind in _ON_BOTH:
        return mine is not None and theirs is not None
    return _own(mine) == _own(theirs)


def _own(description: Description | None) -> list[str]:
    """Return the parameters of a group that only their position identifies."""
    if not isinstance(description, tuple):
        return []
    return [each for each in description if each.startswith(OWN)]


def _say(description: Description | None, other: Description | None) -> str:
    """Return a description for a message; of a group the parameters that `other` lacks."""
    if description is None:
        return "nothing"
    if not isinstance(description, tuple):
        return description or "one"
    text = f"{len(description)} parameter{'s' * (len(description) != 1)}"
    only = [each for each in description if each not in (other or ())]
    return f"{text} (with {', '.join(only[:3])}{', …' * (len(only) > 3)})" if only else text
