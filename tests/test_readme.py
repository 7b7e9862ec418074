"""The README's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


def test_there_are_blocks() -> None:
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS, ids=[str(n) for n in range(len(BLOCKS))])
def test_block(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})  # noqa: S102


def test_every_path_that_the_layout_table_names_exists() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("| folder |")[1].split("\n\n")[0]
    for cell in re.findall(r"^\| (`[^|]+`) \|", table, re.M):
        first, *others = cell.strip("`").split()
        assert (ROOT / first).exists(), first
        for other in others:
            assert (ROOT / Path(first).parent / other).exists(), other
