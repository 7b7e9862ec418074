"""CONTRIBUTING's lists of files to touch are short, and name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TASKS = re.findall(r"^### (.+?)\n(.+?)(?=^##)", PAGE, re.M | re.S)
FILE = re.compile(r"`((?:proto|dataplane|workers)/[\w/.]+)`")


def test_there_are_six_tasks() -> None:
    assert len(TASKS) == 6


@pytest.mark.parametrize("text", [text for _, text in TASKS], ids=[name for name, _ in TASKS])
def test_a_task_touches_at_most_six_files(text: str) -> None:
    steps = re.findall(r"^(?:\d+\.|-) ", text, re.M)
    assert 1 <= len(steps) <= 6
    assert [name for name in FILE.findall(text.replace("VERB", "app")) if not (ROOT / name).exists()] == []
