"""The sockets that the threads of one client share to get to one door of the controller."""

from __future__ import annotations

import bisect
import operator
import threading
import time
from collections.abc import Callable

import zmq

from dataplane.control.keys import DoorKeys
from dataplane.control.opening import Socket, door_socket
from dataplane.control.waker import Waker
from dataplane.descriptors import enough_for

IDLE_S = 30.0
"""A socket that nobody used for so long is closed."""


class Door:
    """Each call takes a socket of its own and brings it back. There are never more than were taken at one time, and
    those that are not needed any more are closed. Once the door is shut (its service is gone, or the client is
    closing), whoever polls `waker` with its socket wakes, and sockets brought back are closed. Thread-safe."""

    def __init__(self, context: zmq.Context[Socket], endpoint: str, keys: DoorKeys) -> None:
        self.endpoint = endpoint
        self._keys = keys
        self._waker: Waker | None = None
        self.shut = False
        self._context = context
        self._idle: list[tuple[Socket, float]] = []
        self._using = 0
        self._changed = threading.Condition()

    @property
    def waker(self) -> Waker:
        """For those who took a socket."""
        assert self._waker is not None, "nobody took a socket yet"
        return self._waker

    def take(self) -> Socket | None:
        """A socket, the last that was brought back; None once the door is shut. `ServiceUnavailableError`, naming the
        remedy, where the process may have no more open files."""
        with self._changed:
            if self.shut:
                return None
            self._using += 1
            if self._idle:
                return self._idle.pop()[0]
        try:
            with enough_for(self.endpoint):
                with self._changed:
                    self._waker = self._waker or Waker()
                return door_socket(self._context, self.endpoint, self._keys)
        except BaseException:
            with self._changed:
                self._less()
            raise

    def put_back(self, dealer: Socket, *, sound: bool = True) -> None:
        """What was taken. It is closed unless it is `sound`: one that brought no answer may have no connection, which
        others could be short of open files for."""
        with self._changed:
            if sound:
                self._idle.append((dealer, time.monotonic()))
            else:
                dealer.close()
            self._less()

    def serve_idle(self, serve: Callable[[Socket], None], *, idle_s: float = IDLE_S) -> None:
        """Do this with each socket that nobody uses now, one at a time, so that callers find the others; then close
        those that nobody used for `idle_s`, but for one."""
        with self._changed:
            idle = list(self._idle)
        for dealer, since in idle:
            with self._changed:
                if (dealer, since) not in self._idle:
                    continue
                self._idle.remove((dealer, since))
                self._using += 1
            try:
                serve(dealer)
            finally:
                with self._changed:
                    if self._idle and time.monotonic() - since >= idle_s:
                        dealer.close()
                    else:
                        bisect.insort(self._idle, (dealer, since), key=operator.itemgetter(1))
                    self._less()

    def _less(self) -> None:
        self._using -= 1
        if self.shut:
            self._let_go()

    def close(self) -> None:
        """Shut the door: nobody takes a socket any more, and whoever waits for an answer wakes. Does not block."""
        with self._changed:
            if not self.shut:
                self.shut = True
                if self._waker is not None:
                    self._waker.wake()
                self._let_go()

    def wait(self, timeout_s: float) -> int:
        """Until all sockets of a shut door are back and closed; how many are not, after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._using == 0, timeout_s)
            return self._using

    def _let_go(self) -> None:
        for dealer, _ in self._idle:
            dealer.close()
        self._idle.clear()
        if not self._using:
            if self._waker is not None:
                self._waker.close()
            self._changed.notify_all()
