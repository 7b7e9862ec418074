"""A ledger that outlives its process: every input is in the journal before it is applied.

The ledger is deterministic, so its inputs are also its answers: an epoch that begins anew applies them again and has
every sample, session, reservation, pin, waiting call and unconfirmed answer as it was.
"""

from __future__ import annotations

import contextlib
import itertools
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
from dataplane.core.failpoints import hit
from dataplane.core.types import Checksums
from dataplane.errors import StateDirError
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import journal_records
from dataplane.ledger.encoding.image import ImageError

log = logging.getLogger(__name__)

SMALL_BYTES = 2 << 20
"""An image up to this size is written by the service itself, in some ten milliseconds."""
SMALL_AFTER_RECORDS = 5_000
IMAGE_AFTER_RECORDS = 20_000
IMAGE_AFTER_BYTES = 64 << 20
"""Otherwise a process of its own makes it when the log has grown by so much, which takes seconds to go through."""
NICE = 10


@dataclass(frozen=True, kw_only=True)
class LedgerSettings:
    """What an epoch of the service says of its ledger; see `Ledger`."""

    reserve_fraction: float
    heartbeat_s: float
    session_timeout_s: float
    checksums: Checksums = Checksums.ACROSS_HOSTS
    low_watermark: float = 0.75
    high_watermark: float = 0.9


