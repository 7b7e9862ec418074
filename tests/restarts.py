"""A service whose controller restarts while its storage units keep running, and a network that fails."""

from __future__ import annotations

import contextlib
import selectors
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dataplane.config import MIB, DataPlaneConfig
from dataplane.controller.controller import Controller
from dataplane.core.addresses import lasting_port
from dataplane.core.ports import require_free_port
from dataplane.storage.unit import StorageUnit

WAIT_S = 60.0
CONFIG = DataPlaneConfig(
    capacity_bytes=16 * MIB,
    heartbeat_s=0.1,
    session_timeout_s=30.0,
    call_timeout_s=WAIT_S,
    connect_timeout_s=WAIT_S,  # what tests/conftest.py sets for all others comes too late for this one
    reconnect_s=WAIT_S,
)
NO_HEARTBEATS: dict[str, Any] = {"heartbeat_s": 600.0, "session_timeout_s": 6000.0}
"""No heartbeat comes while a test runs, so on a busy machine none comes too late."""


def wait_until(come: Callable[[], Any], what: str | Callable[[], str] = "", within_s: float = WAIT_S) -> Any:
    """Call `come` until its result is true, and return that. With the default limit it is called a hundred times a
    second, with a longer one less often. what: the awaited event, for the error."""
    end = time.monotonic() + within_s
    while not (found := come()):
        assert time.monotonic() < end, f"waited {within_s} s for {_text(what, come)}; the last answer was {found!r}"
        time.sleep(0.01 * within_s / WAIT_S)
    return found


def _text(what: str | Callable[[], str], come: Callable[[], Any]) -> str:
    if callable(what):
        return what()
    code = getattr(come, "__code__", None)
    return what or (f"{code.co_filename}:{code.co_firstlineno}" if code else repr(come))


class RestartableService:
    """A controller that can be stopped and started again on the state in `state_dir`, at the same port. `unit` starts a
    storage unit, which keeps running without the controller."""

    def __init__(self, state_dir: Path, config: DataPlaneConfig = CONFIG) -> None:
        self.state_dir = state_dir
        self.config = config
        self.controller: Controller | None = None
        self.units: list[StorageUnit] = []
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, *, durable: bool = True, elsewhere: bool = False) -> Controller:
        """Start the controller, on the port of its last run unless `elsewhere`."""
        state_dir = str(self.state_dir) if durable else None
        config = replace(self.config, state_dir=state_dir)
        for port in range(self.port + 2, 65000, 2) if elsewhere else [self.port]:
            try:
                self.controller = Controller(replace(config, port=port)).start()
                break
            except OSError:
                if not elsewhere:
                    raise
        assert self.controller is not None
        self.port = int(self.controller.address.rpartition(":")[2])
        return self.controller

    def stop(self) -> None:
        controller, self.controller = self.controller, None
        if controller is not None:
            controller.stop()

    def restart(self) -> None:
        self.stop()
        self.start()

    def forget(self) -> None:
        """Delete the controller's state."""
        shutil.rmtree(self.state_dir)

    def unit(self, address: str = "", **settings: Any) -> StorageUnit:
        config = replace(self.config, **settings)
        self.units.append(StorageUnit(config, address or self.address, name=f"unit{len(self.units)}").start())
        return self.units[-1]

    def close(self) -> None:
        with contextlib.ExitStack() as ends:
            ends.callback(self.stop)
            for unit in self.units:
                ends.callback(unit.stop)


@contextlib.contextmanager
def one_unit(state_dir: Path) -> Iterator[RestartableService]:
    """A service without a state directory, with one storage unit; tests start more."""
    restartable = RestartableService(state_dir)
    try:
        restartable.start(durable=False)
        restartable.unit()
        yield restartable
    finally:
        restartable.close()


class Proxy:
    """Forwards TCP connections from `port` and the ports after it to `targets`, in this order. `pause` stops the
    forwarding, without a notice to either end. `cut` closes all connections and refuses new ones. `heal` reverts
    both; paused connections continue. No other process gets the ports meanwhile."""

    def __init__(self, *targets: int) -> None:
        self.port = _free_ports(len(targets))
        self._targets = dict(enumerate(targets, self.port))
        self._held = [self._bound(port) for port in self._targets]
        self._listeners: dict[socket.socket, int] = {}
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._listen()
        self.carried: Callable[[bytes], None] = lambda content: None
        """Called with what was forwarded."""
        self._state = "healthy"
        self._wanted = "healthy"
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @staticmethod
    def _bound(port: int) -> socket.socket:
        """A socket that does not listen. While it is open, the kernel gives the port to no other process."""
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
        return bound

    def _listen(self) -> None:
        for port, target in self._targets.items():
            listener = self._bound(port)
            listener.listen()
            self._listeners[listener] = target
            self._selector.register(listener, selectors.EVENT_READ)

    def pause(self) -> None:
        self._become("paused")

    def cut(self) -> None:
        self._become("cut")

    def heal(self) -> None:
        self._become("healthy")

    def close(self) -> None:
        self._become("closed")
        self._thread.join(WAIT_S)
        for each in self._held:
            each.close()

    def _become(self, state: str) -> None:
        with self._changed:
            self._wanted = state
            assert self._changed.wait_for(lambda: self._state == state, WAIT_S)

    def _run(self) -> None:
        while self._state != "closed":
            if self._wanted != self._state:
                self._enter(self._wanted)
            if self._state == "healthy":
                for key, _ in self._selector.select(0.01):
                    assert isinstance(key.fileobj, socket.socket)
                    self._carry(key.fileobj)
            else:
                time.sleep(0.01)

    def _enter(self, state: str) -> None:
        if state in ("cut", "closed"):
            for each in [*self._pairs, *self._listeners]:
                self._drop(each)
            self._pairs.clear()
            self._listeners.clear()
        elif not self._listeners:
            self._listen()
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def _drop(self, each: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(each)
        each.close()

    def _carry(self, source: socket.socket) -> None:
        if source in self._listeners:
            near, _ = source.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self._listeners[source]))
            except OSError:
                near.close()
                return
            self._pairs |= {near: far, far: near}
            for each in (near, far):
                self._selector.register(each, selectors.EVENT_READ)
            return
        other = self._pairs.get(source)
        if other is None:
            return
        try:
            content = source.recv(1 << 16)
            other.sendall(content)
            self.carried(content)
        except OSError:
            content = b""
        if not content:
            for each in (source, other):
                self._pairs.pop(each)
                self._drop(each)


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    while True:
        first = lasting_port()
        with contextlib.suppress(OSError):
            for port in range(first, first + count):
                require_free_port("127.0.0.1", port)
            return first
