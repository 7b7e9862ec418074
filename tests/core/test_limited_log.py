"""What strangers send fills no log."""

from __future__ import annotations

import logging

import pytest

from dataplane.core.limited_log import LimitedLog, OneLine


def test_one_line_is_let_through_and_the_next_says_how_many_were_not() -> None:
    now = [0.0]
    lines = LimitedLog(logging.getLogger("a server"), lambda: now[0])
    assert lines.take("refused:\n  a thing") == "refused: a thing"
    assert [lines.take("again") for _ in range(3)] == [None] * 3
    now[0] = 10.0
    assert lines.take("once more") == "once more (earlier lines of this kind not logged: 3)"
    now[0] = 20.0
    assert lines.take("last") == "last"


def test_a_warning_is_logged_unless_it_is_suppressed(caplog: pytest.LogCaptureFixture) -> None:
    lines = LimitedLog(logging.getLogger("a server"), lambda: 0.0)
    for _ in range(3):
        lines.write(logging.WARNING, "refused: 100 %s")
    assert caplog.messages == ["refused: 100 %s"]


def test_a_traceback_of_a_library_becomes_one_line(caplog: pytest.LogCaptureFixture) -> None:
    library = logging.getLogger("a library")
    quiet = OneLine(LimitedLog(library))
    library.addFilter(quiet)
    for _ in range(3):
        try:
            raise ValueError("it\nbroke")
        except ValueError:
            library.exception("failed on %s", "a call")
    library.warning("no traceback")
    library.warning("no traceback")
    assert caplog.messages == ["failed on a call: ValueError('it\\nbroke')", "no traceback", "no traceback"]
    assert "Traceback" not in caplog.text
