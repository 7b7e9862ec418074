"""Processes that use channels, told what to do through a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.children import START_S

_spawn = multiprocessing.get_context("spawn")


class Peer:
    """A process that runs functions of this package's tests, one after another. `stop` may be called twice."""

    def __init__(self) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._pipe.send((function, arguments))

    def end(self) -> Any:
        """What the function returned; its exception is raised here."""
        assert self._pipe.poll(START_S), "no answer"
        worked, value = self._pipe.recv()
        if not worked:
            raise value
        return value

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.begin(function, *arguments)
        return self.end()

    def said(self) -> Any:
        """What the function under way sent with `say`."""
        assert self._pipe.poll(START_S), "it said nothing"
        return self._pipe.recv()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join(START_S)

    def signal(self, number: int) -> None:
        """Not waited for, but SIGSTOP: until its main thread has run, the others go on."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        if number == signal.SIGSTOP:
            os.waitpid(self._process.pid, os.WUNTRACED)

    def stop(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(START_S)
        self._pipe.close()


_state: dict[str, Any] = {}


def say(value: Any) -> None:
    """From a function of a peer, before it returns."""
    _state["pipe"].send(value)


def kept() -> dict[str, Any]:
    """What functions of one peer leave to the next."""
    return _state


def _serve(pipe: Connection) -> None:
    _state["pipe"] = pipe
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        if order is None:
            return
        function, arguments = order
        try:
            answer = (True, function(*arguments))
        except Exception as error:
            answer = (False, error)
        pipe.send(answer)
