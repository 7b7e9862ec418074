"""A controller whose ledger does what a test tells it, and channels to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dataplane.client.rpc import async_channel, handshake, pending_calls
from dataplane.client.rpc import channel as sync_channel
from dataplane.client.rpc.channel import ControllerChannel
from dataplane.config import DataPlaneConfig
from dataplane.controller.controller import Controller
from dataplane.errors import DataPlaneError
from dataplane.ledger import commands as c
from tests.restarts import NO_HEARTBEATS, WAIT_S

QUICK = DataPlaneConfig(heartbeat_s=0.1, connect_timeout_s=60.0, call_timeout_s=60.0)
NEVER_S = 600.0
STILL = replace(QUICK, **NO_HEARTBEATS)
"""No heartbeat comes, so none is late on a busy machine, which would have the session looked for and calls repeated."""

Open = Callable[..., ControllerChannel]
Answer = Callable[[c.Call], c.Result | DataPlaneError | None]


def done(call: c.Call) -> c.Result:
    return c.Done()


class ScriptedLedger:
    """Answers calls as `answer` says (None: not now), opens sessions and adds units, and keeps what it was given.
    `ended` is what a session that would go on is told."""

    def __init__(self, answer: Answer = done, *, epoch: int = 1) -> None:
        self.answer = answer
        self.epoch = epoch
        self.ended: DataPlaneError | None = None
        self.inputs: list[c.Input] = []
        self.ticks = 0
        self.deadline: float | None = None
        self.live_bytes = 0
        self.min_heartbeat_s = 0.0
        self._changed = threading.Condition()

    def apply(self, item: c.Input) -> list[c.Output]:
        with self._changed:
            if isinstance(item, c.Tick):
                self.ticks += 1
                if self.deadline is not None and self.deadline <= item.now:
                    self.deadline = None
            else:
                self.inputs.append(item)
            answer = self.answer  # who has waited for this input may set another at once
            self._changed.notify_all()
        match item:
            case c.Call():
                result = answer(item)
                return [] if result is None else [c.Answer(session=item.session, call_id=item.call_id, result=result)]
            case c.OpenSession() if item.session and self.ended is not None:
                return [c.Opened(nonce=item.nonce, error=self.ended)]
            case c.OpenSession():
                return [c.Opened(nonce=item.nonce, session=1, epoch=self.epoch)]
            case c.AddUnit():
                return [c.UnitAdded(cookie=item.cookie, unit=1)]
        return []

    def inspect(self, command: c.Command) -> c.Result:
        result = self.answer(c.Call(session=0, call_id=0, watermark=0, command=command))
        if isinstance(result, DataPlaneError):
            raise result
        assert result is not None
        return result

    def next_deadline(self) -> float | None:
        return self.deadline

    def wait_until(self, come: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        """Until `come()`, looked at after each input."""
        with self._changed:
            assert self._changed.wait_for(come, timeout_s)

    def of(self, kind: type[Any]) -> list[Any]:
        """The inputs of one type, or the calls with one type of command, so far."""
        with self._changed:
            return self._of(kind)

    def _of(self, kind: type[Any]) -> list[Any]:
        if issubclass(kind, c.Command):
            return [item for item in self.inputs if isinstance(item, c.Call) and isinstance(item.command, kind)]
        return [item for item in self.inputs if isinstance(item, kind)]

    def wait_for(self, kind: type[Any], count: int = 1, timeout_s: float = WAIT_S) -> list[Any]:
        """Those inputs, once there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._of(kind)) >= count, timeout_s), f"no {kind.__name__} came"
            return self._of(kind)


def add_unit(cookie: str = "cookie", name: str = "unit") -> c.AddUnit:
    return c.AddUnit(
        name=name,
        host="host",
        epoch=1,
        cookie=cookie,
        capacity_bytes=1 << 20,
        backed_bytes=1 << 20,
        endpoints=("tcp://127.0.0.1:1",),
        arena_path="/dev/null",
    )


@pytest.fixture
def open_channel() -> Iterator[Open]:
    """Opens channels to a controller; they are closed afterwards."""
    channels: list[ControllerChannel] = []

    def connect(controller: Controller, **changes: object) -> ControllerChannel:
        config = replace(QUICK, address=controller.address, **changes)  # type: ignore[arg-type]
        channels.append(ControllerChannel.open(config))
        return channels[-1]

    yield connect
    for channel in channels:
        channel.close()


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine does not make a channel resend a call, try another endpoint, or end without a confirmed goodbye.
    `STILL` does the same for its heartbeats."""
    monkeypatch.setattr(pending_calls, "RESEND_S", NEVER_S)
    monkeypatch.setattr(handshake, "IPC_WAIT_S", 60.0)
    for module in (sync_channel, async_channel):
        monkeypatch.setattr(module, "CLOSE_S", 60.0)


@pytest.fixture
def ledger() -> ScriptedLedger:
    return ScriptedLedger()


@pytest.fixture
def scripted(ledger: ScriptedLedger) -> Iterator[Controller]:
    with Controller(STILL, ledger=ledger, epoch=ledger.epoch) as controller:
        yield controller
