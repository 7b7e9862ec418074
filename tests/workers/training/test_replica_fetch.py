"""One fetch for a replica group, on real Gloo ranks."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dataplane.config import DataPlaneConfig
from dataplane.core import failpoints
from dataplane.data.batch import BatchedDataDict
from dataplane.errors import CallTimeoutError, StaleSampleError
from tests.gloo import RankDied, Ranks
from workers.training import replica_collectives
from workers.training.replica_collectives import Deadline, ReplicaGroupError, ReplicaLostError, Siblings
from workers.training.replica_fetch import (
    FETCH_TIMEOUT_S,
    NO_DIGEST,
    FetchedPart,
    ReplicaGroup,
    _broadcast_batched_data_dict,
)

pytestmark = pytest.mark.integration

NEVER_S = 3600.0
"""The deadline of fetches whose errors must not wait for it: longer than `tests.gloo` waits for a scenario."""


def sample_batch() -> dict[str, Any]:
    """The same on every rank: what the leader sends, and what its siblings compare with."""
    torch.manual_seed(7)
    lengths = [5, 0, 130, 17]
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    total = sum(lengths)
    objects = np.empty(4, dtype=object)
    objects[:] = ["text", {"tool": [1, 2.5]}, (b"\x00", None), 7]

    def jagged(values: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    return {
        "input_ids": jagged(torch.randint(0, 50_000, (total,))),
        "logprobs": jagged(torch.randn(total).to(torch.bfloat16)),
        "fp8": jagged(torch.randn(total).to(torch.float8_e4m3fn)),
        "mask": jagged(torch.randint(0, 2, (total,)).bool()),
        "experts": jagged(torch.randint(0, 8, (total, 3, 2), dtype=torch.uint8)),
        "transposed": torch.randn(6, 4).t(),
        "fp8_dense": torch.randn(4, 3).to(torch.float8_e5m2),
        "images": [torch.randn(2, 3), torch.randn(0, 3), torch.randn(1, 1), torch.randn(4, 2)],
        "objects": objects,
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        if a.is_nested:
            return a.offsets().equal(b.offsets()) and same(a.values(), b.values())
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        return a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a.dtype == b.dtype and a.tolist() == b.tolist())


def part_of(rank: int, *, leader: int = 0, digest: bytes = NO_DIGEST) -> FetchedPart:
    return FetchedPart(leads=lambda: rank == leader, digest=lambda: digest, read=lambda _: sample_batch())


# --- what travels ---------------------------------------------------------------------------------------------


def send_everything(rank: int, src: int) -> list[str]:
    data = BatchedDataDict(sample_batch()) if rank == src else None
    got = _broadcast_batched_data_dict(data, is_leader=rank == src, src=src, group=dist.group.WORLD)
    assert isinstance(got, BatchedDataDict)
    expected = sample_batch()
    return [name for name in expected if name not in got or not same(expected[name], got[name])]


@pytest.mark.parametrize("src", [0, 1])
def test_all_ranks_end_with_the_leaders_columns(gloo: Ranks, src: int) -> None:
    assert gloo.run(send_everything, src) == [[]] * gloo.world


def send_values(rank: int) -> Any:
    data = BatchedDataDict({"ids": torch.arange(3), "task": "math", "cfg": {"stop": [1, None]}})
    got = _broadcast_batched_data_dict(data if rank == 0 else None, is_leader=rank == 0, src=0, group=dist.group.WORLD)
    return got["ids"].tolist(), got["task"], got["cfg"]


def test_strings_and_dicts_travel_with_the_tensors(pair: Ranks) -> None:
    assert pair.run(send_values) == [([0, 1, 2], "math", {"stop": [1, None]})] * 2


def in_a_subgroup(rank: int) -> list[str]:
    """Ranks 2 and 3 are a replica group of their own: `src` is a global rank, 3."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    src = [1, 3][rank // 2]
    data = BatchedDataDict(sample_batch()) if rank == src else None
    got = _broadcast_batched_data_dict(data, is_leader=rank == src, src=src, group=groups[rank // 2])
    return [name for name, value in sample_batch().items() if not same(value, got[name])]


def test_a_replica_group_is_part_of_the_world(four: Ranks) -> None:
    assert four.run(in_a_subgroup) == [[]] * 4


def count_collectives(rank: int, fields: int) -> dict[str, int]:
    offsets = torch.tensor([0, 4000, 4100, 12000])

    def read(_: bytes) -> dict[str, Any]:
        return {f"f{i}": torch.nested.nested_tensor_from_jagged(torch.randn(12000), offsets) for i in range(fields)}

    group = ReplicaGroup(dist.group.WORLD)
    part = FetchedPart(leads=lambda: rank == 0, digest=lambda: NO_DIGEST, read=read)
    group.fetch(part, "auto", lambda batch: batch)
    ranks = group.siblings
    return {
        "payload_collectives": ranks.collectives["payload"],
        "control_collectives": ranks.collectives["control"],
        "bytes": ranks.bytes.total(),
    }


def test_one_payload_collective_of_hardly_more_than_the_jagged_bytes(pair: Ranks) -> None:
    for fields in (1, 12):
        for counts in pair.run(count_collectives, fields):
            assert counts["payload_collectives"] == 1
            assert counts["control_collectives"] == 3
            assert counts["bytes"] <= 1.02 * fields * 12000 * 4


# --- failures: every rank raises, promptly, and the group works again -----------------------------------------


def recover(rank: int, group: ReplicaGroup) -> None:
    """A fetch after a failure works: the ranks agree again."""
    got = group.fetch(part_of(rank), "auto", lambda batch: batch)
    assert same(got["mask"], sample_batch()["mask"])


def disagree(rank: int, what: str) -> str:
    group = ReplicaGroup(dist.group.WORLD, timeout_s=NEVER_S)
    last = group.size - 1
    part, policy = part_of(rank), "auto"
    if what == "policy":
        policy = "leader_broadcast" if rank == last else "auto"
    elif what == "two leaders":
        part = FetchedPart(leads=lambda: rank in (0, last), digest=part.digest, read=part.read)
    elif what == "no leader":
        part = FetchedPart(leads=lambda: False, digest=part.digest, read=part.read)
    elif what == "meta":
        part = part_of(rank, digest=bytes([rank == last] * 16))
    try:
        group.fetch(part, policy, lambda batch: batch)
    except ReplicaGroupError as error:
        recover(rank, group)
        return str(error)
    raise AssertionError("the ranks disagreed and nobody noticed")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("policy", "different policies"),
        ("two leaders", "and rank"),
        ("no leader", "none of its"),
        ("meta", "that differs from the meta of the leader"),
    ],
)
def test_ranks_that_disagree_all_raise(gloo: Ranks, what: str, message: str) -> None:
    errors = gloo.run(disagree, what)
    assert len(set(errors)) == 1
    assert message in errors[0]


