"""The sockets that the threads of one client share to get to one door of the controller."""

from __future__ import annotations

import threading

import zmq

from dataplane.control.keys import DoorKeys
from dataplane.control.opening import Socket, door_socket
from dataplane.control.waker import Waker


class Door:
    """Each call takes a socket of its own and brings it back. Once the door is shut (its service is gone, or the client
    is closing), whoever polls `waker` with its socket wakes, and sockets brought back are closed. Thread-safe."""

    def __init__(self, context: zmq.Context[Socket], endpoint: str, keys: DoorKeys) -> None:
        self.endpoint = endpoint
        self._keys = keys
        self.waker = Waker()
        self.shut = False
        self._context = context
        self._idle: list[Socket] = []
        self._using = 0
        self._changed = threading.Condition()

    def take(self) -> Socket | None:
        """A socket; None once the door is shut."""
        with self._changed:
            if self.shut:
                return None
            self._using += 1
            if self._idle:
                return self._idle.pop()
        try:
            return door_socket(self._context, self.endpoint, self._keys)
        except BaseException:
            with self._changed:
                self._less()
            raise

    def take_idle(self) -> list[Socket]:
        """Every socket that nobody uses now; none once the door is shut."""
        with self._changed:
            idle, self._idle = self._idle, []
            self._using += len(idle)
            return idle

    def put_back(self, dealer: Socket) -> None:
        """What was taken."""
        with self._changed:
            self._idle.append(dealer)
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
                self.waker.wake()
                self._let_go()

    def wait(self, timeout_s: float) -> int:
        """Until all sockets of a shut door are back and closed; how many are not, after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._using == 0, timeout_s)
            return self._using

    def _let_go(self) -> None:
        for dealer in self._idle:
            dealer.close()
        self._idle.clear()
        if not self._using:
            self.waker.close()
            self._changed.notify_all()
