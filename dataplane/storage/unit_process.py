"""Storage units in processes of their own, started and watched by the one that serves their controller.

`python -m dataplane.storage.unit_process` is such a unit: its settings are the first line of its standard input, and it
ends when that closes.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import msgspec

from dataplane.config import DataPlaneConfig
from dataplane.core.memory_limits import memory_limits
from dataplane.core.stopping import Stop
from dataplane.errors import DataPlaneError
from dataplane.protocol.fd_limits import allow_more
from dataplane.storage.unit import StorageUnit, sweep_leftovers

log = logging.getLogger(__name__)

END_S = 12.0
"""A unit that is told to end takes up to so long; then it is killed. With what its controller takes, a service ends
within half a minute."""
KILL_S = 2.0
UNIT_BYTES = 32 << 20
"""What the process of a unit takes at least, besides its arena."""
UNIT_FILES = 4
"""Open files that a unit costs the process of its controller."""
RESTARTS = 5
WITHIN_S = 60.0
"""A unit that ends more often than this within this time is not started again."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """The line that the process of a unit writes on standard output: that it is ready, or why it is not."""

    unit: str = ""
    http: str | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class UnitProcessSettings:
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
        self._ready: set[str] = set()
        self._ending = threading.Lock()
        self._over = False
        self._watchers: list[threading.Thread] = []

    def start(self, count: int) -> None:
        """Returns when every unit is registered, or once `stop` is called, from another thread. OSError that says which
        could not start, and why."""
        names = [f"unit-{number}" for number in range(count)]
        for number, name in enumerate(names):
            self._told[name] = self._config.of_unit(number)
            if not self._start(name):
                return
        for name in names:
            why = self._await_ready(name)
            if self._stopping:
                return
            if why:
                raise OSError(f"storage unit {name} cannot start: {why}")
        for name in names:
            self._watchers.append(threading.Thread(target=self._watch, args=(name,), name=f"tq-{name}", daemon=True))
            self._watchers[-1].start()

    def pid(self, name: str) -> int:
        """The process of a unit, at present."""
        return self._processes[name].pid

    def _start(self, name: str) -> bool:
        """False, and nothing, once they are to end."""
        with self._guard:
            if self._stopping:
                return False
            self._ready.discard(name)
            command = [sys.executable, "-m", "dataplane.storage.unit_process"]
            # A group of its own: a terminal's SIGINT is for the service, which then ends its units.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
            self._processes[name] = process
            assert process.stdin is not None
            settings = asdict(UnitProcessSettings(address=self._address, name=name, config=self._told[name]))
            with contextlib.suppress(BrokenPipeError):  # it is dead already, as its exit code will tell
                process.stdin.write(msgspec.json.encode(settings) + b"\n")
                process.stdin.flush()

            return True

    def _await_ready(self, name: str) -> str:
        """Why the unit did not start; "": it did."""
        process = self._processes[name]
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            return f"its process ended with code {process.wait(END_S)}"
        why = msgspec.json.decode(line, type=Said).error
        if not why:
            self._ready.add(name)
        return why

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
                if not self._start(name):
                    return None
                why = self._await_ready(name)
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
        """End them, and remove what those that were killed, by whomever, have left. Those that are not ready yet are
        killed, and those that take longer than `END_S`. Idempotent."""
        with self._guard:
            self._stopping = True
        with self._ending:
            if self._over:
                return
            self._over = True
            self._end()
            for watcher in self._watchers:
                watcher.join(KILL_S)
            with contextlib.suppress(OSError):
                sweep_leftovers(self._config)

    def _end(self) -> None:
        processes = self._processes
        for name, process in processes.items():
            assert process.stdin is not None
            if name in self._ready:
                process.stdin.close()
            else:
                process.kill()
        end, late = time.monotonic() + END_S, []
        for name, process in processes.items():
            if not _ended(process, max(0.0, end - time.monotonic())):
                log.warning("storage unit %s did not end within %.0f s, and is killed", name, END_S)
                process.kill()
                late.append(process)
        for process in late:
            _ended(process, KILL_S)
        for process in processes.values():
            self._close(process)


def _ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
        return True
    return False


def require_memory(count: int) -> None:
    """ValueError where this machine, or this process, has not enough for so many units."""
    files = allow_more()
    fit = {f"it may have {files:,} open files, of which a unit takes {UNIT_FILES}": files // UNIT_FILES}
    for limit in memory_limits():
        fit[f"{limit.limit} leaves {limit.free_bytes:,} bytes, of which a unit takes {UNIT_BYTES:,}"] = (
            limit.free_bytes // UNIT_BYTES
        )
    why, most = min(fit.items(), key=lambda each: each[1])
    if count > most:
        raise ValueError(f"{count:,} storage units: there is space for {most:,} here, since {why}. Start fewer.")


def run_unit(unit: StorageUnit, stop: Stop, *, json: bool = False) -> bool:
    """Start the unit, say so on standard output, as text or JSON, and serve until `stop`, which may come while it
    starts; whether its controller was gone first."""
    stop.then(unit.give_up)
    try:
        unit.start()
    except DataPlaneError:
        if stop.asked:
            return False
        raise
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
    settings = msgspec.convert(msgspec.json.decode(sys.stdin.readline()), UnitProcessSettings)

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