def mixed_with_independent(rank: int) -> str:
    group = ReplicaGroup(dist.group.WORLD, timeout_s=NEVER_S)
    try:
        if rank == 0:
            group.agree(part_of(rank), "independent")
        else:
            group.fetch(part_of(rank), "auto", lambda batch: batch)
    except ReplicaGroupError as error:
        return str(error)
    raise AssertionError("nobody noticed")


def test_one_rank_fetching_alone_is_noticed(gloo: Ranks) -> None:
    assert all("different policies" in message for message in gloo.run(mixed_with_independent))


def agree_once(rank: int) -> int:
    group = ReplicaGroup(dist.group.WORLD)
    for _ in range(3):
        group.agree(part_of(rank), "independent")
    return group.siblings.collectives["control"]


def test_independent_ranks_agree_once(pair: Ranks) -> None:
    assert pair.run(agree_once) == [1, 1]


class _Foreign(Exception):
    """A type the siblings cannot know."""


def stale() -> StaleSampleError:
    return StaleSampleError(partition="train", samples=["a", "b"], total=7, positions=[0, 1])


ERRORS: dict[str, Exception] = {
    "ours": stale(),
    "builtin": ValueError("a column of 3 rows"),
    "key": KeyError("missing"),
    "foreign": _Foreign("cannot be rebuilt"),
    "two arguments": OSError(28, "No space left on device"),
}


def fail(rank: int, who: str, kind: str) -> Exception:
    group = ReplicaGroup(dist.group.WORLD, timeout_s=NEVER_S)

    def boom(*_: bytes) -> Any:
        raise ERRORS[kind]

    culprit = 0 if who.startswith("leader") else group.size - 1
    part = part_of(rank)
    if who == "leader reads" and rank == 0:
        part = FetchedPart(leads=part.leads, digest=part.digest, read=boom)
    if who == "sibling early" and rank == culprit:
        part = FetchedPart(leads=boom, digest=part.digest, read=part.read)
    try:
        group.fetch(part, "auto", lambda batch: boom() if who.endswith("finishes") and rank == culprit else batch)
    except Exception as error:
        recover(rank, group)
        return error
    raise AssertionError("nobody raised")


