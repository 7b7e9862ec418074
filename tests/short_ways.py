"""The switch of the short ways, for suites that run once with them and once without."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest

from dataplane.client.operations import sample_names, short_get, short_put
from dataplane.compat.transfer_queue import operations
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.ledger.commands.short import SHORT
from dataplane.ledger.state import tags


@contextlib.contextmanager
def short_commands() -> Iterator[Counter[str]]:
    """Count the short commands that reach the ledgers of this process."""
    reached: Counter[str] = Counter()
    honest = Ledger.apply

    def apply(self: Ledger, item: c.Input) -> list[c.Output]:
        if isinstance(item, c.Call) and isinstance(item.command, SHORT):
            reached[type(item.command).__name__] += 1
        return honest(self, item)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "apply", apply)
        yield reached


@contextlib.contextmanager
def short_ways_off() -> Iterator[None]:
    """Let all puts, reads, tags and lists take the general way. At the end, no short command may
    have reached a ledger of this process."""
    with short_commands() as reached, pytest.MonkeyPatch.context() as patch:
        for module in (short_put, short_get, operations):
            patch.setattr(module, "MAX_ROWS", 0)  # no put and no read is small
        patch.setattr(sample_names, "_usual_columns", lambda *_: None)
        patch.setattr(tags, "MIN_SHARED", 1 << 30)
        yield
    assert not reached
