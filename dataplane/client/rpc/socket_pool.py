"""A pool of sockets to one controller endpoint, shared by the threads of one client."""

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
"""A socket that is unused for this time is closed."""


class SocketPool:
    """The sockets of one client to one endpoint of the controller. Each call takes its own socket and returns it. The
    pool grows only to the number of sockets in use at one time and closes sockets that are no longer needed. When the
    pool is shut (its service is lost or the client is closing), all callers that poll `waker` with their socket wake
    up, and returned sockets are closed. Thread-safe, and consistent after an interrupt at any point: a socket that was
    not returned is closed with the pool at the latest.

    `_sockets` are all sockets, in use or idle; `_using` are the calls that use one. `_waker` is created with the first
    socket.
    """

    def __init__(self, context: zmq.Context[Socket], endpoint: str, keys: ConnectionKeys) -> None:
        self.endpoint = endpoint
        self._keys = keys
        self._waker: Waker | None = None
        self.shut = False
        self._context = context
        self._idle: list[tuple[Socket, float]] = []
        """Returned sockets and the times of their return, oldest first."""
        self._sockets: weakref.WeakSet[Socket] = weakref.WeakSet()
        self._using = InFlight()
        self._guard = threading.Lock()

    def __len__(self) -> int:
        """Return the number of open sockets."""
        with self._guard:
            return sum(not dealer.closed for dealer in self._sockets)

    @property
    def waker(self) -> Waker:
        """The waker to poll together with a socket."""
        assert self._waker is not None, "no socket was taken yet"
        return self._waker

    def take(self, call: threading.Lock) -> Socket | None:
        """Return the most recently returned socket, or a new one; None after the pool is shut. Raise
        `ServiceUnavailableError`, naming the remedy, if the process has no free file descriptors. call: lock that
        the caller holds, by a `with` statement, until it returns the socket (see `InFlight`)."""
        with self._guard:
            if self.shut:
                return None
            self._using.enter(call)  # before the socket exists, so that `wait` does not miss this call
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
        return dealer  # even if the pool was shut in the meantime: `put_back` then closes it

    def put_back(self, dealer: Socket, call: threading.Lock, *, sound: bool) -> None:
        """Return the socket of the call. It is closed unless it is `sound`: a socket without a response may have no
        connection and hold a scarce file descriptor; an interrupted one may have sent half a message, which would
        corrupt the next one."""
        with self._guard:
            if sound and not self.shut:
                self._idle.append((dealer, time.monotonic()))
            else:
                dealer.close()
            self._using.leave(call)

    def serve_idle(self, serve: Callable[[Socket], None], *, idle_s: float = IDLE_S) -> None:
        """Call `serve` with each idle socket, one at a time, so that callers can take the others. A served socket is
        idle again. It is closed instead if `serve` failed, the pool was shut in the meantime, or the socket was unused
        for `idle_s` and is not the only idle one."""
        with self._guard:
            idle = list(self._idle)
        for dealer, since in idle:  # a socket, and the time of its return
            with (call := threading.Lock()):
                with self._guard:
                    if (dealer, since) not in self._idle:  # a caller has taken it
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
                            # With its old time: serving a socket does not count as a use.
                            bisect.insort(self._idle, (dealer, since), key=operator.itemgetter(1))
                        else:
                            dealer.close()
                        self._using.leave(call)

    def close(self) -> None:
        """Shut the pool: no caller can take a socket, and callers that wait for a response wake up. Do not block."""
        with self._guard:
            self.shut = True
            if self._waker is not None:
                self._waker.wake()
            while self._idle:
                self._idle.pop()[0].close()

    def wait(self, timeout_s: float) -> int:
        """Wait up to `timeout_s` until no call uses a socket of a shut pool. Then close the waker, and the sockets that
        an interrupt kept from being returned. Return the number of sockets still in use; if it is not 0, nothing is
        closed."""
        using = self._using.wait(timeout_s)
        if not using:
            with self._guard:
                for dealer in list(self._sockets):
                    dealer.close()
                if self._waker is not None:
                    self._waker.close()
        return using
