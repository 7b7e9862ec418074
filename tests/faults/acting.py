"""A process of a storm from the inside: what it writes down, how it is told what to do at which failpoint, and that
nothing fails in it unnoticed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dataplane import DataPlaneError
from dataplane.core import addresses, failpoints

BAD = "BAD"
"""A note that begins so tells of what must never be."""
FAILED = 3
"""Exit code of a process that noted it."""


class Disturbed(Exception):
    """Raised at a failpoint, as a signal's handler may raise in the middle of anything."""


@dataclass(frozen=True)
class Order:
    """What to do when the failpoint is reached for the `nth` time: how is "kill", "stop", "raise" or "cancel"."""

    at: str
    how: str
    nth: int = 1


REST_S = 0.01


class Actor:
    """This process. `shared`: [operations done, orders carried out, whether all are to rest]."""

    def __init__(self, name: str, folder: str, shared: Any) -> None:
        self.name = name
        self.folder = Path(folder)
        self.cancel: Callable[[], object] = lambda: None
        self._shared = shared
        self._fd = os.open(self.folder / f"{name}.notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, *words: object) -> None:
        """Write down a line: it is there, whole, when this returns."""
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())

    def has_done_something(self) -> None:
        """Count an operation; rest while all are to."""
        self._shared[0] += 1
        while self._shared[2]:
            time.sleep(REST_S)

    async def has_done_something_async(self) -> None:
        """The same where the event loop has to go on: a call that was given up is cleaned up after there."""
        self._shared[0] += 1
        while self._shared[2]:
            await asyncio.sleep(REST_S)

    def obey(self, order: Order) -> None:
        """Carry it out when its place is reached."""
        passing = itertools.count(1)

        def act() -> None:
            if next(passing) != order.nth:
                return
            failpoints.disarm()
            self._shared[1] += 1
            match order.how:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "cancel":
                    self.cancel()
                case _:
                    raise Disturbed(order.at)

        failpoints.disarm()
        failpoints.arm(order.at, act)

    def fail(self, why: str) -> None:
        """Note what must never be, and end."""
        self.note(BAD, repr(why))
        os._exit(FAILED)


class _Watch(logging.Handler):
    """Keeps what is logged; an exception that was caught for want of better ends the process."""

    def __init__(self, actor: Actor) -> None:
        super().__init__(logging.INFO)
        self._actor = actor
        self._file = open(actor.folder / f"{actor.name}.log", "a", encoding="utf-8")  # noqa: SIM115 - for ever
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=self._file, flush=True)
        if record.exc_info and not isinstance(record.exc_info[1], Disturbed):
            self._actor.fail(self.format(record))


def begin(name: str, folder: str, shared: Any, orders: list[Order], lives_on: str = "") -> Actor:
    """This process is an actor from now on. lives_on: the host it is to take itself to be on."""
    actor = Actor(name, folder, shared)
    watch = _Watch(actor)
    for package in ("dataplane", "workers"):
        logging.getLogger(package).addHandler(watch)
        logging.getLogger(package).setLevel(logging.INFO)
    threading.excepthook = lambda gone: actor.fail("".join(traceback.format_exception(gone.exc_value)))
    if lives_on:
        _live_on(lives_on)
    for order in orders:
        actor.obey(order)
    return actor


def _live_on(name: str) -> None:
    real = addresses.boot_id
    for module in list(sys.modules.values()):
        if getattr(module, "boot_id", None) is real:
            module.boot_id = lambda: name  # type: ignore[attr-defined]


def play(pipe: Connection, name: str, folder: str, shared: Any, orders: list[Order], act: Any, *arguments: Any) -> None:
    """Runs a client's process: `act(actor, *arguments)` again and again, while orders come through the pipe.
    The last argument is its role."""
    actor = begin(name, folder, shared, orders, arguments[-1].host)
    threading.Thread(target=_listen, args=(pipe, actor), daemon=True).start()
    try:
        while True:
            try:
                act(actor, *arguments)
            except (DataPlaneError, Disturbed) as error:
                failed(actor, error)
                time.sleep(0.05)
    except BaseException:
        actor.fail(traceback.format_exc())


def failed(actor: Actor, error: Exception) -> None:
    """An operation ended with an error that has a name, as it may. An internal error is a failure of the service, which
    its own log tells of."""
    actor.note("error", type(error).__name__)


def _listen(pipe: Connection, actor: Actor) -> None:
    with contextlib.suppress(EOFError):  # the storm is over
        while True:
            actor.obey(pipe.recv())


def serve(pipe: Connection, actor: Actor, start: Callable[[], object]) -> None:
    """Runs a process of the service: sends what `start` returns through the pipe, then carries out orders."""
    try:
        pipe.send(start())
        _listen(pipe, actor)
    except BaseException:
        actor.fail(traceback.format_exc())
