"""What a worker knows of the workers with which it exchanges messages."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PeerState(enum.Enum):
    """What this worker knows of a peer. UNKNOWN: the next operation looks it up; LOOKUP: this waits for the directory's
    answer; ALIVE: the peer is registered, and the directory reports its end."""

    UNKNOWN = enum.auto()
    LOOKUP = enum.auto()
    ALIVE = enum.auto()


@dataclass
class Peer:
    """A worker with which messages are exchanged. incarnation: that of its latest message or directory entry."""

    state: PeerState = PeerState.UNKNOWN
    incarnation: int = 0
    endpoint: str = ""
