"""Metas that carry where their samples are: read from there where that is still so, else from where they are now."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, KVBatchMeta, SampleNotFoundError, StaleSampleError
from dataplane.core import failpoints
from dataplane.errors import FieldNotProducedError
from tests.restarts import RestartableService, one_unit, wait_until

pytestmark = pytest.mark.integration

GUESSED, LOOKED_UP, BOTH = ["copy", "answer"], ["answer", "copy"], ["copy", "answer", "copy"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestartableService]:
    with one_unit(tmp_path / "state") as restartable:
        yield restartable


@pytest.fixture
def order() -> Iterator[list[str]]:
    """What reads do, in order."""
    done: list[str] = []
    failpoints.arm("get.mid_copy", lambda: done.append("copy"))
    failpoints.arm("call.Locate.after", lambda: done.append("answer"))
    yield done
    failpoints.disarm()


def tokens(*numbers: int) -> list[torch.Tensor]:
    return [torch.full((100,), n) for n in numbers]


def put(client: DataPlaneClient, *numbers: int, start: int = 0) -> KVBatchMeta:
    ids = [f"s{n}" for n in numbers]
    fields = {"x": tokens(*[start + n for n in numbers]), "y": torch.tensor([float(start + n) for n in numbers])}
    return client.put_samples(ids, "p", fields)


@pytest.fixture
def located(client: DataPlaneClient, order: list[str]) -> KVBatchMeta:
    """Samples 0 to 5; the client is connected to their unit."""
    client.register_partition("p", ["x", "y"], None, ["train"])
    meta = put(client, *range(6))
    client.get_data(meta)
    found = client.locate(meta)
    order.clear()
    return found


def numbers_of(client: DataPlaneClient, meta: KVBatchMeta, order: list[str]) -> tuple[list[int], list[str]]:
    """What is read, and how."""
    order.clear()
    got = client.get_data(meta)
    return [int(row[0]) for row in got["x"].unbind()], list(order)


def expected(connection_kind: str, how: list[str]) -> list[str]:
    return LOOKED_UP if connection_kind.endswith("async") else how


def test_what_has_not_changed_is_copied_before_the_answer_is_there(
    client: DataPlaneClient, located: KVBatchMeta, order: list[str], connection_kind: str
) -> None:
    assert numbers_of(client, located, order) == (list(range(6)), expected(connection_kind, GUESSED))
    order.clear()
    batch = client.get_batch(located, pad_value_dict={"x": -1}, pad_to_seqlen=120)
    assert batch["x"].shape == (6, 120)
    assert order == expected(connection_kind, GUESSED)
    assert located == client.locate(located.with_fields(["x", "y"])), "a hint is no part of what a meta says"


def test_places_stay_aligned_through_everything_that_is_done_to_a_meta(
    client: DataPlaneClient, located: KVBatchMeta, order: list[str], connection_kind: str
) -> None:
    how = expected(connection_kind, GUESSED)
    assert numbers_of(client, located.subset([4, 1, 4]), order) == ([4, 1, 4], how)
    assert numbers_of(client, located.slice(2, 5), order) == ([2, 3, 4], how)
    assert numbers_of(client, located.drop(["s0", "s5"]), order) == ([1, 2, 3, 4], how)
    assert numbers_of(client, KVBatchMeta.concat([located.slice(3, 5), located.slice(0, 1)]), order) == ([3, 4, 0], how)
    assert numbers_of(client, pickle.loads(pickle.dumps(located)).subset([5]), order) == ([5], how)
    mixed = KVBatchMeta.concat([located.slice(3, 5), put(client, 7)])
    assert numbers_of(client, mixed, order) == ([3, 4, 7], LOOKED_UP)
    assert numbers_of(client, client.locate(located, ["x"]).with_fields(["x", "y"]), order)[0] == list(range(6))


def test_another_client_reads_from_there_too_once_it_is_connected(
    open_client: Callable[[], DataPlaneClient], located: KVBatchMeta, order: list[str], connection_kind: str
) -> None:
    other, sent = open_client(), pickle.loads(pickle.dumps(located))
    assert numbers_of(other, sent, order) == (list(range(6)), LOOKED_UP)
    assert numbers_of(other, sent, order) == (list(range(6)), expected(connection_kind, GUESSED))


def test_overwritten_rows_are_read_where_they_are(
    client: DataPlaneClient, located: KVBatchMeta, order: list[str], connection_kind: str, poison: None
) -> None:
    put(client, 2, 3, start=100)
    assert numbers_of(client, located, order) == ([0, 1, 102, 103, 4, 5], expected(connection_kind, BOTH))
    assert numbers_of(client, located.slice(4, 6), order) == ([4, 5], expected(connection_kind, GUESSED))


def test_other_bytes_at_the_same_place_are_not_taken_for_the_old_ones(
    client: DataPlaneClient, located: KVBatchMeta, order: list[str], connection_kind: str, poison: None
) -> None:
    def write(number: int) -> KVBatchMeta:
        return client.put_samples(located, "p", {"x": [torch.full((60_000,), number)] * 6})

    first = client.locate(write(1), ["x"])
    write(2)
    again = client.locate(write(3), ["x"])
    before, after = first.places["x"], again.places["x"]
    assert before.offsets.tolist() == after.offsets.tolist(), "the space was used again"
    assert numbers_of(client, first, order) == ([3] * 6, expected(connection_kind, BOTH))
    assert numbers_of(client, again, order) == ([3] * 6, expected(connection_kind, GUESSED))


def test_cleared_samples_are_told_of_and_born_again_are_others(
    client: DataPlaneClient, located: KVBatchMeta, order: list[str]
) -> None:
    client.clear_samples(["s1"], "p")
    with pytest.raises(StaleSampleError, match="s1"):
        client.get_data(located)
    put(client, 1, start=100)
    with pytest.raises(StaleSampleError, match="s1"):
        client.get_batch(located)
    client.clear_samples(None, "p")
    with pytest.raises(KeyError, match="partition"):
        client.get_data(located)


def test_what_is_missing_cannot_be_located(client: DataPlaneClient, located: KVBatchMeta) -> None:
    client.put_samples(["half"], "p", {"x": tokens(9)})
    with pytest.raises(FieldNotProducedError):
        client.locate(client.list_samples("p"), ["y"])
    with pytest.raises(SampleNotFoundError):
        client.locate(KVBatchMeta("p", None, ["nobody"]), ["x"])


def test_moved_rows_are_read_where_they_are(
    client: DataPlaneClient, server: RestartableService, located: KVBatchMeta, order: list[str], connection_kind: str
) -> None:
    server.unit()
    client.drain(1, timeout_s=60)
    assert numbers_of(client, located, order) == (list(range(6)), expected(connection_kind, BOTH))
    client.drop_unit(1)
    server.units[0].stop()
    assert numbers_of(client, located, order)[0] == list(range(6))
    again = client.locate(located)
    assert numbers_of(client, again, order) == (list(range(6)), expected(connection_kind, GUESSED))


def test_another_run_of_the_unit_is_not_taken_for_the_one_it_was(
    client: DataPlaneClient, server: RestartableService, located: KVBatchMeta, order: list[str]
) -> None:
    server.units[0].stop()
    wait_until(lambda: not client.stats().units[0].connected)
    client.drop_unit(1, force=True)
    server.unit()
    with pytest.raises(StaleSampleError):
        client.get_data(located)
    meta = put(client, *range(6), start=300)
    assert numbers_of(client, client.locate(meta), order)[0] == [300 + n for n in range(6)]


def test_objects_are_looked_up_first(client: DataPlaneClient, located: KVBatchMeta, order: list[str]) -> None:
    client.put_samples(located, "p", {"text": [f"text {n}" for n in range(6)]})
    meta = client.locate(located, ["text"])
    order.clear()
    got: Any = client.get_data(meta, ["text"])
    assert list(got["text"]) == [f"text {n}" for n in range(6)]
    assert order == LOOKED_UP


def test_views_are_pinned_first(client: DataPlaneClient, located: KVBatchMeta, order: list[str]) -> None:
    got = client.get_samples(located, "p", ["x"], copy=False)
    assert [int(row[0]) for row in got["x"].unbind()] == list(range(6))
    assert order == LOOKED_UP
