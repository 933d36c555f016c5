"""What communicators have in common whose operations are begun and end later.

An operation under way is a flight (:mod:`nbelastic.collectives.flights`). Waiting for it is what
makes it count: then its outcome is brought where it belongs, and it lands. What fails raises the
communicator's alarm, and after that nothing lands any more, even if its data has arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbelastic.collectives.communicator import Communicator
from nbelastic.collectives.flights import LandedFlight, OperationFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbelastic.collectives.alarm import Alarm
    from nbelastic.collectives.communicator import Handle, Rendezvous
    from nbelastic.collectives.flights import Flight

__all__ = ["FlightHandle", "LandingCommunicator"]


class LandingCommunicator(Communicator):
    """A communicator of flights.

    Parameters
    ----------
    rendezvous : Rendezvous
        Which ranks.
    alarm : Alarm
        What ends it, and what it raises when an operation fails.
    """

    def __init__(self, rendezvous: Rendezvous, alarm: Alarm) -> None:
        self.rank = rendezvous.rank
        self.size = rendezvous.size
        self.generation = rendezvous.generation
        self._alarm = alarm
        self._waiting = False
        self._completed = 0

    @property
    def waiting(self) -> bool:
        """Whether the rank's thread waits for an operation now."""
        return self._waiting

    @property
    def completed(self) -> int:
        """How many operations have been waited for with success."""
        return self._completed

    def check(self) -> None:
        """Raise if it is broken."""
        self._alarm.check()

    def abort(self, reason: str) -> None:
        """Break the communicator and free whoever waits."""
        self._alarm.raise_(reason)

    def _nothing(self) -> Handle:
        """Begin an operation that has nothing to move, on any rank."""
        self._alarm.check()
        return FlightHandle(self, LandedFlight(), None)

    def _land(self, flight: Flight, land: Callable[[], None] | None) -> None:
        """Wait for an operation and bring its outcome where it belongs."""
        self._alarm.check()
        failure = None
        self._waiting = True
        try:
            landed = flight.wait(self._alarm)
        except OperationFailed as error:
            failure = str(error)
        finally:
            self._waiting = False
        if failure is not None:
            self._fail(failure)
        if not landed:
            self._alarm.check()
        self._settle(flight)
        if land is not None:
            land()
        self._completed += 1

    def _settle(self, _flight: Flight) -> None:
        """Note that an operation has ended well."""

    def _fail(self, message: str) -> None:
        """Break the communicator because an operation failed, and raise."""
        self._alarm.raise_(f"rank {self.rank} of generation {self.generation}: {message}")
        self._alarm.check()


class FlightHandle:
    """An operation of a communicator. Knows it until it has succeeded."""

    def __init__(
        self, communicator: LandingCommunicator, flight: Flight, land: Callable[[], None] | None
    ) -> None:
        self._communicator: LandingCommunicator | None = communicator
        self._flight: Flight | None = flight
        self._land = land

    def done(self) -> bool:
        """Return whether the operation has ended, or never will."""
        communicator, flight = self._communicator, self._flight
        if communicator is None or flight is None:
            return True
        return communicator._alarm.reason is not None or flight.done()

    def wait(self) -> None:
        """Wait for the operation."""
        communicator, flight = self._communicator, self._flight
        if communicator is None or flight is None:
            return
        communicator._land(flight, self._land)
        self._communicator = self._flight = self._land = None
