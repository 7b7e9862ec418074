"""Reachability of peers' engines. A trial may take a minute, so it runs in a background thread and blocks no caller."""

from __future__ import annotations

import threading
import time

from dataplane.core.bounded import Bounded
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.transport.mooncake.slots import Slots

TRIAL_S = 10.0  # timeout of the read of a trial; its first contact may block longer
TRIALS = 8
"""Maximum number of concurrent trials. Another peer is tried at a later call of `ready`."""
RETRY_S = 30.0
"""Minimum time between trials of an unreachable peer."""
KEPT = 4096
"""Maximum number of recorded peers; the oldest entries are dropped first."""


class Contacts:
    """The reachable and unreachable peers of one engine. Thread-safe."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        # Both by the address of the peer's engine. Peers that were never tried have no entry.
        # When an unreachable peer may be tried again; None if the last contact reached it.
        self._retry_at: Bounded[str, float | None] = Bounded(KEPT)
        self._trials: dict[str, threading.Thread] = {}  # those that run
        self._lock = threading.Lock()
        self._closed = False

    def ready(self, source: pb.Memory) -> bool:
        """Return whether the last contact with the peer that owns `source` reached it. Start a trial if there was none,
        or if it failed `RETRY_S` ago or earlier."""
        peer = source.engine
        with self._lock:
            retry_at = self._retry_at.get(peer, 0.0)
            if retry_at is None:
                return True
            if peer in self._trials or self._closed or len(self._trials) >= TRIALS:  # no trial can start now
                return False
            if time.monotonic() < retry_at:  # it was unreachable a short time ago
                return False
            # No daemon: a daemon thread that returns from the library during interpreter exit would crash the process.
            thread = threading.Thread(target=self._run_trial, args=(source,), name="tq-engine-trial")
            self._trials[peer] = thread
        thread.start()
        return False

    def _run_trial(self, source: pb.Memory) -> None:
        """Try to read `source` and record whether its peer was reached. Runs in a thread of its own."""
        reached = False
        try:
            reached = self._slots.try_peer(source, time.monotonic() + TRIAL_S)
        finally:
            self._record_result(source.engine, reached)
            with self._lock:
                del self._trials[source.engine]

    def failed(self, peer: str) -> None:
        """Mark the peer as unreachable after a failed transfer; it is tried again after `RETRY_S`."""
        self._record_result(peer, reached=False)

    def _record_result(self, peer: str, reached: bool) -> None:
        """Record whether the peer is reachable."""
        with self._lock:
            self._retry_at.store(peer, None if reached else time.monotonic() + RETRY_S)

    def wait(self, timeout_s: float) -> None:
        """Block until the running trials have ended, for at most `timeout_s`."""
        until = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._trials.values())
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def close(self, timeout_s: float) -> bool:
        """Start no further trials and wait for up to `timeout_s`. Return whether no trial is running."""
        with self._lock:
            self._closed = True
        self.wait(timeout_s)
        with self._lock:
            return not self._trials
