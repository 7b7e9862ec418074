"""The reckoning of a storm finds what it is there to find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.books import Books, StormError
from tests.faults.growth import Figures

FINE = Figures(
    memory={"controller": 1 << 20},
    fds={"controller": 50},
    state_bytes=1 << 20,
    image_bytes=1000,
    own_bytes=1 << 20,
    own_fds=50,
    own_threads=5,
)


def books(folder: Path, *lines: str, drained: tuple[str, ...] = ()) -> Books:
    (folder / "a.notes").write_text("\n".join(lines))
    return Books(folder, drained)


def test_what_was_put_and_consumed_once_balances(tmp_path: Path) -> None:
    lines = ("putting a b", "put a b", "putting c", "error CallTimeoutError", "acking a", "acked a", "acking c")
    said = books(tmp_path, *lines, drained=("b",)).reckon()
    assert said.startswith(
        "2 samples put and 2 consumed once each, none lost; 1 puts and 1 acknowledgements of unknown"
    )
    assert "{'CallTimeoutError': 1}" in said


@pytest.mark.parametrize(
    ("lines", "drained", "finding"),
    [
        (["putting a", "put a"], (), "lost: .'a'"),
        (["putting a", "put a", "acking a", "acked a"], ("a",), "consumed twice: .'a'"),
        (["acking a", "acked a"], (), "never put: .'a'"),
        ([], ("a",), "never put: .'a'"),
    ],
)
def test_what_does_not_balance_is_named(
    tmp_path: Path, lines: list[str], drained: tuple[str, ...], finding: str
) -> None:
    with pytest.raises(StormError, match=finding):
        books(tmp_path, *lines, drained=drained).reckon()


def test_what_must_never_be_is_no_entry(tmp_path: Path) -> None:
    with pytest.raises(StormError, match="a thread died"):
        books(tmp_path, "BAD a thread died")


@pytest.mark.parametrize(
    ("grown", "what"),
    [
        ({"memory": {"controller": 1 << 30}}, "memory of controller"),
        ({"fds": {"controller": 1000}}, "descriptors of controller"),
        ({"state_bytes": 1 << 30}, "state directory"),
        ({"image_bytes": 16 << 20}, "image"),
        ({"own_bytes": 1 << 30}, "memory of a client"),
        ({"own_fds": 500}, "descriptors of a client"),
        ({"own_threads": 50}, "threads of a client"),
    ],
)
def test_growth_is_told(grown: dict[str, object], what: str) -> None:
    FINE.check(FINE)
    with pytest.raises(StormError, match=what):
        replace(FINE, **grown).check(FINE)  # type: ignore[arg-type]
