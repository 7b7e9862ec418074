"""Which files of the package a call enters: on the client, and in the controller for each of the call's commands.

The rule leaves nothing to timing. On the client, only the calling thread counts, from the call to its return. In the
controller, only frames below `ZmqServer.serve` count, which receives, applies and answers one message, and only if
that message is a command that the calling thread sent: ticks, reports of units, heartbeats and commands of other
threads do not. Finalizers run where the garbage collector happens to start, so it is off during the call.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import dataplane
from dataplane.controller.zmq_server import ZmqServer
from dataplane.ledger.commands import Call

PACKAGE = Path(dataplane.__file__).parent.as_posix() + "/"
GENERATED = "protocol/pb/"
PATIENCE_S = 120.0

T = TypeVar("T")

Files = dict[str, None]
"""Paths below the package, in the order in which they are entered."""
Key = tuple[int, int]
"""Session and number of a command."""


def file_of(code: CodeType) -> str:
    """Return the path below the package, or "" for other and for generated code."""
    path = code.co_filename.removeprefix(PACKAGE)
    return "" if path == code.co_filename or path.startswith(GENERATED) else path


@dataclass
class Entered:
    """What one call entered. `commands` are the names of its commands, in the order in which they were sent."""

    client: list[str]
    controller: list[str]
    commands: list[str]


@dataclass
class _Request:
    """A message that the controller handles, or handled: the command in it, and the files entered so far."""

    top: FrameType | None
    command: Call | None = None
    files: Files = field(default_factory=dict)


class Controller:
    """A profile function for the threads of a service. It records every command that the service handles."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._handled: dict[Key, _Request] = {}
        self._current: dict[int, _Request] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Install this function in the threads that start meanwhile, then restore the function that was installed."""
        before = threading.getprofile()
        threading.setprofile(self)
        try:
            yield
        finally:
            threading.setprofile(before)

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        request = self._current.get(threading.get_ident())
        if event == "call":
            if request is None:
                if frame.f_code is not ZmqServer.serve.__code__:
                    return
                request = self._current[threading.get_ident()] = _Request(frame)
            if path := file_of(frame.f_code):
                request.files.setdefault(path)
        elif event == "return" and request is not None:
            if isinstance(result, Call):  # the decoded message
                request.command = result
            if frame is request.top:
                del self._current[threading.get_ident()]
                self._keep(request)

    def _keep(self, request: _Request) -> None:
        request.top, command = None, request.command
        if command is not None:
            with self._changed:
                # A command that was resent is handled twice.
                known = self._handled.setdefault((command.session, command.call_id), request)
                known.files |= request.files
                self._changed.notify_all()

    def files(self, keys: list[Key]) -> Files:
        """Return the files that these commands entered, after waiting until all of them are handled."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._handled.keys() >= set(keys), PATIENCE_S)
            assert done, f"the service handled {sorted(self._handled)}, not all of {keys}"
            return {path: None for key in keys for path in self._handled[key].files}


class _Client:
    """A profile function for the calling thread. It records the files, and the commands that the call sends."""

    def __init__(self) -> None:
        self.files: Files = {}
        self.sent: dict[Key, Call] = {}

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        if event == "call":
            if path := file_of(frame.f_code):
                self.files.setdefault(path)
        elif event == "return" and isinstance(result, Call):  # a command
            self.sent.setdefault((result.session, result.call_id), result)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the garbage collector off, if it is on."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def entered(controller: Controller, call: Callable[[], T]) -> tuple[T, Entered]:
    """Run the call; return its result and the files that it entered. Waits until the service has handled all of its
    commands, also those whose answer the call does not await. The profile function of this thread is restored."""
    client, before = _Client(), sys.getprofile()
    with _without_collector():
        sys.setprofile(client)
        try:
            result = call()
        finally:
            sys.setprofile(before)
        files = controller.files(list(client.sent))
    commands = [type(sent.command).__name__ for sent in client.sent.values()]
    return result, Entered(client=list(client.files), controller=list(files), commands=commands)
