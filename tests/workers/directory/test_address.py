from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.directory.address import WorkerAddress

PATHS = st.lists(st.integers(0, 10**6), max_size=5).map(tuple)
NAMES = st.text(st.characters(exclude_characters=":", exclude_categories=["Cs"]), min_size=1, max_size=12)


@given(NAMES, PATHS)
def test_a_name_says_the_whole_address(root: str, path: tuple[int, ...]) -> None:
    address = WorkerAddress(root, path)
    assert WorkerAddress.from_name(address.get_name()) == address
    assert pickle.loads(pickle.dumps(address)) == address
    assert hash(WorkerAddress(root, list(path))) == hash(address)


def test_the_first_child_of_rank_0() -> None:
    child = WorkerAddress("g", 0).get_child_address(0)
    assert child.get_name() == str(child) == "g:0:0"
    assert child.root_group_name == "g"
    assert child.rank_path == (0, 0)
    assert child.get_parent_address() == WorkerAddress("g", (0,)) == WorkerAddress("g", 0)


def test_a_root_has_a_name_but_no_rank_and_no_parent() -> None:
    root = WorkerAddress("g")
    assert root.get_name() == "g"
    assert root.rank is None
    with pytest.raises(ValueError, match="names a whole group"):
        root.get_parent_address()


def test_the_rank_is_that_among_siblings() -> None:
    assert WorkerAddress("g", (3, 1)).rank == 1


@pytest.mark.parametrize("name", ["", "a:b"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(ValueError, match="group name"):
        WorkerAddress(name)


@pytest.mark.parametrize(
    ("ranks", "error"),
    [(-1, ValueError), ((0, -2), ValueError), ((True,), TypeError), (1.0, TypeError), ("12", TypeError)],
)
def test_ranks_that_cannot_be(ranks: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^rank .* of group 'g' is "):
        WorkerAddress("g", ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["g:", "g:x", "g:-1", "g:0:", "g:²"])
def test_strings_that_are_no_worker_name(name: str) -> None:
    with pytest.raises(ValueError, match="worker name"):
        WorkerAddress.from_name(name)


def test_addresses_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        WorkerAddress("g").root_group_name = "h"  # type: ignore[misc]


def test_a_group_name_is_a_str() -> None:
    with pytest.raises(TypeError, match="group name 3 is int, expected str"):
        WorkerAddress(3, 0)  # type: ignore[arg-type]
