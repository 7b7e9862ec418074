"""Sizes, as people write and read them."""

from __future__ import annotations

import pytest

from dataplane.cli.text import size
from dataplane.config import MIB


@pytest.mark.parametrize(
    ("text", "count"),
    [("1048576", MIB), ("512k", MIB // 2), ("64m", 64 * MIB), ("1.5GiB", 1536 * MIB), ("2G", 2048 * MIB)],
)
def test_sizes(text: str, count: int) -> None:
    assert size(text) == count
