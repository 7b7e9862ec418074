"""Two hosts on one machine: each has a network, a boot id and shared memory of its own, and a cable joins them.

Needs root, `unshare`, `nsenter`, `ip` and /dev/net/tun; `missing` says what of that is not there.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Self

from tests.faults.cable import DEVICE

WAIT_S = 60.0
TOKEN = "of-the-hosts"
_ROOT = Path(__file__).parent.parent.parent
_BECOME_A_HOST = (
    "mount --bind {boot_id} /proc/sys/kernel/random/boot_id && mount -t tmpfs -o size=256m tmpfs /dev/shm && "
    "ip link set lo up && echo ready && exec sleep infinity"
)


def missing() -> str:
    """What this machine lacks to have hosts; "" if nothing."""
    lacking = [tool for tool in ("unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]
    if lacking:
        return f"no {lacking[0]}"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no /dev/net/tun"
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "no right to make namespaces"


_libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    """This process is killed when the one that started it ends, however that does."""
    _libc.prctl(1, signal.SIGKILL)


class Running:
    """A process with lines in and out."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._log = log.open("wb")
        environment = {**os.environ, "TQ_TOKEN": TOKEN, "PYTHONPATH": str(_ROOT)}
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            cwd=_ROOT,
            preexec_fn=end_with_parent,
        )

    def line(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended: {Path(self._log.name).read_text()[-2000:]}"
        return line.strip()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Ask it to end, and see to it that it does."""
        self.process.terminate()
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self._log.close()


class Guest:
    """A client's process on a host; see `guest`."""

    def __init__(self, running: Running) -> None:
        self.running = running

    def ready(self) -> None:
        """Wait until it is."""
        assert json.loads(self.running.line()) == "ready"

    def begin(self, code: str) -> None:
        """Have it evaluate an expression."""
        self.running.say(f"result = {code}")

    def answer(self) -> Any:
        """What came of it. AssertionError for an error there."""
        said = json.loads(self.running.line())
        assert "error" not in said, said
        return said["result"]

    def error(self) -> str:
        """The name of the error it ended with."""
        said = json.loads(self.running.line())
        assert "error" in said, said
        return str(said["error"])

    def do(self, code: str) -> Any:
        self.begin(code)
        return self.answer()


class Host:
    """A host at `address`. What runs there ends with it."""

    def __init__(self, folder: Path, number: int) -> None:
        self.address = f"10.91.0.{number}"
        self._folder = folder
        self._count = 0
        self.boot_id = str(uuid.uuid4())
        file = folder / f"boot_id{number}"
        file.write_text(self.boot_id + "\n")
        script = _BECOME_A_HOST.format(boot_id=file)
        self._holder = Running(["unshare", "--net", "--mount", "sh", "-c", script], folder / f"host{number}.log")
        assert self._holder.line() == "ready"
        self.pid = self._holder.process.pid
        self._running: list[Running] = []

    def inside(self, *arguments: str) -> list[str]:
        """The command that runs another one on this host."""
        go = ["nsenter", "-t", str(self.pid), "-n", "-m", "sh", "-c", 'cd "$0" && exec "$@"', str(_ROOT)]
        return [*go, *arguments]

    def up(self) -> None:
        """Give the end of the cable its address."""
        for command in (f"addr add {self.address}/24 dev {DEVICE}", f"link set {DEVICE} up"):
            subprocess.run(self.inside("ip", *command.split()), check=True, capture_output=True)

    def run(self, *arguments: str) -> Running:
        self._count += 1
        running = Running(self.inside(*arguments), self._folder / f"{self.address}-{self._count}.log")
        self._running.append(running)
        return running

    def python(self, *arguments: str) -> Running:
        return self.run(sys.executable, *arguments)

    def guest(self) -> Guest:
        return Guest(self.python("-m", "tests.faults.guest"))

    def end(self) -> None:
        for running in reversed(self._running):
            running.end()
        self._holder.end()


class Hosts:
    """Two of them and their cable. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ending: list[Any] = []

    def __enter__(self) -> Self:
        try:
            self.one = Host(self._folder, 1)
            self._ending.append(self.one)
            self.two = Host(self._folder, 2)
            self._ending.append(self.two)
            pids = [str(self.one.pid), str(self.two.pid)]
            self._cable = Running([sys.executable, "-m", "tests.faults.cable", *pids], self._folder / "cable.log")
            self._ending.append(self._cable)
            assert self._cable.line() == "ready"
            self.one.up()
            self.two.up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def cable(self, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """From now on frames come so late, and so many of them not at all (1: none)."""
        self._cable.say(f"{delay_s} {loss}")
        assert self._cable.line() == "done"

    def __exit__(self, *_: object) -> None:
        for each in reversed(self._ending):
            each.end()


def wait_until(come: Any, what: str) -> None:
    """Until `come()` is true."""
    end = time.monotonic() + WAIT_S
    while not come():
        assert time.monotonic() < end, f"it did not come to: {what}"
        time.sleep(0.05)
