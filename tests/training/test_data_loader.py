# ruff: noqa: F401, F811
"""Streams of micro-batches: what they claim, when they end, what they give back."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from typing import Any

import pytest
import torch

import dataplane
from dataplane import DataPlaneClient, StreamingDataLoader
from dataplane.errors import (
    CallTimeoutError,
    ClaimTimeoutError,
    ClientClosedError,
    PartitionNotFoundError,
    StaleSampleError,
)
from dataplane.training.data_loader import Prefetcher
from tests.restarts import wait_until
from tests.service import client, server
from tests.streams import NEVER_S, TASKS, loader, partition, prefetches, put, rewards

pytestmark = pytest.mark.integration


@prefetches
def test_a_stream_ends_when_the_partition_is_sealed_and_drained(
    client: DataPlaneClient, partition: str, prefetch: int
) -> None:
    put(client, partition, range(3))
    with loader(client, partition, prefetch=prefetch, pad_value_dict={"input_ids": -1}, pad_to_multiple=4) as stream:
        batches = iter(stream)
        data, meta = next(batches)
        assert data["input_ids"].tolist() == [[0, -1, -1, -1], [1, 1, -1, -1]]
        assert (meta.sample_ids, meta.sequence_lengths, meta.task_name) == (["s0", "s1"], [1, 2], "train")
        put(client, partition, [3, 4])
        client.seal(partition)
        assert [data["reward"].tolist() for data, _ in batches] == [[2.0, 3.0], [4.0]]
        assert client.check_consumption_status(partition, ["train"])
        assert rewards(stream) == [], "what is over stays over"
    assert not client.check_consumption_status(partition, ["other"])


def test_widths_are_rounded_up_without_the_tag_of_lengths(client: DataPlaneClient, partition: str) -> None:
    fields = {
        "input_ids": [torch.ones(n, dtype=torch.int64) for n in (3, 5)],
        "loss_mask": [torch.ones(n) for n in (3, 2)],
        "patches": [torch.ones(n, 2) for n in (7, 2)],
        "reward": torch.zeros(2),
    }
    client.put_samples(["a", "b"], partition, fields)
    with StreamingDataLoader(
        client, partition, "train", list(fields), batch_size=2, prefetch=0, pad_to_multiple=4
    ) as stream:
        data, meta = next(iter(stream))
    assert meta.sequence_lengths is None
    shapes = {name: list(data[name].shape) for name in fields}
    assert shapes == {"input_ids": [2, 8], "loss_mask": [2, 4], "patches": [2, 7, 2], "reward": [2]}
    assert data["loss_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]


@prefetches
def test_micro_batches_come_as_they_get_ready(client: DataPlaneClient, partition: str, prefetch: int) -> None:
    with loader(client, partition, prefetch=prefetch) as stream:
        batches, got = iter(stream), threading.Event()
        seen: list[list[str]] = []

        def train() -> None:
            for _, meta in batches:
                seen.append(meta.sample_ids)
                got.set()

        trainer = threading.Thread(target=train)
        trainer.start()
        for number in range(3):
            put(client, partition, [2 * number, 2 * number + 1])
            assert got.wait(60)
            got.clear()
        client.seal(partition)
        trainer.join(60)
        assert seen == [["s0", "s1"], ["s2", "s3"], ["s4", "s5"]]


def test_iterating_again_goes_on(client: DataPlaneClient, partition: str) -> None:
    put(client, partition, range(6))
    client.seal(partition)
    with loader(client, partition) as stream:
        assert next(iter(stream)).data["reward"].tolist() == [0.0, 1.0]
        assert rewards(stream) == [[2.0, 3.0], [4.0, 5.0]]


def test_two_loaders_share_the_samples(client: DataPlaneClient, partition: str) -> None:
    put(client, partition, range(10))
    client.seal(partition)
    with loader(client, partition, prefetch=1) as one, loader(client, partition, prefetch=1) as two:
        streams = [iter(one), iter(two)]
        got = [next(stream).meta.sample_ids for stream in streams]
        got += [meta.sample_ids for stream in streams for _, meta in stream]
    assert sorted(name for names in got for name in names) == sorted(f"s{n}" for n in range(10))


def test_claims_are_as_asked(client: DataPlaneClient, partition: str) -> None:
    put(client, partition, range(6))
    client.seal(partition)
    with loader(
        client, partition, where="input_lengths > 2", order="freshest", layout="jagged", device="cpu"
    ) as stream:
        (data, _), *others = list(stream)
    assert data["input_ids"].is_nested
    assert data["reward"].tolist() == [5.0, 4.0]
    assert [batch.data["reward"].tolist() for batch in others] == [[3.0, 2.0]]
    assert not client.check_consumption_status(partition, ["train"])


def test_what_is_too_old_or_never_gets_whole_is_passed_over(client: DataPlaneClient, partition: str) -> None:
    put(client, partition, range(6))
    tags = [{"group": n // 2, "weight_version": n // 2} for n in range(5)]
    client.set_tags([f"s{n}" for n in range(5)], partition, tags)
    client.set_tags(["s5"], partition, [{"group": 3, "weight_version": 2}])
    client.set_version(partition, 2)
    client.seal(partition)
    with loader(client, partition, group_size=2, max_lag=1, partial_after_s=0.0, partial="drop", prefetch=0) as stream:
        assert rewards(stream) == [[2.0, 3.0]]
    assert client.list_samples(partition).sample_ids == ["s0", "s1", "s2", "s3"], "partial groups were dropped"


def test_a_field_that_is_not_produced_is_waited_for(client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition, range(2))
    client.seal(partition)
    fields = ["reward", "advantages"]
    with StreamingDataLoader(client, partition, "train", fields, batch_size=2, timeout_s=NEVER_S) as stream:
        writer = threading.Timer(0.05, client.put_samples, (meta, partition, {"advantages": torch.ones(2, 1)}))
        writer.start()
        ((data, _),) = list(stream)
        writer.join()
    assert sorted(data) == ["advantages", "reward"]


def test_ranks_get_shares_of_the_same_steps(client: DataPlaneClient, partition: str) -> None:
    put(client, partition, range(12))
    client.seal(partition)
    with (
        loader(client, partition, prefetch=2, dp_rank=0, dp_world=2) as one,
        loader(client, partition, prefetch=0, dp_rank=1, dp_world=2) as two,
    ):
        steps = [[batch.meta for batch in stream] for stream in (one, two)]
    assert [[meta.size for meta in metas] for metas in steps] == [[2, 2, 2], [2, 2, 2]]
    for number, (left, right) in enumerate(zip(*steps, strict=True)):
        names = sorted([*left.sample_ids, *right.sample_ids], key=lambda name: int(name[1:]))
        assert names == [f"s{n}" for n in range(4 * number, 4 * number + 4)]
        assert sum(left.sequence_lengths or []) == sum(right.sequence_lengths or []), "tokens balance"


# --- waiting, errors ------------------------------------------------------------------------------------------------


@prefetches
def test_a_wait_ends_in_what_is_missing_and_may_go_on(
    client: DataPlaneClient, partition: str, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataplane.training.data_loader, "CLAIM_S", 0.05)
    put(client, partition, [0])
    fields = ["input_ids"]
    with StreamingDataLoader(
        client, partition, "train", fields, batch_size=2, timeout_s=2.0, prefetch=prefetch
    ) as stream:
        ahead = queue_of(stream)
        if prefetch:
            wait_until(lambda: ahead._late, "a claim that got nothing")
        with pytest.raises(ClaimTimeoutError, match=r"for 2 samples.*; 1 were ready"):
            next(iter(stream))
        client.seal(partition)
        if prefetch:
            wait_until(lambda: ahead._ended, "the end to be fetched")
        assert [meta.sample_ids for _, meta in stream] == [["s0"]]


@prefetches
def test_what_a_claim_raises_is_raised(client: DataPlaneClient, prefetch: int) -> None:
    with loader(client, "nowhere", prefetch=prefetch) as stream:
        for _ in range(2):
            with pytest.raises(PartitionNotFoundError):
                next(iter(stream))


def test_a_short_timeout_names_what_is_missing(client: DataPlaneClient, partition: str) -> None:
    """The thread's claims end within the loader's timeout."""
    with StreamingDataLoader(client, partition, "train", ["input_ids"], batch_size=2, timeout_s=0.4) as stream:
        ahead = queue_of(stream)
        wait_until(lambda: ahead._late, "a claim that got nothing")
        with pytest.raises(ClaimTimeoutError, match=r"for 2 samples.*; 0 were ready"):
            next(iter(stream))


def test_a_partition_that_is_there_again_is_asked_anew(client: DataPlaneClient, partition: str) -> None:
    """The thread found it gone while nobody asked for a micro-batch."""
    with loader(client, partition) as stream:
        (thread,) = [thread for thread in threading.enumerate() if partition in thread.name]
        client.clear_samples(None, partition)
        thread.join(60)
        assert not thread.is_alive()
        client.register_partition(partition, ["input_ids", "reward"], None, TASKS)
        put(client, partition, range(2))
        assert next(iter(stream)).meta.sample_ids == ["s0", "s1"]


def test_what_an_earlier_partition_kept_waiting_for_is_forgotten_with_it() -> None:
    late = ClaimTimeoutError(
        partition="old", task="train", wanted=2, ready=0, waited_s=1.0, why="no sample has 'reward'"
    )
    outcomes = iter([late, PartitionNotFoundError(partition="old")])
    stopped = threading.Event()

    def claim(timeout_s: float) -> None:
        outcome = next(outcomes, None)
        if outcome is not None:
            raise outcome
        stopped.wait()

    prefetcher: Prefetcher[Any] = Prefetcher(claim, pytest.fail, capacity=1, name="ahead", timeout_s=1.0)
    assert prefetcher._thread is not None
    prefetcher._thread.join()
    with pytest.raises(CallTimeoutError):
        prefetcher.take(0.0)
    stopped.set()
    prefetcher.close()


def test_what_cannot_be_read_goes_back(client: DataPlaneClient, partition: str) -> None:
    meta = client.put_samples(["a", "b"], partition, {"reward": torch.zeros(2)})
    with (
        StreamingDataLoader(
            client, partition, "train", ["input_ids"], required_fields=["reward"], batch_size=2, prefetch=0
        ) as stream,
        pytest.raises(KeyError, match="'input_ids' has not been produced"),
    ):
        next(iter(stream))
    assert client.claim_meta(partition, "train", ["reward"], 2, blocking=False).sample_ids == meta.sample_ids


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_workers": 1}, "num_workers=1: expected 0"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"pad_to_multiple": 0}, "pad_to_multiple=0"),
        ({"batch_size": None}, "batch_size=None: expected an integer of 1 or more"),
        ({"prefetch": 0.5}, "prefetch=0.5: expected an integer of 0 or more"),
        ({"dp_world": "2", "dp_rank": 0}, "dp_world='2': expected an integer of 1 or more"),
        ({"dp_world": 2}, "pass both or neither"),
    ],
)
def test_arguments(client: DataPlaneClient, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        loader(client, "p", **options)


@pytest.mark.parametrize("named", [{"fields": "x"}, {"fields": ["x"], "required_fields": "x"}])
def test_one_text_is_no_list_of_names(client: DataPlaneClient, named: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{list(named)[-1]}='x': pass a list of names, not one string"):
        StreamingDataLoader(client, "p", "train", batch_size=2, **named)


# --- the end --------------------------------------------------------------------------------------------------------


def queue_of(stream: StreamingDataLoader) -> Any:
    """What holds ready what was fetched ahead."""
    return stream._stream._prefetcher


def fetched_ahead(client: DataPlaneClient, partition: str, left: int) -> None:
    """Wait until the thread has claimed all but `left` samples."""
    wait_until(lambda: client.why_blocked(partition, "train").unclaimed <= left, "the samples to be claimed ahead")


def test_closing_gives_back_what_was_fetched_ahead(client: DataPlaneClient, partition: str) -> None:
    put(client, partition, range(8))
    stream = loader(client, partition, prefetch=2)
    batches = iter(stream)
    assert next(batches).meta.sample_ids == ["s0", "s1"]
    fetched_ahead(client, partition, 2)
    stream.close()
    stream.close()
    with pytest.raises(ClientClosedError, match="the StreamingDataLoader was closed"):
        next(batches)
    with pytest.raises(ClientClosedError):
        next(iter(stream))
    left = client.claim_meta(partition, "train", [], 8, blocking=False)
    assert left.sample_ids == [f"s{n}" for n in range(2, 8)], "and not what was handed out"


def test_closing_wakes_who_waits(client: DataPlaneClient, partition: str) -> None:
    stream = loader(client, partition)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            next(iter(stream))
        except ClientClosedError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    stream.close()
    waiter.join(60)
    assert len(caught) == 1
    assert client.list_samples(partition).size == 0, "the client is open"


def test_a_forgotten_stream_ends_too(client: DataPlaneClient, partition: str) -> None:
    put(client, partition, range(2))
    stream = loader(client, partition)
    fetched_ahead(client, partition, 0)
    (thread,) = [thread for thread in threading.enumerate() if partition in thread.name]
    del stream
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert client.why_blocked(partition, "train").unclaimed == 2


# --- leases ---------------------------------------------------------------------------------------------------------


def test_a_lease_ends_with_the_next_micro_batch(client: DataPlaneClient, partition: str) -> None:
    put(client, partition, range(6))
    client.seal(partition)
    with loader(client, partition, prefetch=0, lease_s=NEVER_S) as stream:
        batches = iter(stream)
        first, second = next(batches).meta, next(batches).meta
        with pytest.raises(StaleSampleError):
            client.ack(first)
        client.ack(second)
        with pytest.raises(StaleSampleError):
            next(batches)
        assert rewards(stream) == [[4.0, 5.0]]
    assert client.check_consumption_status(partition, ["train"])


def test_what_another_consumed_and_cleared_since_is_told(client: DataPlaneClient, partition: str) -> None:
    put(client, partition, range(7))
    lease_s = 0.2
    with loader(client, partition, batch_size=7, prefetch=0, lease_s=lease_s) as stream:
        next(iter(stream))
        handed_out = time.monotonic()
        again = client.claim_meta(partition, "train", [], 7, lease_s=NEVER_S)
        client.clear_samples(again, partition)
        wait_until(lambda: time.monotonic() > handed_out + lease_s)
        with pytest.raises(StaleSampleError, match="lease ended") as caught:
            next(iter(stream))
    assert caught.value.samples == [f"s{n}" for n in range(7)]


def held_ready(stream: StreamingDataLoader) -> Any:
    """The claims of the micro-batch that is next."""
    return wait_until(lambda: list(queue_of(stream)._ready), "a micro-batch that is held ready")[0].meta.claims


def test_what_was_taken_back_while_it_was_held_ready_is_passed_over(client: DataPlaneClient, partition: str) -> None:
    first = put(client, partition, range(2))
    put(client, partition, range(2, 4))
    with loader(client, partition, prefetch=2, lease_s=NEVER_S) as stream:
        fetched_ahead(client, partition, 0)
        claimed = dataclasses.replace(first, _claims=held_ready(stream))
        client.nack(dataclasses.replace(claimed, task_name="train"))
        assert client.claim_meta(partition, "train", [], 2).sample_ids == ["s0", "s1"]
        assert next(iter(stream)).meta.sample_ids == ["s2", "s3"]


@prefetches
def test_clearing_acknowledges(client: DataPlaneClient, partition: str, prefetch: int) -> None:
    put(client, partition, range(6))
    client.seal(partition)
    seen = []
    with loader(client, partition, prefetch=prefetch, lease_s=NEVER_S) as stream:
        for number, (_, meta) in enumerate(stream):
            seen.append(meta.sample_ids)
            client.clear_samples(meta.sample_ids[: 1 + number], partition)
    assert seen == [["s0", "s1"], ["s2", "s3"], ["s4", "s5"]]
    assert client.check_consumption_status(partition, ["train"])


def test_a_stream_does_not_end_while_another_holds_leases(client: DataPlaneClient, partition: str) -> None:
    put(client, partition, range(6))
    client.seal(partition)
    with dataplane.connect(client.config.address) as dying, loader(client, partition, prefetch=0) as second:
        first = loader(dying, partition, batch_size=4, prefetch=0, lease_s=NEVER_S)
        assert next(iter(first)).meta.sample_ids == ["s0", "s1", "s2", "s3"]
        batches = iter(second)
        assert next(batches).meta.sample_ids == ["s4", "s5"]
        assert not client.check_consumption_status(partition, ["train"])
        dying.close()
        assert [meta.sample_ids for _, meta in batches] == [["s0", "s1"], ["s2", "s3"]]
    assert client.check_consumption_status(partition, ["train"])


def test_closing_leaves_what_others_have_consumed_since(client: DataPlaneClient, partition: str) -> None:
    put(client, partition, range(4))
    stream = loader(client, partition, prefetch=2, lease_s=0.2)
    # Not until all are claimed: leases end, and what was claimed first may be free again before the rest is claimed.
    wait_until(lambda: len(queue_of(stream)._ready) == 2, "two micro-batches that are held ready")
    seen: list[str] = []
    while len(seen) < 4:
        again = client.claim_meta(partition, "train", [], 4, min_batch_size=1, lease_s=NEVER_S)
        client.ack(again)
        seen += again.sample_ids
    stream.close()
    assert client.claim_meta(partition, "train", [], 4, blocking=False).size == 0


# --- epochs ---------------------------------------------------------------------------------------------------------


@prefetches
def test_the_next_epoch_goes_through_the_same_loader(client: DataPlaneClient, partition: str, prefetch: int) -> None:
    with loader(client, partition, prefetch=prefetch) as stream:
        for epoch in range(3):
            client.register_partition(partition, ["input_ids", "reward"], (epoch + 1) * 4, TASKS)
            put(client, partition, range(4 * epoch, 4 * epoch + 4))
            seen = [meta.sample_ids for _, meta in stream]
            assert seen == [[f"s{4 * epoch + n}" for n in pair] for pair in ((0, 1), (2, 3))]
            assert rewards(stream) == []


@prefetches
def test_a_stream_goes_on_after_an_error(client: DataPlaneClient, partition: str, prefetch: int) -> None:
    client.clear_samples(None, partition)
    with loader(client, partition, prefetch=prefetch) as stream:
        with pytest.raises(PartitionNotFoundError):
            next(iter(stream))
        client.register_partition(partition, ["input_ids", "reward"], 2, TASKS)
        put(client, partition, range(2))
        assert rewards(stream) == [[0.0, 1.0]]
