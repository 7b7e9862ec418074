"""The README's layout table is true; `test_docs` runs its code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_path_that_the_layout_table_names_exists() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("| folder |")[1].split("\n\n")[0]
    paths = [path for cell in re.findall(r"^\| (`[^|]+`) \|", table, re.M) for path in re.findall(r"`([^`]+)`", cell)]
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
