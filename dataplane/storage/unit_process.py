"""Storage units in subprocesses, which the process of their controller starts and supervises.

`python -m dataplane.storage.unit_process` runs such a unit. It reads its settings from the first line of standard input
and ends when standard input closes.
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
from dataplane.storage.capacity import sweep_leftovers, unit_configs, unit_name
from dataplane.storage.unit import StorageUnit

log = logging.getLogger(__name__)

END_S = 12.0
"""Maximum time for a unit to stop before it is killed. Together with the controller, a service stops within half a
minute."""
KILL_S = 2.0  # maximum wait for a killed process, and for a watcher thread
UNIT_BYTES = 32 << 20
"""Minimum memory of a unit's process, besides its arena."""
UNIT_FILES = 4
"""Open files that each unit takes in the process of its controller."""
RESTARTS = 5
WITHIN_S = 60.0
"""A unit that ends more than `RESTARTS` times within this time is not restarted."""


@dataclass(frozen=True, kw_only=True)
class UnitStatus:
    """The line that a unit's process writes to standard output: its name when it is ready, otherwise the error. http:
    the URL of its HTTP server."""

    unit: str = ""
    http: str | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class UnitProcessSettings:
    """The settings that a unit's process reads from standard input."""

    address: str
    name: str
    config: DataPlaneConfig


_decode_status = msgspec.json.Decoder(UnitStatus).decode
_decode_settings = msgspec.json.Decoder(UnitProcessSettings).decode


class UnitProcesses:
    """The storage units of the controller at `address`, in subprocesses. They end with this process.

    With a state directory, a unit that ends for any reason is restarted and adopts its arena. Without one, or after
    more than `RESTARTS` ends within `WITHIN_S`, the unit is not restarted: `on_end` is called with the reason, in
    another thread.

    `_configs`, `_processes`, `_ready`: by the unit's name; `_ready` units have reported success since their last start.
    `_stopping`: `stop` was called, so no process is started; read while `_guard` is held. `_is_stopped`: a call
    of `stop` ends the processes or has ended them.
    """

    def __init__(self, address: str, config: DataPlaneConfig, on_end: Callable[[str], None]) -> None:
        self._address = address
        self._config = replace(config, token=config.secret(), token_file=None)  # units do not read the file
        self._on_end = on_end
        self._guard = threading.Lock()
        self._stopping = False
        self._configs: dict[str, DataPlaneConfig] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ready: set[str] = set()
        self._ending = threading.Lock()  # held while the units are stopped
        self._is_stopped = False
        self._watchers: list[threading.Thread] = []

    def start(self, count: int) -> None:
        """Start `count` units. Return when every unit is registered, or when another thread calls `stop`. Raises
        ArenaSpaceError if their arenas do not fit, OSError with the name of a unit that cannot start, and the reason.
        """
        configs = unit_configs(self._config, count)
        names = [unit_name(number) for number in range(count)]
        for name, config in zip(names, configs, strict=True):
            self._configs[name] = config
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
        """Return the process id of a unit. It changes when the unit is restarted."""
        return self._processes[name].pid

    def _start(self, name: str) -> bool:
        """Start the process of a unit and send its settings. Return False, without starting it, after `stop`."""
        with self._guard:
            if self._stopping:
                return False
            self._ready.discard(name)
            command = [sys.executable, "-m", "dataplane.storage.unit_process"]
            # A separate process group: a terminal's SIGINT reaches only the service, which then stops its units.
            # Unbuffered: closing a pipe never fails because of data that an ended process did not read.
            process = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
            )
            self._processes[name] = process
            assert process.stdin is not None
            settings = asdict(UnitProcessSettings(address=self._address, name=name, config=self._configs[name]))
            with contextlib.suppress(BrokenPipeError):  # it has ended; its exit code is reported later
                process.stdin.write(msgspec.json.encode(settings) + b"\n")
            return True

    def _await_ready(self, name: str) -> str:
        """Wait until the unit is ready, add it to `_ready` and return ""; or return the reason why it did not start."""
        process = self._processes[name]
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:  # it ended without a status
            return f"its process ended with code {process.wait(END_S)}"
        why = _decode_status(line).error
        if not why:
            self._ready.add(name)
        return why

    def _watch(self, name: str) -> None:
        """Restart a unit whenever it ends, or call `on_end`. Runs in the unit's watcher thread until `stop`."""
        ends: deque[float] = deque(maxlen=RESTARTS + 1)  # the times of the last ends
        try:
            while True:
                code = self._processes[name].wait()
                self._close_pipes(self._processes[name])
                if self._stopping:
                    return
                ends.append(time.monotonic())
                if self._config.state_dir is None:
                    self._on_end(f"storage unit {name} ended with code {code}; its rows are lost")
                    return
                if len(ends) > RESTARTS and ends[-1] - ends[0] < WITHIN_S:
                    self._on_end(f"storage unit {name} ended {len(ends)} times in {ends[-1] - ends[0]:.0f} s")
                    return
                log.warning("Storage unit %s ended with code %d; restarting it", name, code)
                if not self._start(name):
                    return
                why = self._await_ready(name)
                if why:  # it ended, or ends now: the next turn of the loop handles that
                    log.warning("Storage unit %s could not be restarted: %s", name, why)
        except Exception as error:
            log.exception("Supervision of storage unit %s failed", name)
            self._on_end(f"storage unit {name} cannot be restarted: {error}")

    @staticmethod
    def _close_pipes(process: subprocess.Popen[bytes]) -> None:
        """Close the pipes to the standard input and output of an ended process."""
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def stop(self) -> None:
        """Stop the units, and remove the files of killed ones. Units that are not ready, and units that take longer
        than `END_S`, are killed. Idempotent."""
        self._stopping = True  # first, so that a `start` in progress does not take the guard again
        with self._guard:  # a process that `_start` creates meanwhile is in `_processes` now
            pass
        with self._ending:  # a concurrent call waits here
            if self._is_stopped:
                return
            self._is_stopped = True
            self._end_processes()
            for watcher in self._watchers:
                watcher.join(KILL_S)
            with contextlib.suppress(OSError):
                sweep_leftovers(self._config)

    def _end_processes(self) -> None:
        """Stop all processes, and kill those that are not ready or exceed `END_S`."""
        processes = self._processes
        for name, process in processes.items():
            assert process.stdin is not None
            if name in self._ready:
                process.stdin.close()  # the unit stops by itself
            else:
                process.kill()
        deadline = time.monotonic() + END_S
        killed = []
        for name, process in processes.items():
            if not _wait_for_end(process, max(0.0, deadline - time.monotonic())):
                log.warning("Storage unit %s did not stop within %.0f s and is killed", name, END_S)
                process.kill()
                killed.append(process)
        for process in killed:
            _wait_for_end(process, KILL_S)
        for process in processes.values():
            self._close_pipes(process)