@pytest.mark.parametrize("who", ["leader reads", "leader finishes", "sibling early", "sibling finishes"])
def test_one_rank_that_fails_fails_all_with_the_same_error(gloo: Ranks, who: str) -> None:
    errors = gloo.run(fail, who, "ours")
    for error in errors:
        assert isinstance(error, StaleSampleError), error
        assert error.facts == stale().facts


@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [
        ("builtin", ValueError, "a column of 3 rows"),
        ("key", KeyError, "missing"),
        ("foreign", ReplicaGroupError, "_Foreign: cannot be rebuilt"),
        ("two arguments", OSError, "No space left on device"),
    ],
)
def test_errors_of_others_keep_type_and_text(pair: Ranks, kind: str, expected: type[Exception], text: str) -> None:
    leader, sibling = pair.run(fail, "leader reads", kind)
    assert type(leader) is type(ERRORS[kind])
    assert isinstance(sibling, expected), sibling
    assert text in str(sibling)
    assert any("rank 0" in note for note in sibling.__notes__)


def die(rank: int) -> Exception:
    group = ReplicaGroup(dist.group.WORLD, timeout_s=NEVER_S)
    if rank == 0:
        failpoints.arm("fetch.between_header_and_payload", lambda: os.kill(os.getpid(), signal.SIGKILL))
    try:
        group.fetch(part_of(rank), "auto", lambda batch: batch)
    except Exception as error:
        return error
    raise AssertionError("nobody raised")


def test_a_leader_killed_between_header_and_payload(gloo: Ranks) -> None:
    leader, *others = gloo.run(die)
    assert isinstance(leader, RankDied)
    for error in others:
        assert isinstance(error, ReplicaLostError), error
        assert isinstance(error, ConnectionError)


