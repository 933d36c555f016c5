"""Who is in: a pure state machine, events in, effects out.

Nothing here reads a clock, starts a thread or opens a connection; the driver is the thin shell
that does. See :class:`~nbelastic.membership.machine.Machine`.
"""

from .effects import (
    Abort,
    Effect,
    End,
    EndRank,
    Notify,
    Publish,
    Record,
    Release,
    RestartWorker,
    StartRank,
)
from .events import (
    Beat,
    Beats,
    ClusterGone,
    Event,
    LimitsChanged,
    LoopDone,
    RankFailed,
    RankFormed,
    RankLeft,
    RankNote,
    RankReady,
    RankReturned,
    SlotBusy,
    SlotGone,
    SlotLeaving,
    SlotsFound,
    SlotSilent,
    StopRequested,
    Tick,
)
from .machine import Machine
from .model import FRESH, Limits, Member, Outcome, Place, Plan, Slot, over
from .placement import arrange, place_of
from .rank import Phase, Stage
from .serial import from_dict, to_dict
from .view import RankView, View, view
from .watch import HELD_UP
from .wire import (
    pack_event,
    pack_place,
    pack_plan,
    unpack_event,
    unpack_place,
    unpack_plan,
)

__all__ = [
    "FRESH",
    "HELD_UP",
    "Abort",
    "Beat",
    "Beats",
    "ClusterGone",
    "Effect",
    "End",
    "EndRank",
    "Event",
    "Limits",
    "LimitsChanged",
    "LoopDone",
    "Machine",
    "Member",
    "Notify",
    "Outcome",
    "Phase",
    "Place",
    "Plan",
    "Publish",
    "RankFailed",
    "RankFormed",
    "RankLeft",
    "RankNote",
    "RankReady",
    "RankReturned",
    "RankView",
    "Record",
    "Release",
    "RestartWorker",
    "Slot",
    "SlotBusy",
    "SlotGone",
    "SlotLeaving",
    "SlotSilent",
    "SlotsFound",
    "Stage",
    "StartRank",
    "StopRequested",
    "Tick",
    "View",
    "arrange",
    "from_dict",
    "over",
    "pack_event",
    "pack_place",
    "pack_plan",
    "place_of",
    "to_dict",
    "unpack_event",
    "unpack_place",
    "unpack_plan",
    "view",
]
