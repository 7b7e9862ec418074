"""`tq` with any arguments, in this process: nothing of it reaches a network, and no file but in a folder of its own."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import tempfile
from collections.abc import Iterator
from unittest import mock

from dataplane import cli
from dataplane.config import DataPlaneConfig
from dataplane.core.addresses import require_guard_beyond_loopback, split_address
from dataplane.errors import ServiceUnavailableError
from tests.fuzz.target import Feed, FindingError, Target

WORDS = (
    *("serve", "unit", "status", "checkpoint", "restore", "top", "ls", "show", "why", "clear", "drop", "drain"),
    *("--token-file", "--host", "--capacity", "--arena-dir", "--state-dir", "--port", "--units", "--name"),
    *("--reconnect", "--until-stdin-closes", "--json", "--partition", "--replace", "--help"),
    *("--address", "--where", "--once"),
    *("127.0.0.1:1", "::1", "0.0.0.0", "host:99999", "actor:x@y", "[::1", ""),
    *("4g", "1e400", "nan", "inf", "-1", "0", "99999999999999999999", "0x10", "1_0", "4GiB", "token", "."),
)
"""An input names some of these by number; 255 is followed by a word of its own, up to the next 255."""
OWN_WORD = 255


def command_lines(data: bytes) -> None:
    """Ends with a code, and says one thing on stderr where that is not 0."""
    arguments = list(_arguments(Feed(data)))
    told = io.StringIO()
    with _fenced(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
        code = cli.main(arguments)
    if code not in (0, 1, 2) or (code and not told.getvalue()):
        raise FindingError(f"{arguments} ended with {code!r}, saying {told.getvalue()!r}")


def _arguments(feed: Feed) -> Iterator[str]:
    while feed:
        number = feed.number(256)
        if number != OWN_WORD:
            yield WORDS[number % len(WORDS)]
            continue
        word = bytearray()
        while feed and (byte := feed.number(256)) != OWN_WORD:
            word.append(byte)
        yield os.fsdecode(bytes(word).replace(b"/", b"."))


class _Unreachable:
    """Stands for a controller, a storage unit and a client: takes what it is given apart, and is not there."""

    def __init__(self, config: DataPlaneConfig, address: str | None = None, *, name: str | None = None) -> None:
        token = config.secret()
        require_guard_beyond_loopback(config.host, guarded=token is not None)
        for each in (address, config.address):
            if each is not None and not each.startswith("actor:"):
                split_address(each)
        raise ServiceUnavailableError(address=str(address or config.address), why="this is a test")


@contextlib.contextmanager
def _fenced() -> Iterator[None]:
    """No signal handlers, no processes, no services, another directory."""
    home = os.open(".", os.O_RDONLY)
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory())
        ends.callback(os.close, home)
        ends.callback(os.fchdir, home)
        os.chdir(folder)
        with open("token", "w") as file:
            file.write("sesame")
        for name, stand_in in (
            ("dataplane.controller.controller.Controller", _Unreachable),
            ("dataplane.storage.unit.StorageUnit", _Unreachable),
            ("dataplane.client.rpc.channel.ControllerChannel.open", _Unreachable),
            ("dataplane.DataPlaneClient", _Unreachable),
            ("sys.stdin", io.StringIO()),
            ("signal.signal", lambda number, handler: signal.SIG_DFL),
        ):
            ends.enter_context(mock.patch(name, stand_in))
        ends.enter_context(mock.patch.dict(os.environ, {"TQ_TOKEN": "", "TQ_ADDRESS": "", "HOME": folder}))
        yield


def seeds() -> list[bytes]:
    lines = [
        ["serve", "--host", "127.0.0.1", "--capacity", "4g", "--port", "0", "--units", "-1"],
        ["serve", "--capacity", "1e400"],
        ["unit", "127.0.0.1:1", "--reconnect", "nan", "--name", "x", "--until-stdin-closes"],
        ["status", "host:99999", "--json", "--token-file", "token"],
        ["checkpoint", "127.0.0.1:1", "path", "--partition", "train"],
        ["restore", "path", "--replace", "--token-file", "."],
        ["--help"],
    ]
    return [b"".join(map(_word, line)) for line in lines]


def _word(word: str) -> bytes:
    return bytes([WORDS.index(word)]) if word in WORDS else b"\xff" + word.encode() + b"\xff"


TARGETS = [Target(name="command-lines", run=command_lines, seeds=seeds, allowed=(), examples=150)]
