"""What a channel cannot be made or used with: errors at once, which say what is allowed. No broker is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from workers.channels import Channel
from workers.channels.discovery import NODES_VARIABLE


@pytest.mark.parametrize("maxsize", [1.5, True, "3", None])
def test_a_maxsize_is_an_integer(maxsize: Any) -> None:
    with pytest.raises(TypeError, match=r"maxsize=.*: expected an int, got"):
        Channel.create("c", maxsize=maxsize)


@pytest.mark.parametrize("maxsize", [-1, 2**63, 2**70])
def test_a_maxsize_has_its_bounds(maxsize: int) -> None:
    with pytest.raises(ValueError, match=rf"maxsize={maxsize}: expected 0 \(no bound\) or more, and less than"):
        Channel.create("c", maxsize=maxsize)


def test_a_maxsize_may_be_of_any_type_of_integers() -> None:
    channel = Channel.create("c", maxsize=np.int64(3), local=True)  # type: ignore[arg-type]
    assert type(channel.maxsize) is int


@pytest.mark.parametrize(("rank", "nodes"), [(7, 1), (-1, 1), (2, 2)])
def test_a_node_is_one_of_the_clusters(rank: int, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said = rf"node_rank={rank} is out of range; the cluster has {nodes} nodes, counted from 0"
    with pytest.raises(ValueError, match=said):
        Channel.create("c", node_rank=rank, nodes=nodes)
    monkeypatch.setenv(NODES_VARIABLE, str(nodes))
    with pytest.raises(ValueError, match=said):
        Channel.create("c", node_rank=rank)


def test_a_node_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NODES_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="node_rank=-1 is out of range"):
        Channel.create("c", node_rank=-1)
    for rank in (1.0, "1", True, None):
        with pytest.raises(TypeError, match=r"node_rank=.*: expected an int, got"):
            Channel.create("c", node_rank=rank)  # type: ignore[arg-type]


@pytest.mark.parametrize("use", [Channel.create, Channel.connect])
def test_a_name_is_a_string_and_no_brokers(use: Any) -> None:
    with pytest.raises(TypeError, match="channel name 5: expected a str, got int"):
        use(5)
    for name in ("", "@broker/0"):
        with pytest.raises(ValueError, match="channel name"):
            use(name)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "heavy", True, 2**2000, None])
def test_a_weight_that_is_none_is_refused(weight: Any) -> None:
    channel = Channel.create("c", local=True)
    with pytest.raises(ValueError, match=r"weight=.*: expected a finite number of 0 or more"):
        channel.put(1, weight=weight)
    with pytest.raises(ValueError, match=r"weight=.*: expected a finite number of 0 or more"):
        channel.get_batch(weight)


@pytest.mark.parametrize("key", [[1], object(), torch.ones(1), (1, object()), lambda: 1])
def test_a_key_that_is_equal_to_no_copy_is_refused(key: Any) -> None:
    channel = Channel.create("c", local=True)
    uses = (lambda: channel.put(1, key=key), lambda: channel.get(key=key), lambda: channel.qsize(key))
    for use in uses:
        with pytest.raises(TypeError, match=r"key of type .* is not supported: .*\. Use strings, "):
            use()


def test_a_key_has_an_end() -> None:
    channel = Channel.create("c", local=True)
    with pytest.raises(ValueError, match="a channel's key has at most 1,048,576"):
        channel.put(1, key="x" * (1 << 20))
