"""Which peers' engines can be reached. To find out may take a minute, so threads of their own do, and nobody waits."""

from __future__ import annotations

import threading
import time

from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.transport.mooncake.slots import Slots

TRIAL_S = 10.0
TRIALS = 8
"""Peers tried at once; the next one has its turn when it is asked about again."""
RETRY_S = 30.0
"""A peer that was not reached is not tried again for so long."""
KEPT = 4096
"""Peers remembered, those who came first forgotten first."""


class Contacts:
    """Thread-safe."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._reached: dict[str, bool] = {}
        self._retry_at: dict[str, float] = {}
        self._trying: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = False

    def ready(self, source: pb.Memory) -> bool:
        """Whether the peer whose memory this is was reached. If that is not known, it is being tried from now on."""
        peer = source.engine
        with self._lock:
            if self._reached.get(peer):
                return True
            if peer in self._trying or self._closed or len(self._trying) >= TRIALS:
                return False
            if time.monotonic() < self._retry_at.get(peer, 0.0):
                return False
            # No daemon: one that comes back from the library while the interpreter ends would end it the hard way.
            thread = threading.Thread(target=self._try, args=(source,), name="tq-engine-trial")
            self._trying[peer] = thread
        thread.start()
        return False

    def _try(self, source: pb.Memory) -> None:
        reached = False
        try:
            reached = self._slots.try_peer(source, time.monotonic() + TRIAL_S)
        finally:
            self._note(source.engine, reached)
            with self._lock:
                del self._trying[source.engine]

    def failed(self, peer: str) -> None:
        """A transfer from it failed: it has to be tried again, later."""
        self._note(peer, False)

    def _note(self, peer: str, reached: bool) -> None:
        with self._lock:
            self._reached[peer] = reached
            self._retry_at[peer] = time.monotonic() + RETRY_S
            while len(self._reached) > KEPT:
                forgotten = next(iter(self._reached))
                del self._reached[forgotten], self._retry_at[forgotten]

    def wait(self, timeout_s: float) -> None:
        """Until the trials under way now have ended, or `timeout_s` is over."""
        until = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._trying.values())
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def close(self, timeout_s: float) -> bool:
        """Try nobody any more; whether no trial is under way."""
        with self._lock:
            self._closed = True
        self.wait(timeout_s)
        with self._lock:
            return not self._trying
