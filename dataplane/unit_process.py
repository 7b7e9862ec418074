"""Storage units in processes of their own, started and watched by the one that serves their controller.

`python -m dataplane.unit_process` is such a unit: its settings are the first line of its standard input, and it ends
when that closes.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import msgspec

from dataplane.config import DataPlaneConfig
from dataplane.descriptors import allow_more
from dataplane.errors import DataPlaneError
from dataplane.unit import StorageUnit

log = logging.getLogger(__name__)

END_S = 60.0
"""A unit that is told to end, or that does not begin, takes up to so long."""
RESTARTS = 5
WITHIN_S = 60.0
"""A unit that ends more often than this within this time is not started again."""


class Stop:
    """Set by SIGTERM and SIGINT (`asked`: by the user), or by `set`."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked)

    def _asked(self, *_: object) -> None:
        self.asked = True
        self._event.set()

    def set(self) -> None:
        self._event.set()

    def when(self, event: threading.Event) -> None:
        """Set this as soon as `event` is."""

        def wait() -> None:
            event.wait()
            self.set()

        threading.Thread(target=wait, daemon=True).start()

    def wait(self) -> None:
        """Blocks until a signal asks to stop: that is what a server does."""
        self._event.wait()


@dataclass(frozen=True, kw_only=True)
class Said:
    """The line that the process of a unit writes on standard output: that it is ready, or why it is not."""

    unit: str = ""
    http: str | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the process of a unit is told."""

    address: str
    name: str
    config: DataPlaneConfig


class UnitProcesses:
    """The storage units of a controller at `address`, in processes of their own; they end with this one.

    With a state directory a unit that ends, whatever way, is started again and goes on with its memory. One without, or
    one that ends more than `RESTARTS` times in `WITHIN_S`, is given up: `on_end` is called with why, in another thread.
    """

    def __init__(self, address: str, config: DataPlaneConfig, on_end: Callable[[str], None]) -> None:
        self._address = address
        self._config = replace(config, token=config.secret(), token_file=None)
        self._on_end = on_end
        self._guard = threading.Lock()
        self._stopping = False
        self._told: dict[str, DataPlaneConfig] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._watchers: list[threading.Thread] = []

    def start(self, count: int) -> None:
        """Returns when every unit is registered. OSError that says which could not start, and why."""
        names = [f"unit-{number}" for number in range(count)]
        for number, name in enumerate(names):
            self._told[name] = self._config.of_unit(number)
            self._start(name)
        for name in names:
            why = self._await_ready(self._processes[name])
            if why:
                raise OSError(f"storage unit {name} cannot start: {why}")
        for name in names:
            self._watchers.append(threading.Thread(target=self._watch, args=(name,), name=f"tq-{name}", daemon=True))
            self._watchers[-1].start()

    def pid(self, name: str) -> int:
        """The process of a unit, at present."""
        return self._processes[name].pid

    def _start(self, name: str) -> None:
        """Nothing once they are to end."""
        with self._guard:
            if self._stopping:
                return
            command = [sys.executable, "-m", "dataplane.unit_process"]
            # A group of its own: a terminal's SIGINT is for the service, which then ends its units.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
            self._processes[name] = process
            assert process.stdin is not None
            settings = asdict(Settings(address=self._address, name=name, config=self._told[name]))
            with contextlib.suppress(BrokenPipeError):  # it is dead already, as its exit code will tell
                process.stdin.write(msgspec.json.encode(settings) + b"\n")
                process.stdin.flush()

    @staticmethod
    def _await_ready(process: subprocess.Popen[bytes]) -> str:
        """Why the unit did not start; "": it did."""
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            return f"its process ended with code {process.wait(END_S)}"
        return msgspec.json.decode(line, type=Said).error

    def _watch(self, name: str) -> None:
        ends: deque[float] = deque(maxlen=RESTARTS + 1)
        try:
            while True:
                code = self._processes[name].wait()
                self._close(self._processes[name])
                if self._stopping:
                    return None
                ends.append(time.monotonic())
                if self._config.state_dir is None:
                    return self._on_end(f"storage unit {name} ended with code {code}, and its rows with it")
                if len(ends) > RESTARTS and ends[-1] - ends[0] < WITHIN_S:
                    return self._on_end(f"storage unit {name} ended {len(ends)} times in {ends[-1] - ends[0]:.0f} s")
                log.warning("storage unit %s ended with code %d: starting it again", name, code)
                self._start(name)
                why = self._await_ready(self._processes[name])
                if why:
                    log.warning("storage unit %s did not start again: %s", name, why)
        except Exception as error:
            log.exception("cannot watch storage unit %s", name)
            self._on_end(f"storage unit {name} cannot be started again: {error}")

    @staticmethod
    def _close(process: subprocess.Popen[bytes]) -> None:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def stop(self) -> None:
        """End them. Takes seconds at most. Idempotent."""
        with self._guard:
            self._stopping = True
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        for watcher in self._watchers:
            watcher.join(END_S)
        for process in self._processes.values():
            process.wait(END_S)
            self._close(process)


def run_unit(unit: StorageUnit, stop: Stop, *, json: bool = False) -> bool:
    """Start the unit, say so on standard output, as text or JSON, and serve until `stop`; whether its controller was
    gone first."""
    with unit as running:
        metrics = f", metrics at {running.http_url}/metrics" if running.http_url else ""
        said = Said(unit=running.name, http=running.http_url or None)
        print(_line(said) if json else f"storage unit {running.name} ready{metrics}", flush=True)  # noqa: T201
        lost = running.lost
        stop.when(lost)
        stop.wait()
        return lost.is_set() and not stop.asked


def _line(said: Said) -> str:
    facts = {name: fact for name, fact in asdict(said).items() if name != "error" or fact}
    return msgspec.json.encode(facts).decode()


def main() -> int:
    """Exit code 1 if the unit cannot start, or the controller goes first and does not come back in time."""
    stop = Stop()
    allow_more()
    settings = msgspec.convert(msgspec.json.decode(sys.stdin.readline()), Settings)

    def watch() -> None:
        try:
            sys.stdin.read()
        finally:
            stop.set()

    threading.Thread(target=watch, daemon=True).start()
    try:
        return int(run_unit(StorageUnit(settings.config, settings.address, name=settings.name), stop, json=True))
    except (DataPlaneError, ValueError, OSError) as error:
        with contextlib.suppress(BrokenPipeError):  # the service is gone
            print(_line(Said(unit=settings.name, error=str(error))), flush=True)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main())
