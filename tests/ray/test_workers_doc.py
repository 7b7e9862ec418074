"""The examples of docs/workers.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from workers import Cluster, WorkerGroup

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
DOCUMENT = (Path(__file__).parents[2] / "docs" / "workers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.M | re.S)


def test_there_are_two() -> None:
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("block", BLOCKS, ids=["a group", "two groups"])
def test_example(block: str) -> None:
    """Its classes are those of a script, known by value only."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(block, "docs/workers.md", "exec"), names)  # noqa: S102
    finally:
        for found in [found for found in names.values() if isinstance(found, WorkerGroup | Cluster)]:
            (found.end_group if isinstance(found, WorkerGroup) else found.shutdown)()