class DurableLedger:
    """The ledger of the state in a directory, as the shell wants one. Its clock goes on where the last epoch's stopped.

    `epoch` is greater than any before; `recovered` tells whether there was a state to go on from; `fsynced` whether it
    survives the machine's end, too. Images of a large ledger are made by a process of their own, from the journal, so
    that nobody waits for them.
    """

    def __init__(self, journal: Journal, ledger: Ledger, epoch: int, *, recovered: bool, fsynced: bool) -> None:
        """Use `open`."""
        self.epoch = epoch
        self.recovered = recovered
        self.fsynced = fsynced
        self._unforced = False
        self._tick: c.Tick | None = None
        self._journal = journal
        self._ledger = ledger
        self._ahead: float | None = None
        self._images = _Images(journal, ledger)

    @classmethod
    def open(cls, directory: str | Path, settings: LedgerSettings, *, fsynced: bool = False) -> DurableLedger:
        """Take the state in `directory` over, or begin one there. Blocks while it is read: about a second for 20,000
        commands. fsynced: what `sync` returned for survives the end of the machine.

        StateDirError if another process uses it, or it cannot be read, is damaged, or of another version. A state that
        the machine's end may have damaged (not fsynced, no orderly stop, and another boot since) is set
        aside, and a new one begun.
        """
        journal = Journal.open(directory)
        try:
            if _may_lack_its_end(journal):
                journal = _set_aside(journal)
            return cls._of(journal, settings, fsynced)
        except BaseException:
            journal.close()
            raise

    @classmethod
    def _of(cls, journal: Journal, settings: LedgerSettings, fsynced: bool) -> DurableLedger:
        epoch = max(time.time_ns(), (journal.number("epoch") or 0) + 1)
        recovered = journal.fact("image") is not None
        booted_before, fsynced_before = journal.fact("boot"), journal.fsynced
        if not recovered and journal.last:
            raise journal.facts_missing()
        if fsynced:
            journal.force()
        if recovered:
            ledger = rebuild(journal)
            hit("journal.replayed")
        else:
            ledger = Ledger(epoch, **vars(settings))
            journal.write_image(0, ledger.image())
            journal.begin_from(0)
        journal.set_facts(epoch=epoch, boot=boot_id(), clean=0, fsynced=int(fsynced))
        hit("journal.taken_over")
        durable = cls(journal, ledger, epoch, recovered=recovered, fsynced=fsynced)
        durable._images.begin()
        if recovered:
            durable._put_in(c.Restarted(epoch=epoch, **vars(settings)))
            if booted_before != boot_id() and not fsynced_before:
                durable._drop_units_of(str(booted_before))
        durable.sync()
        return durable

    def _drop_units_of(self, host: str) -> None:
        """Memory of a machine that was started anew since is gone, and with it the rows that were there."""
        for unit in self._ledger.units_on(host):
            log.warning("storage unit %d was in the memory of a machine that was started anew: its rows are lost", unit)
            self._put_in(c.DropUnit(unit=unit, force=True))

    def _put_in(self, item: c.Input) -> list[c.Output]:
        appended = [journal_records.encode(each) for each in (self._tick, item) if each is not None]
        self._journal.append(*appended)
        self._tick = None
        hit("journal.after_append")
        self._unforced = self._unforced or (self.fsynced and not _is_told_again(item))
        try:
            outputs = self._ledger.apply(item)
        finally:
            self._images.note(len(appended), sum(map(len, appended)))
        hit("journal.applied")
        return outputs

    def apply(self, item: c.Input) -> list[c.Output]:
        """As `Ledger.apply`. StateDirError, and nothing is applied, while the journal cannot be written."""
        if type(item) is c.Tick:
            if self._ahead is None:
                self._ahead = self._ledger.now - item.now if self.recovered else 0.0
            item = c.Tick(now=item.now + self._ahead)
            deadline = self._ledger.next_deadline()
            if deadline is None or item.now < deadline:
                return self._pass_time(item)
        return self._put_in(item)

    def _pass_time(self, tick: c.Tick) -> list[c.Output]:
        """Nothing was due at this tick, so that it tells nobody anything: its record can wait for the next input's."""
        self._tick = tick
        outputs = self._ledger.apply(tick)
        assert not outputs, f"nothing was due at {tick.now}, but {outputs}"
        return outputs

    def sync(self) -> None:
        """What was applied is on the disk when this returns, if it is to survive the machine's end, so that its outputs
        may leave. StateDirError if that failed: nothing that was applied may be told, and this epoch has to end."""
        if self._unforced:
            self._journal.sync()
            self._unforced = False

    def next_deadline(self) -> float | None:
        """As `Ledger.next_deadline`, by the clock that ticks are given by."""
        deadline = self._ledger.next_deadline()
        return None if deadline is None else deadline - (self._ahead or 0.0)

    @property
    def live_bytes(self) -> int:
        """As `Ledger.live_bytes`."""
        return self._ledger.live_bytes

    @property
    def lag(self) -> int:
        """How many records of the journal are not in its image: the next epoch has to go through them. Any thread."""
        return self._images.records

    @property
    def journal_bytes(self) -> int:
        """What journal and image take of the disk. Any thread."""
        return self._journal.nbytes

    def remember(self, **facts: int | str) -> None:
        """Keep these facts for later lives."""
        self._journal.set_facts(**facts)

    def recall(self, name: str) -> int | None:
        """The number that this or an earlier epoch remembered."""
        return self._journal.number(name)

    def recall_text(self, name: str) -> str | None:
        """The text that this or an earlier epoch remembered."""
        return self._journal.text(name)

    def close(self) -> None:
        """Let go of the directory, all of it on disk. Idempotent."""
        tick, self._tick = self._tick, None
        if tick is not None:
            with contextlib.suppress(StateDirError):  # without it the next epoch's clock goes on a moment earlier
                self._journal.append(journal_records.encode(tick))
        self._images.stop()
        self._journal.close()


def rebuild(journal: Log, upto: int | None = None) -> Ledger:
    """The ledger as it was after record `upto` (None: the last). StateDirError if what is there makes none."""
    found = journal.image()
    if found is None:
        raise journal.error("it has no image of a ledger")
    last, image = found
    try:
        ledger = Ledger.restored(image)
        for number, record in journal.records(last, upto):
            last = number
            hit("journal.replaying")
            item = journal_records.decode(record)
            try:
                ledger.apply(item)
            except Exception:
                # It failed then as it does now, with the same effects.
                log.exception("record %d: the ledger failed on %s", number, type(item).__name__)
    except (ImageError, journal_records.RecordError) as error:
        raise journal.error(f"after record {last}: {error}", "Use the version that wrote it") from error
    return ledger


