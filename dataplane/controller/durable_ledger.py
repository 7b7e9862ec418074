"""A ledger that survives a restart: every input is written to the journal before it is applied.

The ledger is deterministic. A new epoch replays the inputs and thereby restores every sample, session, reservation,
pin, waiting call and unconfirmed answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dataplane.controller.journal import Journal, Log
from dataplane.core.addresses import boot_id
from dataplane.core.failpoints import failpoint
from dataplane.core.types import Checksums
from dataplane.errors import InvalidRequestError, StateDirError
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.ledger.encoding.image import ImageError

log = logging.getLogger(__name__)

SMALL_BYTES = 2 << 20
"""The service process writes images up to this size itself, in about ten milliseconds."""
SMALL_AFTER_RECORDS = 5_000
IMAGE_AFTER_RECORDS = 20_000
IMAGE_AFTER_BYTES = 64 << 20
"""A separate process writes larger images each time the log has grown by this much, which takes seconds to replay."""
NICE = 10  # of the process that writes an image, so that it does not slow down the service


@dataclass(frozen=True, kw_only=True)
class LedgerSettings:
    """Settings of the ledger for one epoch of the service; see `Ledger`."""

    reserve_fraction: float
    heartbeat_s: float
    session_timeout_s: float
    checksums: Checksums = Checksums.ACROSS_HOSTS
    low_watermark: float = 0.75
    high_watermark: float = 0.9


class DurableLedger:
    """The ledger of a state directory, for `LedgerThread`. Its clock continues where the previous epoch's stopped.

    `epoch` is greater than all earlier epochs. `recovered`: whether the directory had a state to restore. A
    separate process creates images of a large ledger from the journal, so
    that the service does not pause.
    """

    def __init__(self, journal: Journal, ledger: Ledger, epoch: int, *, recovered: bool) -> None:
        """Internal constructor; use `open`."""
        self.epoch = epoch
        self.recovered = recovered
        self._tick: c.Tick | None = None  # applied, but not appended yet
        self._journal = journal
        self._ledger = ledger
        self._clock_offset_s: float | None = None  # added to the times of ticks; None before the first tick
        self._images = _ImageWriter(journal, ledger)

    @classmethod
    def open(cls, directory: str | Path, settings: LedgerSettings) -> DurableLedger:
        """Restore the state in `directory`, or create a new one. Blocks while the journal is replayed: about a second
        for 20,000 commands.

        Raises StateDirError if another process uses the directory, or its state is unreadable, damaged or of another
        version. A state that a machine crash may have damaged (no clean stop, and a reboot since) is set
        aside, and a new state is created.
        """
        journal = Journal.open(directory)
        try:
            if _may_be_incomplete(journal):
                journal = _set_aside(journal)
            return cls._start_epoch(journal, settings)
        except BaseException:
            journal.close()
            raise

    @classmethod
    def _start_epoch(cls, journal: Journal, settings: LedgerSettings) -> DurableLedger:
        """Restore or create the ledger, start a new epoch and apply the effects of the restart. Their outputs are
        dropped, because no unit or client is connected yet."""
        epoch = max(time.time_ns(), (journal.number("epoch") or 0) + 1)  # the clock may have been set back
        recovered = journal.fact("image") is not None
        booted_before = journal.fact("boot")  # read before it is replaced
        if not recovered and journal.last:  # records without the image that they continue
            raise journal.facts_missing()
        if recovered:
            ledger = rebuild(journal)
            failpoint("journal.replayed")
        else:
            ledger = Ledger(epoch, **vars(settings))
            journal.write_image(0, ledger.image())  # before the first record, which has number 1
            journal.begin_from(0)
        journal.set_facts(epoch=epoch, boot=boot_id(), clean=0)
        failpoint("journal.taken_over")
        durable = cls(journal, ledger, epoch, recovered=recovered)
        durable._images.begin()
        if recovered:
            durable._record_and_apply(c.Restarted(epoch=epoch, **vars(settings)))
            if booted_before != boot_id():
                durable._drop_units_of(str(booted_before))
        return durable

    def _drop_units_of(self, host: str) -> None:
        """Drop the storage units of a machine that has rebooted: the reboot erased their memory and the rows in it."""
        for unit in self._ledger.units_on(host):
            log.warning("Storage unit %d dropped: its machine has rebooted, so its rows are lost", unit)
            self._record_and_apply(c.DropUnit(unit=unit, force=True))

    def _record_and_apply(self, item: c.Input, record: bytes | None = None) -> list[c.Output]:
        """Append `item` to the journal, after a delayed tick, which was applied before. Then apply `item`."""
        appended = [] if self._tick is None else [messages.encode(self._tick)]
        appended.append(messages.encode(item) if record is None else record)
        self._journal.append(*appended)
        self._tick = None
        failpoint("journal.after_append")
        try:
            outputs = self._ledger.apply(item)
        finally:  # the records count, also if the ledger failed on the last one
            self._images.count_appended(len(appended), sum(map(len, appended)))
        failpoint("journal.applied")
        return outputs

    def apply(self, item: c.Input, record: bytes | None = None) -> list[c.Output]:
        """Record `item` in the journal and apply it, as `Ledger.apply`. record: its encoded form, if the caller has it.
        Raises StateDirError and applies nothing while
        the journal is not writable."""
        if type(item) is c.Tick:
            if self._clock_offset_s is None:  # the first tick: continue the clock of the previous epoch
                self._clock_offset_s = self._ledger.now - item.now if self.recovered else 0.0
            item = c.Tick(now=item.now + self._clock_offset_s)
            deadline = self._ledger.next_deadline()
            if deadline is None or item.now < deadline:
                return self._apply_idle_tick(item)
        return self._record_and_apply(item, record)

    def inspect(self, command: c.Command) -> c.Result:
        """`Ledger.inspect`, of which the journal has no record."""
        return self._ledger.inspect(command)

    def _apply_idle_tick(self, tick: c.Tick) -> list[c.Output]:
        """Apply a tick at which nothing is due. It has no outputs, so it is recorded together with the next input."""
        self._tick = tick
        outputs = self._ledger.apply(tick)
        assert not outputs, f"nothing was due at {tick.now}, but {outputs}"
        return outputs

    def next_deadline(self) -> float | None:
        """Return `Ledger.next_deadline`, converted to the clock of the ticks passed to `apply`."""
        deadline = self._ledger.next_deadline()
        return None if deadline is None else deadline - (self._clock_offset_s or 0.0)

    @property
    def min_heartbeat_s(self) -> float:
        """`Ledger.min_heartbeat_s`."""
        return self._ledger.min_heartbeat_s

    @property
    def live_bytes(self) -> int:
        """`Ledger.live_bytes`."""
        return self._ledger.live_bytes

    @property
    def lag(self) -> int:
        """Number of journal records after the last image, which the next epoch must replay. Any thread."""
        return self._images.records

    @property
    def journal_bytes(self) -> int:
        """Size of journal and images on disk in bytes. Any thread."""
        return self._journal.nbytes

    def remember(self, **facts: int | str) -> None:
        """Store these facts for later epochs."""
        self._journal.set_facts(**facts)

    def recall(self, name: str) -> int | None:
        """Return the number that this or an earlier epoch stored under `name`, or None."""
        return self._journal.number(name)

    def recall_text(self, name: str) -> str | None:
        """Return the text that this or an earlier epoch stored under `name`, or None."""
        return self._journal.text(name)

    def close(self) -> None:
        """Write everything to disk and release the directory. Idempotent."""
        tick, self._tick = self._tick, None
        if tick is not None:
            with contextlib.suppress(StateDirError):  # a lost tick only sets the next epoch's clock back a little
                self._journal.append(messages.encode(tick))
        self._images.stop()
        self._journal.close()


def rebuild(journal: Log, upto: int | None = None) -> Ledger:
    """Rebuild the ledger as of record `upto` (None: the last) from the last image and the records after it. Raises
    StateDirError if the journal is unusable."""
    stored = journal.image()
    if stored is None:
        raise journal.error(
            "its journal names no image (a copy of the service's state)", "Restore a copy of the directory"
        )
    last, image = stored
    try:
        ledger = Ledger.restored(image)
        for number, record in journal.records(last, upto):
            last = number
            failpoint("journal.replaying")
            item = messages.decode(record)
            try:
                ledger.apply(item)
            except Exception:
                # The original run failed in the same way, with the same effects.
                log.exception("Record %d: the ledger failed on %s", number, type(item).__name__)
    except (ImageError, InvalidRequestError) as error:
        raise journal.error(f"after record {last}: {error}", "Use the version that wrote this state") from error
    return ledger


class _ImageWriter:
    """Creates an image whenever the log has grown long, then truncates the log to start at the image.

    `_records`: number of records after the last image. `_bytes`: the size of those that were appended, in this epoch,
    since `_begin_log_from`. `_is_small`: this process writes the images itself. Otherwise `_process` writes the image
    of record `_image_number`; None while no such process runs. `_attempted_at`, `_not_before`: when the last attempt
    began, and the earliest time of the next one.
    """

    def __init__(self, journal: Journal, ledger: Ledger) -> None:
        self._journal = journal
        self._ledger = ledger
        self._records = self._bytes = 0
        self._is_small = False
        self._process: subprocess.Popen[bytes] | None = None
        self._image_number = 0
        self._attempted_at = 0.0
        self._not_before = 0.0

    def begin(self) -> None:
        """Start an epoch. If the replayed log was long, write an image so that the next epoch does not replay it."""
        covered = self._journal.covered
        self._records = self._journal.last - covered
        self._is_small = self._journal.image_path(covered).stat().st_size <= SMALL_BYTES
        if self._records >= SMALL_AFTER_RECORDS:
            self._attempt(self._write_image)

    @property
    def records(self) -> int:
        """Number of records appended since the last image."""
        return self._records

    def count_appended(self, count: int, nbytes: int) -> None:
        """Count appended and applied records, and create an image if the log has grown long. Logs errors instead of
        raising: the inputs are already applied."""
        self._records += count
        self._bytes += nbytes
        if self._process is not None:  # not a second one meanwhile
            self._attempt(self._check_process)
        elif self._is_small and self._records >= SMALL_AFTER_RECORDS:
            self._attempt(self._write_image)
        elif self._records >= IMAGE_AFTER_RECORDS or self._bytes >= IMAGE_AFTER_BYTES:
            self._attempt(self._start_process)

    def _attempt(self, make: Callable[[], None]) -> None:
        """Call `make` unless attempts are delayed. Logs its OSError (or StateDirError), then delays the next one."""
        if time.monotonic() < self._not_before:
            return
        try:
            make()
        except OSError as error:
            log.error("Image of the ledger could not be written, so its journal keeps growing: %s", error)
            self._delay_next()

    def _write_image(self) -> None:
        """Write an image of the current ledger in this process."""
        self._attempted_at = time.monotonic()
        image = self._ledger.image()
        self._journal.write_image(self._journal.last, image)
        self._begin_log_from(self._journal.last, len(image))

    def _start_process(self) -> None:
        """Start a process that writes the image of the ledger as of the last record."""
        self._image_number, self._attempted_at = self._journal.last, time.monotonic()
        command = [
            sys.executable,
            "-m",
            "dataplane.controller.durable_ledger",
            str(self._journal.directory),
            str(self._image_number),
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def _check_process(self) -> None:
        """If the process has ended, use its image. Raises OSError if it failed."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:  # it still runs
            return
        self._process = None
        if code:
            raise ChildProcessError(f"the process that writes the image exited with code {code}")
        self._begin_log_from(self._image_number, self._journal.image_path(self._image_number).stat().st_size)
        self._delay_next()  # also after a success, so that processes run at most half of the time

    def _begin_log_from(self, number: int, nbytes: int) -> None:
        """Let the next epoch start from the image of record `number`, which has `nbytes`."""
        self._journal.begin_from(number)
        self._records = self._journal.last - number
        self._bytes = 0
        self._is_small = nbytes <= SMALL_BYTES

    def _delay_next(self) -> None:
        """Delay the next attempt for as long as the last one took, at least a second."""
        now = time.monotonic()
        self._not_before = now + max(now - self._attempted_at, 1.0)

    def stop(self) -> None:
        """Kill the process that writes an image, if one runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _may_be_incomplete(journal: Journal) -> bool:
    """Return whether a crash of the machine may have lost the end of the journal: it was rebooted, and before that the
    journal was not closed properly."""
    booted = journal.fact("boot")
    return booted is not None and booted != boot_id() and not journal.fact("clean")


def _set_aside(journal: Journal) -> Journal:
    """Move the journal to a subfolder and return a new journal in the same directory."""
    first = journal.directory / f"before-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = first
    number = 2
    while folder.exists():  # only if the clock was set back
        folder = first.with_name(f"{first.name}-{number}")
        number += 1
    fresh = journal.set_aside(folder)
    log.warning(
        "The machine rebooted without a clean stop of the service: its state may be incomplete and was moved to %s; "
        "starting with an empty state",
        folder,
    )
    return fresh


def make_image(directory: Path, number: int) -> None:
    """Write the image of the ledger as of record `number`, from the journal of a running service."""
    with Log(directory) as journal:
        journal.write_image(number, rebuild(journal, number).image())


def main(arguments: list[str]) -> int:
    """Run `python -m dataplane.controller.durable_ledger DIRECTORY NUMBER`, the process that `_ImageWriter` starts."""
    os.nice(NICE)
    try:
        make_image(Path(arguments[0]), int(arguments[1]))
    except StateDirError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
