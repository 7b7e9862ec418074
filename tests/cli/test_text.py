"""Sizes, as people write and read them."""

from __future__ import annotations

import pytest

from dataplane.cli.output import ago, size
from dataplane.config import MIB


@pytest.mark.parametrize(
    ("text", "count"),
    [("1048576", MIB), ("512k", MIB // 2), ("64m", 64 * MIB), ("1.5GiB", 1536 * MIB), ("2G", 2048 * MIB)],
)
def test_sizes(text: str, count: int) -> None:
    assert size(text) == count


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1.0, "0.0 s"), (119.0, "119.0 s"), (120.0, "2 min"), (7200.0, "2 h"), (3e5, "3 d"), (float("inf"), "no end")],
)
def test_times(seconds: float, text: str) -> None:
    assert ago(seconds) == text