class NoStore:
    """A store whose process is gone."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("connection reset by peer")

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("connection reset by peer")


def die_with_the_store(rank: int) -> Exception:
    replica_collectives._get_process_group_store = lambda group: NoStore()  # type: ignore[assignment, return-value]
    try:
        return die(rank)
    finally:
        replica_collectives._get_process_group_store = dist.distributed_c10d._get_process_group_store


@pytest.mark.slow
def test_a_leader_that_takes_the_store_with_it(pair: Ranks) -> None:
    leader, error = pair.run(die_with_the_store)
    assert isinstance(leader, RankDied)
    assert isinstance(error, ReplicaLostError), error


def stay_away(rank: int) -> Exception | None:
    group = ReplicaGroup(dist.group.WORLD, timeout_s=1.0)
    if rank == 0:
        dist.distributed_c10d._get_default_store().wait(["others are done"])
        return None
    try:
        group.fetch(part_of(rank), "auto", lambda batch: batch)
    except Exception as error:
        dist.distributed_c10d._get_default_store().set("others are done", "yes")
        return error
    raise AssertionError("nobody raised")


def test_a_rank_that_does_not_come_is_a_timeout(pair: Ranks) -> None:
    _, error = pair.run(stay_away)
    assert isinstance(error, CallTimeoutError), error
    assert isinstance(error, TimeoutError)
    assert error.waited_s == 1.0


def come_late(rank: int, late: int, rounds: int) -> list[Exception]:
    """One rank comes to each of the first fetches when the others have given up on it; they go on together."""
    store = dist.distributed_c10d._get_default_store()
    others = [other for other in range(dist.get_world_size()) if other != late]
    group, raised = ReplicaGroup(dist.group.WORLD, timeout_s=NEVER_S if rank == late else 0.5), []
    for turn in range(rounds):
        if rank == late:
            store.wait([f"{other} gave up {turn}" for other in others])
        try:
            group.fetch(part_of(rank), "auto", lambda batch: batch)
        except Exception as error:
            raised.append(error)
            store.set(f"{rank} gave up {turn}", "yes")
    group.timeout_s = NEVER_S
    for _ in range(2):
        recover(rank, group)
    group.agree(part_of(rank), "independent")
    return raised


@pytest.mark.parametrize("late", [0, 1], ids=["leader", "sibling"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_rank_that_comes_late_fails_the_fetches_that_it_is_late_for(gloo: Ranks, late: int, rounds: int) -> None:
    for rank, raised in enumerate(gloo.run(come_late, late, rounds)):
        assert not isinstance(raised, Exception), raised
        assert [type(error) for error in raised] == [CallTimeoutError] * rounds
        if rank == late:
            assert all("gave up waiting for this rank" in str(error) for error in raised)


def give_up_for_the_others(rank: int) -> Exception | None:
    """The rank with the shortest wait ends that of all, the late one included, and all are in step again."""
    group = ReplicaGroup(dist.group.WORLD, timeout_s=0.5 if rank == 1 else NEVER_S)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["1 raised"])
    try:
        group.fetch(part_of(rank), "auto", lambda batch: batch)
    except Exception as error:
        store.set(f"{rank} raised", "yes")
        group.timeout_s = NEVER_S
        recover(rank, group)
        return error
    return None


def test_ranks_that_wait_longer_are_told_who_gave_up(four: Ranks) -> None:
    raised = four.run(give_up_for_the_others)
    assert [type(error) for error in raised] == [CallTimeoutError] * 4
    assert all("rank 1" in str(raised[rank]) for rank in (0, 2, 3))


def give_up_while_connecting(rank: int) -> list[str]:
    """All connections have ended. Rank 1 gives up waiting for new ones before rank 0 comes; the others would go on."""
    group, raised = ReplicaGroup(dist.group.WORLD, timeout_s=NEVER_S), []
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        group.siblings._give_up()
        store.set("1 gave up", "yes")
    store.wait(["1 gave up"])
    for turn in range(2 if rank != 1 else 1):
        last = rank == 1 or turn == 1
        group.timeout_s = 0.5 if rank == 1 else NEVER_S
        if rank == 0 and last:
            store.wait([f"{other} raised" for other in (1, 2, 3)])
        try:
            group.fetch(part_of(rank), "auto", lambda batch: batch)
        except CallTimeoutError as error:
            raised.append(str(error))
    store.set(f"{rank} raised", "yes")
    group.timeout_s = NEVER_S
    recover(rank, group)
    return raised


def test_ranks_that_wait_for_new_connections_learn_at_once_who_gave_up(four: Ranks) -> None:
    raised = four.run(give_up_while_connecting)
    assert [len(errors) for errors in raised] == [2, 1, 2, 2]
    assert "a sibling did not take part" in raised[1][0]
    assert all("rank 1 (global rank 1) gave up" in error for rank in (0, 2, 3) for error in raised[rank])


def hang_up_last(rank: int) -> str | None:
    """Ranks 1 and 2 have closed their connections when rank 3 gives up, for which rank 0 waits."""
    group, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
    siblings = Siblings(group)
    if rank in (1, 2):
        siblings._close_connections()
        store.set(f"{rank} hung up", "yes")
    elif rank == 3:
        store.wait(["1 hung up", "2 hung up"])
        for closed in (1, 2):
            with pytest.raises(RuntimeError, match="onnection"):
                group.recv([torch.empty(1)], closed, 1).wait(timedelta(seconds=60))
        siblings._give_up()
        store.wait(["0 learned it"])  # the end of its process group would close them, too
    else:
        try:
            siblings.broadcast(torch.empty(1, dtype=torch.uint8), 3, Deadline(NEVER_S))
        except CallTimeoutError as error:
            store.set("0 learned it", "yes")
            return str(error)
    return None


def test_a_rank_that_gives_up_closes_the_connections_that_are_still_open(four: Ranks) -> None:
    told, *others = four.run(hang_up_last)
    assert others == [None] * 3
    assert "rank 3 (global rank 3) gave up" in told


def test_a_fetch_outlives_a_restart_of_the_service() -> None:
    assert 3 * DataPlaneConfig().reconnect_s <= FETCH_TIMEOUT_S


# --- the document's function ----------------------------------------------------------------------------------


def misuse(rank: int, how: str) -> Exception:
    data = BatchedDataDict(sample_batch()) if rank == 0 and how != "no data" else None
    src = 1 if how == "src is not the leader" or (how == "src differs" and rank == 1) else 0
    leads = rank == 0 or (how == "src differs" and rank == 1)
    try:
        _broadcast_batched_data_dict(data, is_leader=leads, src=src, group=dist.group.WORLD)
    except Exception as error:
        return error
    raise AssertionError("nobody raised")


@pytest.mark.parametrize(
    ("how", "kind"),
    [("no data", ValueError), ("src is not the leader", ValueError), ("src differs", ValueError)],
)
def test_misuse_is_an_error_on_every_rank(pair: Ranks, how: str, kind: type[Exception]) -> None:
    assert all(isinstance(error, kind | ReplicaGroupError) for error in pair.run(misuse, how))


@pytest.mark.parametrize("timeout_s", [1e18, float("inf"), None])
def test_a_fetch_may_have_no_timeout(timeout_s: float | None) -> None:
    assert Deadline(timeout_s).left.days > 365
