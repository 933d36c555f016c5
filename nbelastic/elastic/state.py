"""State: what training can be rolled back to, and what a newcomer receives.

The life of a state inside :func:`nbelastic.elastic.run`:

=======================  ==========================================================================
``commit()``             ``save()``, count the version, then ``check_host_updates()``
a peer fails             ``restore()``: exactly the last commit
ranks leave or join      ``leave()`` on all members while the old generation still works, then
                         ``save()``: one consistent cut, whatever was committed before
a generation has formed  ``on_reset()`` on ranks whose rank or size is not what they were told
                         before, then ``align(behind)``, then ``save()``
=======================  ==========================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.elastic.context import current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["State"]


class State:
    """Base of all states; Horovod's class of the same name.

    A state of your own overrides :meth:`save`, :meth:`restore` and :meth:`sync`; its ``sync``
    broadcasts from rank ``nbelastic.elastic.sync_root()``.
    """

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions to call after a change of membership, before the state is synchronised.

        Parameters
        ----------
        callbacks : iterable of callables without arguments
            Called in the order of registration, on every rank that was a member before.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Run :meth:`reset` and the reset callbacks. Called by the elastic loop."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state, so that training can be rolled back to here, and check for changes.

        Raises
        ------
        HostsUpdatedInterrupt
            Ranks are about to join or leave; :func:`nbelastic.elastic.run` catches it.
        """
        self.save()
        current().committed()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check whether ranks are about to join or leave, without saving.

        Raises
        ------
        HostsUpdatedInterrupt
            As for :meth:`commit`.
        """
        current().check_membership()

    def align(self, behind: Sequence[int]) -> None:
        """Bring all members of a new generation to the same state. Called by the elastic loop.

        Parameters
        ----------
        behind : sequence of int
            Ranks that have not got the newest committed version (in a first generation: all but
            the source), the same on all ranks. Empty after most faults: then nothing but what
            ranks did apart (samples seen) needs to be exchanged.
        """
        del behind
        self.sync()

    def leave(self) -> None:
        """Exchange what must not go with those who leave. Called in the old generation."""

    def reset(self) -> None:
        """Adapt to a new membership. Called before the reset callbacks."""

    def save(self) -> None:
        """Keep the present values as the last commit."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to exactly the last commit."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make all ranks equal to the rank that holds the newest state."""
        raise NotImplementedError