class _Images:
    """Has an image made when the log has grown long, and lets the log begin there once it is."""

    def __init__(self, journal: Journal, ledger: Ledger) -> None:
        self._journal = journal
        self._ledger = ledger
        self._records = self._bytes = 0
        self._small = False
        self._maker: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._began = 0.0
        self._not_before = 0.0

    def begin(self) -> None:
        """An epoch begins: the log, if there is much of it, was gone through once, and need not be again."""
        covered = self._journal.covered
        self._records = self._journal.last - covered
        self._small = self._journal.image_path(covered).stat().st_size <= SMALL_BYTES
        if self._records >= SMALL_AFTER_RECORDS:
            self._guarded(self._make_here)

    @property
    def records(self) -> int:
        """How many were appended since the last image."""
        return self._records

    def note(self, count: int, nbytes: int) -> None:
        """So many records were appended, and applied. Raises nothing: what was done is done."""
        self._records += count
        self._bytes += nbytes
        if self._maker is not None:
            self._guarded(self._look)
        elif self._small and self._records >= SMALL_AFTER_RECORDS:
            self._guarded(self._make_here)
        elif self._records >= IMAGE_AFTER_RECORDS or self._bytes >= IMAGE_AFTER_BYTES:
            self._guarded(self._start_maker)

    def _guarded(self, make: Callable[[], None]) -> None:
        """Unless the last one was a moment ago."""
        if time.monotonic() < self._not_before:
            return
        try:
            make()
        except OSError as error:
            log.error("no image of the ledger could be made, its journal grows on: %s", error)
            self._rest()

    def _make_here(self) -> None:
        """An image of the ledger as it is."""
        self._began = time.monotonic()
        image = self._ledger.image()
        self._journal.write_image(self._journal.last, image)
        self._begins_from(self._journal.last, len(image))

    def _start_maker(self) -> None:
        self._number, self._began = self._journal.last, time.monotonic()
        command = [
            sys.executable,
            "-m",
            "dataplane.controller.durable_ledger",
            str(self._journal.directory),
            str(self._number),
        ]
        self._maker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def _look(self) -> None:
        assert self._maker is not None
        code = self._maker.poll()
        if code is None:
            return
        self._maker = None
        if code:
            raise ChildProcessError(f"the process that makes it ended with code {code}")
        self._begins_from(self._number, self._journal.image_path(self._number).stat().st_size)
        self._rest()

    def _begins_from(self, number: int, nbytes: int) -> None:
        self._journal.begin_from(number)
        self._records, self._bytes = self._journal.last - number, 0
        self._small = nbytes <= SMALL_BYTES

    def _rest(self) -> None:
        """As long as it took, at least a second: the next one waits."""
        now = time.monotonic()
        self._not_before = now + max(now - self._began, 1.0)

    def stop(self) -> None:
        if self._maker is not None:
            self._maker.kill()
            self._maker.wait()
            self._maker = None


def _is_told_again(item: c.Input) -> bool:
    """Whether nobody would miss the input in an epoch after the machine's end: it changes nothing that outlives this.
    What a call names as confirmed its client does not name again once it is answered."""
    if isinstance(item, c.Call):
        return not item.confirmed and not item.command.lasting
    return isinstance(item, c.Tick | c.Heartbeat | c.SessionAlive)


def _may_lack_its_end(journal: Journal) -> bool:
    booted = journal.fact("boot")
    return booted is not None and booted != boot_id() and not journal.fact("clean") and not journal.fsynced


def _set_aside(journal: Journal) -> Journal:
    """A fresh journal in the same directory; what was there is kept in a folder in it."""
    folder = first = journal.directory / f"before-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(2):
        if not folder.exists():
            break
        folder = first.with_name(f"{first.name}-{number}")  # the machine's clock was set back
    fresh = journal.set_aside(folder)
    log.warning(
        "the machine was started anew and the service before was not stopped in order: what it held may be incomplete "
        "and is set aside in %s; beginning anew",
        folder,
    )
    return fresh


def make_image(directory: Path, number: int) -> None:
    """Write the image of the ledger as it was after record `number`, from the journal that a service is writing."""
    with Log(directory) as journal:
        journal.write_image(number, rebuild(journal, number).image())


def main(arguments: list[str]) -> int:
    """`python -m dataplane.controller.durable_ledger DIRECTORY NUMBER`: what a service runs beside itself."""
    os.nice(NICE)
    try:
        make_image(Path(arguments[0]), int(arguments[1]))
    except StateDirError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
