"""The sockets that the threads of one client share to get to one pool of the controller."""

from __future__ import annotations

import bisect
import operator
import threading
import time
import weakref
from collections.abc import Callable

import zmq

from dataplane.client.rpc.handshake import Socket, dealer_socket
from dataplane.core.in_flight import InFlight
from dataplane.core.wakeup import Waker
from dataplane.protocol.fd_limits import enough_for
from dataplane.protocol.server_keys import ConnectionKeys

IDLE_S = 30.0
"""A socket that nobody used for so long is closed."""


class SocketPool:
    """Each call takes a socket of its own and brings it back. There are never more than were taken at one time, and
    those that are not needed any more are closed. Once the pool is shut (its service is gone, or the client is
    closing), whoever polls `waker` with its socket wakes, and sockets brought back are closed. Thread-safe, and sound
    after an interrupt at any place: a socket that was not brought back by then is closed with the pool at the latest.
    """

    def __init__(self, context: zmq.Context[Socket], endpoint: str, keys: ConnectionKeys) -> None:
        self.endpoint = endpoint
        self._keys = keys
        self._waker: Waker | None = None
        self.shut = False
        self._context = context
        self._idle: list[tuple[Socket, float]] = []
        self._sockets: weakref.WeakSet[Socket] = weakref.WeakSet()
        self._using = InFlight()
        self._guard = threading.Lock()

    def __len__(self) -> int:
        """How many sockets there are."""
        with self._guard:
            return sum(not dealer.closed for dealer in self._sockets)

    @property
    def waker(self) -> Waker:
        """For those who took a socket."""
        assert self._waker is not None, "nobody took a socket yet"
        return self._waker

    def take(self, call: threading.Lock) -> Socket | None:
        """A socket, the last that was brought back; None once the pool is shut. `ServiceUnavailableError`, naming the
        remedy, where the process may have no more open files. call: what the caller holds until it is back, by a `with`
        statement (see `InFlight`)."""
        with self._guard:
            if self.shut:
                return None
            self._using.enter(call)
            if self._idle:
                return self._idle.pop()[0]
        try:
            with enough_for(self.endpoint):
                with self._guard:
                    self._waker = self._waker or Waker()
                dealer = dealer_socket(self._context, self.endpoint, self._keys)
        except BaseException:
            self._using.leave(call)
            raise
        with self._guard:
            self._sockets.add(dealer)
        return dealer

    def put_back(self, dealer: Socket, call: threading.Lock, *, sound: bool) -> None:
        """What the call took. It is closed unless it is `sound`: one that brought no answer may have no connection,
        which others could be short of open files for, and one that was interrupted may have sent half a message, which
        the next would become part of."""
        with self._guard:
            if sound and not self.shut:
                self._idle.append((dealer, time.monotonic()))
            else:
                dealer.close()
            self._using.leave(call)

    def serve_idle(self, serve: Callable[[Socket], None], *, idle_s: float = IDLE_S) -> None:
        """Do this with each socket that nobody uses now, one at a time, so that callers find the others; then close
        those that nobody used for `idle_s`, but for one."""
        with self._guard:
            idle = list(self._idle)
        for dealer, since in idle:
            with (call := threading.Lock()):
                with self._guard:
                    if (dealer, since) not in self._idle:
                        continue
                    self._idle.remove((dealer, since))
                    self._using.enter(call)
                sound = False
                try:
                    serve(dealer)
                    sound = True
                finally:
                    with self._guard:
                        needed = not self._idle or time.monotonic() - since < idle_s
                        if sound and needed and not self.shut:
                            bisect.insort(self._idle, (dealer, since), key=operator.itemgetter(1))
                        else:
                            dealer.close()
                        self._using.leave(call)

    def close(self) -> None:
        """Shut the pool: nobody takes a socket any more, and whoever waits for an answer wakes. Does not block."""
        with self._guard:
            self.shut = True
            if self._waker is not None:
                self._waker.wake()
            while self._idle:
                self._idle.pop()[0].close()

    def wait(self, timeout_s: float) -> int:
        """Until all sockets of a shut pool are back and closed; how many are not, after `timeout_s`."""
        using = self._using.wait(timeout_s)
        if not using:
            with self._guard:
                for dealer in list(self._sockets):
                    dealer.close()
                if self._waker is not None:
                    self._waker.close()
        return using
