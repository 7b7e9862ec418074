"""One fetch for a replica group, on real Gloo ranks."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dataplane import KVBatchMeta
from dataplane.config import DataPlaneConfig
from dataplane.core import failpoints
from dataplane.core.types import DTYPE_BYTES
from dataplane.data.batch import BatchedDataDict
from dataplane.errors import CallTimeoutError, StaleSampleError
from tests.gloo import Collectives, RankDied, Ranks, counted_collectives
from workers.errors import NotSerializableError
from workers.training.policy import FORWARD_FIELDS, field_names, forward_fields
from workers.training.replica_group import (
    FETCH_TIMEOUT_S,
    NO_DIGEST,
    Deadline,
    RankFetch,
    ReplicaGroup,
    ReplicaGroupError,
    ReplicaLostError,
    _broadcast_batched_data_dict,
    pack_columns,
    unpack_columns,
)
from workers.training.stages import Stage, check_settings, packing_arguments, stage_of

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


def part_of(rank: int, *, leader: int = 0, digest: bytes = NO_DIGEST) -> RankFetch:
    return RankFetch(leads=lambda: rank == leader, digest=lambda: digest, read=sample_batch)


# --- what travels ---------------------------------------------------------------------------------------------


def through(batch: dict[str, Any]) -> dict[str, Any]:
    return unpack_columns(*pack_columns(batch, torch.device("cpu")))


def jagged(lengths: list[int], dtype: torch.dtype = torch.int64, inner: tuple[int, ...] = ()) -> torch.Tensor:
    values = torch.randint(0, 2, (sum(lengths), *inner)).to(dtype)
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, *np.cumsum(lengths).tolist()]))


@pytest.mark.integration
@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_every_dtype_dense_and_jagged(name: str) -> None:
    dtype = getattr(torch, name)
    batch = {"dense": torch.randint(0, 2, (5, 3)).to(dtype), "nested": jagged([2, 0, 3], dtype, (2,))}
    back = through(batch)
    assert all(same(back[each], batch[each]) for each in batch)


@pytest.mark.integration
@pytest.mark.parametrize(
    "value",
    [
        torch.ones(1, 4)[:, 0],
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(4).expand(3, 4),
        torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj(),
        torch.empty(0, 7),
        torch.empty(3, 0),
        torch.tensor(5.0),
        torch.ones(3, requires_grad=True),
    ],
    ids=["one element", "transposed", "expanded", "conjugate", "no rows", "empty rows", "scalar", "grad"],
)
def test_dense_of_any_strides(value: torch.Tensor) -> None:
    back = through({"x": value})["x"]
    assert back.equal(value.detach().resolve_conj())
    assert not back.requires_grad


@pytest.mark.integration
def test_jagged_with_holes_or_a_prefix_comes_back_tight() -> None:
    values = torch.arange(10)
    offsets = torch.tensor([1, 4, 9])
    plain = torch.nested.nested_tensor_from_jagged(values, offsets)
    holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths=torch.tensor([2, 3]))
    back = through({"plain": plain, "holes": holes})
    assert back["plain"].values().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert back["holes"].values().tolist() == [1, 2, 4, 5, 6]
    assert back["holes"].offsets().tolist() == [0, 2, 5]


@pytest.mark.integration
def test_equal_lengths_share_offsets() -> None:
    back = through({"a": jagged([3, 1]), "b": jagged([3, 1], torch.bool), "c": jagged([1, 3])})
    assert back["a"].offsets() is back["b"].offsets()
    assert (back["a"] + back["b"]).values().numel() == 4


@pytest.mark.integration
def test_columns_that_are_not_views_do_not_hold_the_payload() -> None:
    back = through({"a": jagged([1000]), "b": torch.ones(1), "r": [torch.ones(2)]})
    assert back["b"].untyped_storage().nbytes() == 4
    assert back["r"][0].untyped_storage().nbytes() == 8


@pytest.mark.integration
def test_values_of_any_type() -> None:
    row = {"image": np.arange(6000, dtype=np.uint16).reshape(20, 300), "mask": torch.tensor([True, False])}
    batch = {"task": "math", "cfg": {"t": 0.5, "stop": [1, None]}, "none": None, "empty": [], "rows": [row]}
    back = through(batch)
    assert back["rows"][0]["mask"].equal(row["mask"])
    assert np.array_equal(back["rows"][0].pop("image"), row["image"])
    assert {name: back[name] for name in ("task", "cfg", "none", "empty")} == {
        name: batch[name] for name in ("task", "cfg", "none", "empty")
    }
    assert through({}) == {}


@pytest.mark.integration
def test_values_that_cannot_be_sent() -> None:
    with pytest.raises(NotSerializableError, match="a batch of the columns x, lock"):
        pack_columns({"x": 1, "lock": threading.Lock()}, torch.device("cpu"))


def send_everything(rank: int, src: int) -> list[str]:
    data = BatchedDataDict(sample_batch()) if rank == src else None
    got = _broadcast_batched_data_dict(data, is_leader=rank == src, src=src, group=dist.group.WORLD)
    assert isinstance(got, BatchedDataDict)
    expected = sample_batch()
    return [name for name in expected if name not in got or not same(expected[name], got[name])]


@pytest.mark.integration
@pytest.mark.parametrize("src", [0, 1])
def test_all_ranks_end_with_the_leaders_columns(gloo: Ranks, src: int) -> None:
    assert gloo.run(send_everything, src) == [[]] * gloo.world


def send_values(rank: int) -> Any:
    data = BatchedDataDict({"ids": torch.arange(3), "task": "math", "cfg": {"stop": [1, None]}})
    got = _broadcast_batched_data_dict(data if rank == 0 else None, is_leader=rank == 0, src=0, group=dist.group.WORLD)
    return got["ids"].tolist(), got["task"], got["cfg"]


@pytest.mark.integration
def test_strings_and_dicts_travel_with_the_tensors(pair: Ranks) -> None:
    assert pair.run(send_values) == [([0, 1, 2], "math", {"stop": [1, None]})] * 2


def in_a_subgroup(rank: int) -> list[str]:
    """Ranks 2 and 3 are a replica group of their own: `src` is a global rank, 3."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    src = [1, 3][rank // 2]
    data = BatchedDataDict(sample_batch()) if rank == src else None
    got = _broadcast_batched_data_dict(data, is_leader=rank == src, src=src, group=groups[rank // 2])
    return [name for name, value in sample_batch().items() if not same(value, got[name])]


@pytest.mark.integration
def test_a_replica_group_is_part_of_the_world(four: Ranks) -> None:
    assert four.run(in_a_subgroup) == [[]] * 4


def count_collectives(rank: int, fields: int) -> Collectives:
    offsets = torch.tensor([0, 4000, 4100, 12000])

    def read() -> dict[str, Any]:
        return {f"f{i}": torch.nested.nested_tensor_from_jagged(torch.randn(12000), offsets) for i in range(fields)}

    part = RankFetch(leads=lambda: rank == 0, digest=lambda: NO_DIGEST, read=read)
    with counted_collectives() as counts:
        ReplicaGroup(dist.group.WORLD).fetch(part, "auto", lambda batch: batch)
    return counts


@pytest.mark.integration
def test_one_payload_collective_of_hardly_more_than_the_jagged_bytes(pair: Ranks) -> None:
    for fields in (1, 12):
        for counts in pair.run(count_collectives, fields):
            assert counts.broadcasts == 1
            assert counts.all_gathers == 2
            assert counts.nbytes <= 1.02 * fields * 12000 * 4


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
        part = RankFetch(leads=lambda: rank in (0, last), digest=part.digest, read=part.read)
    elif what == "no leader":
        part = RankFetch(leads=lambda: False, digest=part.digest, read=part.read)
    elif what == "meta":
        part = part_of(rank, digest=bytes([rank == last] * 16))
    try:
        group.fetch(part, policy, lambda batch: batch)
    except ReplicaGroupError as error:
        recover(rank, group)
        return str(error)
    raise AssertionError("the ranks disagreed and nobody noticed")


@pytest.mark.integration
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
            group.agree(lambda: True, "independent")
        else:
            group.fetch(part_of(rank), "auto", lambda batch: batch)
    except ReplicaGroupError as error:
        return str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.integration
def test_one_rank_fetching_alone_is_noticed(gloo: Ranks) -> None:
    assert all("different policies" in message for message in gloo.run(mixed_with_independent))


def agree_once(rank: int) -> int:
    group = ReplicaGroup(dist.group.WORLD)
    with counted_collectives() as counts:
        for _ in range(3):
            group.agree(lambda: rank == 0, "independent")
    return counts.all_gathers


@pytest.mark.integration
def test_independent_ranks_agree_once(pair: Ranks) -> None:
    assert pair.run(agree_once) == [1, 1]


class _Foreign(Exception):
    """A type that is neither built in nor the data plane's."""


class _Unpicklable(Exception):
    """Its argument cannot be sent to the siblings."""


def stale() -> StaleSampleError:
    return StaleSampleError(partition="train", samples=["a", "b"], total=7, positions=[0, 1])


ERRORS: dict[str, Exception] = {
    "ours": stale(),
    "builtin": ValueError("a column of 3 rows"),
    "key": KeyError("missing"),
    "foreign": _Foreign("an error of the trainer"),
    "unpicklable": _Unpicklable("a lock", threading.Lock()),
    "two arguments": OSError(28, "No space left on device"),
}


def fail(rank: int, who: str, kind: str) -> Exception:
    group = ReplicaGroup(dist.group.WORLD, timeout_s=NEVER_S)

    def boom(*_: Any) -> Any:
        raise ERRORS[kind]

    culprit = 0 if who.startswith("leader") else group.size - 1
    part = part_of(rank)
    if who == "leader reads" and rank == 0:
        part = RankFetch(leads=part.leads, digest=part.digest, read=boom)
    if who == "sibling early" and rank == culprit:
        part = RankFetch(leads=boom, digest=part.digest, read=part.read)
    try:
        group.fetch(part, "auto", lambda batch: boom() if who.endswith("finishes") and rank == culprit else batch)
    except Exception as error:
        recover(rank, group)
        return error
    raise AssertionError("nobody raised")


@pytest.mark.integration
@pytest.mark.parametrize("who", ["leader reads", "leader finishes", "sibling early", "sibling finishes"])
def test_one_rank_that_fails_fails_all_with_the_same_error(gloo: Ranks, who: str) -> None:
    errors = gloo.run(fail, who, "ours")
    for error in errors:
        assert isinstance(error, StaleSampleError), error
        assert error.facts == stale().facts


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [
        ("builtin", ValueError, "a column of 3 rows"),
        ("key", KeyError, "missing"),
        ("foreign", _Foreign, "an error of the trainer"),
        ("unpicklable", _Unpicklable, "a lock"),
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


@pytest.mark.integration
def test_a_leader_killed_between_header_and_payload(gloo: Ranks) -> None:
    leader, *others = gloo.run(die)
    assert isinstance(leader, RankDied)
    for error in others:
        assert isinstance(error, ReplicaLostError), error
        assert isinstance(error, ConnectionError)


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


@pytest.mark.integration
def test_a_rank_that_does_not_come_is_a_timeout(pair: Ranks) -> None:
    _, error = pair.run(stay_away)
    assert isinstance(error, CallTimeoutError), error
    assert isinstance(error, TimeoutError)
    assert error.waited_s >= 0.9


def come_late(rank: int, late: int) -> list[Exception]:
    """One rank comes when the others have given up on it; no rank can use the group again."""
    store = dist.distributed_c10d._get_default_store()
    others = [other for other in range(dist.get_world_size()) if other != late]
    group, raised = ReplicaGroup(dist.group.WORLD, timeout_s=NEVER_S if rank == late else 0.5), []
    if rank == late:
        store.wait([f"{other} gave up" for other in others])
    for _ in range(2):
        try:
            group.fetch(part_of(rank), "auto", lambda batch: batch)
        except Exception as error:
            raised.append(error)
            store.set(f"{rank} gave up", "yes")
            group.timeout_s = NEVER_S
    return raised


@pytest.mark.integration
@pytest.mark.parametrize("late", [0, 1], ids=["leader", "sibling"])
def test_after_a_timeout_every_call_of_every_rank_fails_at_once(gloo: Ranks, late: int) -> None:
    for rank, raised in enumerate(gloo.run(come_late, late)):
        assert not isinstance(raised, Exception), raised
        first, second = raised
        # A sibling may learn from another that has given up before its own timeout.
        kinds = ReplicaLostError if rank == late else CallTimeoutError | ReplicaLostError
        assert isinstance(first, kinds), first
        assert isinstance(second, ReplicaLostError), second
        assert "create the process group again" in str(second)


def keep_the_group_timeout(rank: int) -> float:
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    before = backend.options._timeout
    ReplicaGroup(group, timeout_s=1.0).fetch(part_of(rank), "auto", lambda batch: batch)
    assert backend.options._timeout == before
    return float(before.total_seconds())


@pytest.mark.integration
def test_the_timeout_of_the_callers_group_stays(pair: Ranks) -> None:
    assert pair.run(keep_the_group_timeout) == [60.0] * 2


@pytest.mark.integration
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


@pytest.mark.integration
@pytest.mark.parametrize(
    ("how", "kind"),
    [("no data", ValueError), ("src is not the leader", ValueError), ("src differs", ValueError)],
)
def test_misuse_is_an_error_on_every_rank(pair: Ranks, how: str, kind: type[Exception]) -> None:
    assert all(isinstance(error, kind | ReplicaGroupError) for error in pair.run(misuse, how))


@pytest.mark.integration
@pytest.mark.parametrize("timeout_s", [1e18, float("inf"), None])
def test_a_fetch_may_have_no_timeout(timeout_s: float | None) -> None:
    assert Deadline(timeout_s).left.days > 365


# --- What cuts a stage's samples into micro-batches.


PACKING = {"enabled": True, "algorithm": "concatenative", "train_mb_tokens": 8, "logprob_mb_tokens": 16}


@pytest.mark.parametrize(("stage", "budget"), [("train", 8), ("logprob", 16)])
def test_each_stage_has_its_budget(stage: Stage, budget: int) -> None:
    packing = packing_arguments({"sequence_packing": PACKING}, stage)
    named = {"max_tokens_per_microbatch": budget, "budget_name": f"{stage}_mb_tokens"}
    assert packing == {"sequence_packing_args": {"algorithm": "concatenative", **named}}
    dynamic = {"enabled": True, "sequence_length_round": 4, "train_mb_tokens": 8, "logprob_mb_tokens": 16}
    assert packing_arguments({"dynamic_batching": dynamic}, stage) == {
        "dynamic_batching_args": {"sequence_length_round": 4, **named},
    }


def test_one_budget_for_all_stages() -> None:
    packing = {"enabled": True, "max_tokens_per_microbatch": 32, "train_mb_tokens": 8}
    for stage, budget in (("train", 8), ("logprob", 32)):
        given = packing_arguments({"sequence_packing": packing}, stage)["sequence_packing_args"]  # type: ignore[arg-type]
        assert given["max_tokens_per_microbatch"] == budget
        assert given["budget_name"] == ("train_mb_tokens" if stage == "train" else "max_tokens_per_microbatch")


@pytest.mark.parametrize(
    "cfg", [None, {}, {"sequence_packing": None}, {"sequence_packing": {**PACKING, "enabled": False}}]
)
def test_nothing_is_cut_unless_it_is_enabled(cfg: Any) -> None:
    assert packing_arguments(cfg, "train") == {}


def test_what_is_passed_on() -> None:
    cfg = {
        "sequence_packing": {**PACKING, "microbatch_order": "largest_first", "input_lengths_key": "n", "other": 1},
        "make_sequence_length_divisible_by": 4,
    }
    assert packing_arguments(cfg, "train")["sequence_packing_args"] == {
        "algorithm": "concatenative",
        "microbatch_order": "largest_first",
        "input_lengths_key": "n",
        "sequence_length_pad_multiple": 4,
        "max_tokens_per_microbatch": 8,
        "budget_name": "train_mb_tokens",
    }
    cfg["sequence_packing"] = {**PACKING, "sequence_length_pad_multiple": 2}
    assert packing_arguments(cfg, "train")["sequence_packing_args"]["sequence_length_pad_multiple"] == 2


def test_settings_may_be_objects() -> None:
    @dataclass
    class Packing:
        enabled: bool = True
        algorithm: str = "concatenative"
        train_mb_tokens: int = 8

    @dataclass
    class Settings:
        sequence_packing: Packing = field(default_factory=Packing)

    given = packing_arguments(Settings(), "train")["sequence_packing_args"]
    assert (given["algorithm"], given["max_tokens_per_microbatch"]) == ("concatenative", 8)


def test_a_budget_is_needed() -> None:
    with pytest.raises(
        ValueError, match="dynamic_batching is enabled, but its settings have neither 'train_mb_tokens'"
    ):
        packing_arguments({"dynamic_batching": {"enabled": True, "logprob_mb_tokens": 8}}, "train")


BOTH = {"sequence_packing": PACKING, "dynamic_batching": {"enabled": True, "train_mb_tokens": 8}}


@pytest.mark.parametrize(
    ("cfg", "told"),
    [
        (BOTH, "sequence_packing and dynamic_batching are both enabled; enable only one of them"),
        ({"sequence_packing": {"enabled": True}}, "neither 'train_mb_tokens' nor 'max_tokens_per_microbatch'"),
        ({"sequence_packing": {**PACKING, "train_mb_tokens": 0}}, "'train_mb_tokens'.*1 or more, got 0"),
        ({"dynamic_batching": {"enabled": True, "logprob_mb_tokens": -8}}, "'logprob_mb_tokens'.*1 or more, got -8"),
        ({"sequence_packing": {**PACKING, "logprob_mb_tokens": "8"}}, "'logprob_mb_tokens'.*1 or more, got '8'"),
        ({"sequence_packing": {**PACKING, "algorithm": "best"}}, "unknown packing algorithm 'best'"),
    ],
)
def test_settings_that_cannot_be(cfg: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_settings(cfg)


@pytest.mark.parametrize("stages", [["train"], ["logprob"], ["train", "logprob"], ["max"]])
def test_settings_need_no_algorithm_and_no_budget_of_a_stage_that_is_not_used(stages: list[str]) -> None:
    budgets = {"max_tokens_per_microbatch" if stage == "max" else f"{stage}_mb_tokens": 8 for stage in stages}
    check_settings({"sequence_packing": {"enabled": True, **budgets}})
    check_settings({})


def test_the_stages_of_tasks() -> None:
    assert [stage_of(task) for task in ("prev_lp", "ref_lp", "train", None)] == ["logprob", "logprob", "train", "train"]


@pytest.mark.parametrize("name", ["train_global_batch_size", "train_micro_batch_size", "logprob_batch_size"])
@pytest.mark.parametrize("number", [0, -1, 2.0, "4", True])
def test_batch_sizes_that_cannot_be_are_refused(name: str, number: Any) -> None:
    with pytest.raises(ValueError, match=f"cfg's {name}: expected an integer of 1 or more, or None, got {number!r}"):
        check_settings({name: number})
    check_settings({name: 4})


# --- The columns that a stage reads.


META = KVBatchMeta("train", None, ["a"], fields=["images", "input_ids", "advantages", "position_ids", "text"])


def test_a_forward_pass_reads_what_it_is_known_to_read_or_what_it_is_told() -> None:
    assert forward_fields(META, None, FORWARD_FIELDS) == ["input_ids", "position_ids"]
    assert forward_fields(META, ["images", "hidden", "images"], FORWARD_FIELDS) == ["images", "hidden"]


def test_a_forward_pass_that_would_read_nothing_is_told_how_to_say_what() -> None:
    with pytest.raises(ValueError, match=r"none of .* fields \(images, text\).*attention_mask, .*fields=\[\.\.\.\]"):
        forward_fields(META.with_fields(["images", "text"]), None, FORWARD_FIELDS)


@pytest.mark.parametrize("given", ["input_ids", [1], [""], ["input_ids", None]])
def test_fields_are_a_list_of_names(given: Any) -> None:
    with pytest.raises(TypeError, match=r"train_fields=.*pass a list of field names"):
        field_names("train_fields", given)
