from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.core import failpoints

ROOT = Path(__file__).parents[2]


def names_in(tree: ast.AST) -> Iterator[str]:
    """Every text that could be the name of a failpoint, f-strings with `*` for what is filled in."""
    if isinstance(tree, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in tree.values)
        return
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield tree.value
    for child in ast.iter_child_nodes(tree):
        yield from names_in(child)


def hits_in(tree: ast.AST) -> Iterator[str]:
    """The names that are given to `hit` directly."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == "hit":
                yield from names_in(node.args[0])


def test_the_list_is_complete_and_each_place_is_there() -> None:
    paths = [path for folder in ("dataplane", "workers") for path in (ROOT / folder).rglob("*.py")]
    trees = [ast.parse(path.read_text()) for path in paths if path.name != "failpoints.py"]
    hit = {name for tree in trees for name in hits_in(tree)}
    assert hit <= failpoints.NAMES
    known = {name for tree in trees for name in names_in(tree)}
    assert known >= failpoints.NAMES


def test_an_unknown_place_cannot_be_armed() -> None:
    with pytest.raises(ValueError, match=r"put\.before_comit"):
        failpoints.arm("put.before_comit", lambda: None)


def test_an_armed_place_runs_its_action_until_it_is_disarmed() -> None:
    reached: list[str] = []
    failpoints.arm("call.Commit.before", lambda: reached.append("there"))
    failpoints.hit("call.Commit.before")
    failpoints.hit("call.Commit.after")
    failpoints.disarm()
    failpoints.hit("call.Commit.before")
    assert reached == ["there"]
