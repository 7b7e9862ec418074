"""Which nodes get storage units, how many, and their names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.service.nodes import (
    RayNode,
    capacity_of_each,
    check_storage,
    next_unit,
    node_of,
    node_selector,
    units_to_start,
)

NODE = RayNode(
    ident="ab12", host="10.0.0.1", labels={"pool": "rollout", "zone": "a"}, resources={"CPU": 8.0, "GPU": 2.0}
)


def test_a_node_of_rays() -> None:
    entry = {
        "NodeID": "ab12",
        "Alive": True,
        "NodeManagerAddress": "10.0.0.1",
        "NodeManagerHostname": "one",
        "Labels": {"pool": "rollout"},
        "Resources": {"CPU": 8.0},
    }
    expected = RayNode(ident="ab12", host="10.0.0.1", name="one", labels={"pool": "rollout"}, resources={"CPU": 8.0})
    assert node_of(entry) == expected


@pytest.mark.parametrize(
    ("nodes", "taken"),
    [
        (None, True),
        (["ab12", "other"], True),
        ({"other"}, False),
        ([], False),
        ({"pool": "rollout"}, True),
        ({"pool": "trainers"}, False),
        ({"pool": "rollout", "GPU": 2}, True),
        ({"GPU": 3}, False),
        ({"TPU": 1}, False),
        (lambda node: node.host.startswith("10."), True),
    ],
)
def test_which_nodes_are_taken(nodes: Any, taken: bool) -> None:
    assert node_selector(nodes)(NODE) is taken


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("ab12", "nodes='ab12': expected a list of node ids .str., a mapping"),
        ([1, 2], "expected a list of node ids"),
        ({"pool": None}, "nodes={'pool': None}: expected a label and its value"),
        ({"GPU": True}, "nodes={'GPU': True}"),
    ],
)
def test_what_says_nothing_about_nodes(nodes: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        node_selector(nodes)


def test_where_units_may_be() -> None:
    for storage in ("per_node", "driver_node"):
        check_storage(storage, 3)  # type: ignore[arg-type]
    check_storage(5, 1)
    with pytest.raises(TypeError, match=r'storage=\'each\': expected "per_node", "driver_node" or a number'):
        check_storage("each", 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="storage=True"):
        check_storage(True, 1)
    with pytest.raises(ValueError, match="storage=0: a service needs at least one storage unit"):
        check_storage(0, 1)
    with pytest.raises(ValueError, match="storage=4 is the total number of units, units=2 the number per node"):
        check_storage(4, 2)


def test_the_capacity_of_a_node_is_shared_by_its_units() -> None:
    assert capacity_of_each("per_node", 9 << 30, None, 3) == 3 << 30
    assert capacity_of_each("per_node", None, 4 << 30, 3) == 4 << 30
    assert capacity_of_each(2, None, None, 1) is None
    with pytest.raises(ValueError, match="capacity_per_node=4096 is for all units of a node"):
        capacity_of_each("per_node", 4096, 4096, 1)
    with pytest.raises(ValueError, match="storage=2 is a number of units"):
        capacity_of_each(2, 4096, None, 1)


@pytest.mark.parametrize(
    ("storage", "running", "each", "asked", "expected"),
    [
        ("per_node", {}, 1, [], {"a": 1, "b": 1, "c": 1}),
        ("per_node", {"a": 2, "b": 1}, 2, [], {"b": 1, "c": 2}),
        ("driver_node", {}, 2, [], {"a": 2}),
        ("driver_node", {"a": 2}, 2, [], {}),
        ("driver_node", {"a": 1}, 1, ["c"], {"c": 1}),
        (2, {}, 1, [], {"a": 1, "b": 1}),
        (7, {}, 1, [], {"a": 3, "b": 2, "c": 2}),
        (4, {"b": 2}, 1, [], {"a": 1, "c": 1}),
        (2, {"b": 2}, 1, [], {}),
        (2, {"b": 2}, 1, ["a"], {"a": 1}),
        (3, {"b": 3}, 1, ["b"], {}),
    ],
)
def test_what_is_missing(
    storage: Any, running: dict[str, int], each: int, asked: list[str], expected: dict[str, int]
) -> None:
    assert units_to_start(storage, ["a", "b", "c"], running, units_per_node=each, driver="a", added=asked) == expected


def test_no_node_may_have_any() -> None:
    assert units_to_start(3, [], {}, units_per_node=1, driver="a") == {}


@given(
    st.integers(1, 20),
    st.lists(st.sampled_from("abcdef"), unique=True, min_size=1),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5)),
)
def test_a_number_of_units_is_dealt_evenly(storage: int, nodes: list[str], running: dict[str, int]) -> None:
    to_start = units_to_start(storage, nodes, running, units_per_node=1, driver="a")
    before = {node: running.get(node, 0) for node in nodes}
    after = {node: before[node] + to_start.get(node, 0) for node in nodes}
    assert sum(after.values()) == max(storage, sum(before.values()))
    assert all(after[node] <= min(after.values()) + 1 for node in to_start)


def test_names_are_of_the_host_and_used_again() -> None:
    names: list[str] = []
    for _ in range(3):
        names.append(next_unit("10.0.0.1", names)[0])
    assert names == ["unit-10.0.0.1-0", "unit-10.0.0.1-1", "unit-10.0.0.1-2"]
    assert next_unit("10.0.0.1", [names[0], names[2]]) == (names[1], 1)
    assert next_unit("10.0.0.10", names) == ("unit-10.0.0.10-0", 0)
