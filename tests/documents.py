"""The code in the project's documents, as a reader would run it.

A page's Python blocks build on each other, in one process; those of `STAND_ALONE` pages do not. A comment right before
a block says what is special: `<!-- file: NAME -->`: the block is that file, beside the script;
`<!-- notest: WHY -->`: it cannot be run here.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dataplane.cli.app import main

ROOT = Path(__file__).parents[1]
STAND_ALONE = ("README.md",)
_BLOCK = re.compile(r"(?:<!-- (file|notest): (.+?) -->\n)?^```(\w+)([^\n]*)\n(.*?)^```", re.M | re.S)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block. `file` is the name of the file that it is; `why_not` why it is not run ("": it is)."""

    page: str
    line: int
    language: str
    code: str
    file: str = ""
    why_not: str = ""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """All documents, by their paths from the project's root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def blocks(page: str) -> list[Block]:
    """The page's fenced blocks, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        special, what, language, rest, code = match.groups()
        assert not rest.strip(), f"{page}: what does ```{language}{rest} mean?"
        found.append(
            Block(
                page=page,
                line=text.count("\n", 0, match.start(3)) + 1,
                language=language,
                code=code,
                file=what if special == "file" else "",
                why_not=what if special == "notest" else "",
            )
        )
    return found


def scripts() -> list[list[Block]]:
    """Python blocks that run together, with the files that they want beside them."""
    found = []
    for page in pages():
        python = [block for block in blocks(page) if block.language == "python" and not block.why_not]
        if page in STAND_ALONE:
            found += [[block] for block in python]
        elif python:
            found.append(python)
    return found


def shell_blocks() -> list[Block]:
    """Every block for a shell, those that are not run as well."""
    return [block for page in pages() for block in blocks(page) if block.language in ("sh", "bash", "shell", "console")]


@cache
def flags_of(verb: str) -> set[str]:
    """The flags that `tq verb --help` lists."""
    shown, before = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "200"
    try:
        with contextlib.redirect_stdout(shown):
            assert main([verb, "--help"]) == 0, f"tq {verb}: {shown.getvalue()[-500:]}"
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return set(re.findall(r"--[a-z][a-z-]+", shown.getvalue()))