def _wait_for_end(process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Return whether the process ends within this time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
        return True
    return False


def require_memory(count: int) -> None:
    """Raise ValueError if this machine or this process lacks the memory or open files for `count` units."""
    files = allow_more()
    # The number of units that each limit allows, by a description of the limit.
    allowed = {f"the limit is {files:,} open files and each unit takes {UNIT_FILES}": files // UNIT_FILES}
    for limit in memory_limits():
        allowed[f"{limit.limit} leaves {limit.free_bytes:,} bytes and each unit takes {UNIT_BYTES:,}"] = (
            limit.free_bytes // UNIT_BYTES
        )
    why, most_units = min(allowed.items(), key=lambda entry: entry[1])
    if count > most_units:
        raise ValueError(f"cannot start {count:,} storage units, at most {most_units:,}: {why}. Start fewer units.")


def run_unit(unit: StorageUnit, stop: Stop, report: Callable[[UnitStatus], None]) -> bool:
    """Start the unit, call `report`, and serve until `stop`, which may be set during the start. Return whether the
    controller was lost first."""
    stop.then(unit.give_up)
    try:
        unit.start()
    except DataPlaneError:
        if stop.asked:  # `give_up` caused the error
            return False
        raise
    with unit as running:  # which is started already; leaving the block stops it
        report(UnitStatus(unit=running.name, http=running.http_url or None))
        lost = running.lost
        stop.when(lost)  # a lost controller ends the wait, too
        stop.wait()
        return lost.is_set() and not stop.asked


def _print_status(status: UnitStatus) -> None:
    """Print the status as one line of JSON, for the process of the controller."""
    print(msgspec.json.encode(asdict(status)).decode(), flush=True)  # noqa: T201


def main() -> int:
    """Run a unit. Return exit code 1 if it cannot start, or if the controller is lost and does not return in time."""
    stop = Stop()
    allow_more()
    settings = _decode_settings(sys.stdin.readline())

    def stop_when_stdin_closes() -> None:  # the process of the controller has ended, or stops this unit
        try:
            sys.stdin.read()
        finally:
            stop.set()

    threading.Thread(target=stop_when_stdin_closes, daemon=True).start()
    try:
        unit = StorageUnit(settings.config, settings.address, name=settings.name)
        return int(run_unit(unit, stop, _print_status))
    except (DataPlaneError, ValueError, OSError) as error:
        with contextlib.suppress(BrokenPipeError):  # the service has ended
            _print_status(UnitStatus(unit=settings.name, error=str(error)))
        return 1


if __name__ == "__main__":
    sys.exit(main())
