"""Operations of a client before and after their commands: names, claims, retries, space allocated ahead."""

from __future__ import annotations

import dataclasses
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dataplane.client import preallocated
from dataplane.client.operations import claim, retry, sample_names
from dataplane.client.operations.drain_unit import _handle_lack_of_space, _Progress
from dataplane.client.operations.retry import with_retry
from dataplane.client.operations.sample_names import ids_of, scalar, tag_columns, tags_of
from dataplane.client.operations.steps import Operation, Post, Send, Sent, Work
from dataplane.client.preallocated import (
    LEAST_BYTES,
    MOST_BYTES,
    PUTS_AHEAD,
    SMALL_BYTES,
    SOON_S,
    PreallocatedBuffer,
    bytes_of,
)
from dataplane.client.session_state import Pins, Schema, Schemas, Warned
from dataplane.config import DataPlaneConfig
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.data.columns import encode_fields, require_fields
from dataplane.data.meta import KVBatchMeta, list_of_names
from dataplane.errors import (
    CapacityTimeoutError,
    DataPlaneError,
    InvalidRequestError,
    SampleNotFoundError,
    ServiceRestartedError,
    StaleSampleError,
    StorageUnitError,
    UnsupportedValueError,
)
from dataplane.ledger import commands as c
from dataplane.ledger.commands import Preallocate
from tests.client.async_calls import CALLS, CLIENT, generated

# --- Samples and tags as callers name them.


@pytest.mark.parametrize("fields", [[torch.zeros(1)], torch.zeros(1), "x", 5])
def test_fields_without_names_are_refused(fields: Any) -> None:
    with pytest.raises(UnsupportedValueError, match="Pass a TensorDict or a mapping"):
        require_fields(fields)


@pytest.mark.parametrize("tags", [["a"], [None], [["score", 1]], {"score": 1}, 5])
def test_tags_that_are_no_list_of_mappings_are_refused(tags: Any) -> None:
    with pytest.raises(UnsupportedValueError, match=r"Pass (a mapping of tag names|one mapping of tags)"):
        tag_columns(tags, 1)


def test_as_many_tags_as_samples() -> None:
    with pytest.raises(InvalidRequestError, match="got 1 mappings for 2 samples"):
        tag_columns([{"score": 1}], 2)


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1, np.uint64((1 << 64) - 1)])
def test_an_integer_tag_of_more_than_64_bits_is_named(value: Any) -> None:
    with pytest.raises(UnsupportedValueError, match=r"tag n, row 1: .* \(over 64 bits\).* Store the integer as text"):
        tag_columns([{"n": 1}, {"n": value}], 2)


@pytest.mark.parametrize("names", ["a", b"a", 5, [5], [b"a"]])
def test_sample_ids_that_are_no_list_of_strings_are_refused(names: Any) -> None:
    with pytest.raises(UnsupportedValueError):
        ids_of(names)


def test_tags_come_back_as_they_were_whatever_samples_lack_them() -> None:
    tags: list[dict[str, Any]] = [{"n": 1, "text": "x"}, {}, {"n": 2.5, "flag": True}, {"text": None}]
    assert tags_of(tag_columns(tags, 4), 4) == tags
    assert tag_columns([{"n": 1}, {"n": 2}], 2)[0].positions is None
    assert tags_of((), 2) == [{}, {}]


ODD_TAGS: list[Any] = [1 << 62, -1, 0.5, True, None, "x", "y", np.float32(2), np.int8(3), [1], 1 << 70]


@pytest.mark.parametrize("seed", range(40))
def test_equal_dicts_of_tags_are_converted_as_others_are(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)

    def convert(name: str, row: int, value: Any) -> Any:
        return scalar(name, row, value) if value != "y" else f"{name} {row}"

    def outcome(tags: list[Any]) -> Any:
        try:
            columns = tag_columns(tags, len(tags), chance_convert)
        except (UnsupportedValueError, InvalidRequestError) as error:
            return str(error)
        return [(each.name, list(map(repr, each.values)), repr(each.positions)) for each in columns]

    for _ in range(30):
        values = ODD_TAGS[: chance.choice([2, 5, 6, 6, 7, 11])]
        names = chance.sample(["a", "b", "c", 5], chance.choice([0, 1, 2, 2])) if seed % 8 == 0 else ["a", "b"]
        tags: list[Any] = [{name: chance.choice(values) for name in names} for _ in range(chance.randrange(5))]
        if tags and chance.random() < 0.1:
            tags[-1] = chance.choice([{}, MappingProxyType(tags[-1]), 5, {"b": 1, "a": 2}])
        chance_convert = chance.choice([scalar, convert])
        usual = outcome(tags)
        with monkeypatch.context() as patch:
            patch.setattr(sample_names, "_usual_columns", lambda *_: None)
            assert outcome(tags) == usual


@pytest.mark.parametrize("seed", range(20))
def test_each_sample_gets_its_own_tags_in_the_order_of_the_columns(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        count = chance.randrange(5)
        columns = []
        expected: list[dict[str, Any]] = [{} for _ in range(count)]
        for name in "abc"[: chance.randrange(4)]:
            some = sorted(chance.sample(range(count), chance.randrange(count + 1)))
            form = chance.choice(["all", "some", "index"])
            if form == "index" and count:
                values = tuple(f"{name}{number}" for number in range(chance.choice([1, 1, 3])))
                index = [chance.randrange(len(values)) for _ in range(count)]
                column = c.TagColumn(name=name, values=values, index=np.array(index, np.uint8))
                each = [values[number] for number in index]
            elif form == "some":
                column = c.TagColumn(name=name, values=tuple(some), positions=np.array(some, np.int64))
                each = some
            else:
                column = c.TagColumn(name=name, values=tuple(range(count)))
                each = list(range(count))
            columns.append(column)
            for row, value in zip(some if form == "some" else range(count), each, strict=True):
                expected[row][name] = value
        got = tags_of(columns, count)
        assert [list(each.items()) for each in got] == [list(each.items()) for each in expected]
        assert len(set(map(id, got))) == count


def test_only_what_is_no_plain_number_is_converted() -> None:
    def convert(name: str, row: int, value: Any) -> str:
        return f"{name} {row} {value}"

    tags = [{"a": 1, "b": None}, {"a": "x", "b": [1]}]
    assert tags_of(tag_columns(tags, 2, convert), 2) == [{"a": 1, "b": None}, {"a": "a 1 x", "b": "b 1 [1]"}]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (5, "argument fields: int 5"),
        (None, "argument fields: None"),
        ([5], "argument fields, row 0: int 5"),
        (["x", None], "argument fields, row 1: None"),
        (b"x", "argument fields, row 0: int 120"),
    ],
)
def test_other_names_than_strings_are_refused_with_their_value(names: Any, text: str) -> None:
    with pytest.raises(UnsupportedValueError, match=f"{text} is not supported"):
        list_of_names("fields", names)


def test_one_string_is_no_list_of_names() -> None:
    with pytest.raises(InvalidRequestError, match="fields='ids': pass a list of names"):
        list_of_names("fields", "ids")
    with pytest.raises(InvalidRequestError, match="sample_ids='ids': pass a list of names"):
        KVBatchMeta("p", None, "ids")


@pytest.mark.parametrize("name", [5, None, b"x", ("x",), ""])
def test_other_names_of_fields_than_strings_are_refused_with_their_value(name: Any) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(f"non-empty strings, got {name!r}")):
        require_fields({name: [torch.zeros(1)]})


# --- What a client's session remembers is bounded.


def test_schemas_of_partitions_that_are_not_put_into_are_forgotten() -> None:
    schemas = Schemas(3)
    for name in ("a", "b", "c"):
        schemas.remember(name, {name: FieldSpec("jagged")})
    assert schemas.get("a") == {"a": FieldSpec("jagged")}
    schemas.remember("d", {})
    assert [schemas.get(name) is not None for name in ("a", "b", "c", "d")] == [True, False, True, True]
    schemas.forget("a")
    schemas.forget("nobody's")
    assert len(schemas) == 2


def test_a_pin_is_dropped_once_nothing_refers_to_it() -> None:
    pins = Pins()
    one, other = pins.take(1, None), pins.take(2, None)
    assert list(pins.dropped()) == []
    del other
    assert list(pins.dropped()) == [2]
    assert list(pins.dropped()) == []
    del one
    assert list(pins.dropped()) == [1]


# --- Operations of consumer tasks, stepped by hand.


STATE: Any = SimpleNamespace(schemas=Schemas(), warned=Warned())
STATE.schemas.remember("p", Schema({"x": FieldSpec()}))


def claimed(**more: Any) -> c.Claimed:
    rows = {"rows": np.array([4, 5]), "generations": np.array([14, 15])}
    return c.Claimed(**{"ids": ("a", "b"), **rows, "fields": ("x",), "tags": (), "claim": 7, **more})


def meta() -> KVBatchMeta:
    made = KVBatchMeta("p", "train", ["a", "b"]).with_handles(np.array([4, 5]), np.array([14, 15]))
    return dataclasses.replace(made, _claims=np.array([7, 7]))


def test_a_claim_whose_answer_makes_no_meta_is_undone() -> None:
    command = claim.claim_command("p", "train", ["x"], 2)
    operation = claim.claim(STATE, command, None)
    assert operation.send(None) == Send(command)
    undo = operation.send(Sent(3, claimed(tags=(c.TagColumn(name="input_lengths", values=("two", "three")),))))
    assert isinstance(undo, Post)
    nack = undo.command
    assert isinstance(nack, c.Nack)
    assert (nack.partition, nack.task, nack.samples.generations.tolist()) == ("p", "train", [14, 15])  # type: ignore[union-attr]
    assert nack.claims is not None
    assert nack.claims.tolist() == [7, 7]
    with pytest.raises(ValueError, match="two"):
        operation.send(None)


def test_a_claim_gives_its_id_to_its_samples() -> None:
    operation = claim.claim(STATE, claim.claim_command("p", "train", ["x"], 2), None)
    operation.send(None)
    with pytest.raises(StopIteration) as done:
        operation.send(Sent(3, claimed()))
    assert done.value.value.claims.tolist() == [7, 7]


def test_what_was_cleared_comes_back_by_id_and_what_is_stale_is_named() -> None:
    operation = claim.settle_claims(STATE, c.Ack, meta())
    sent = operation.send(None)
    assert isinstance(sent, Send)
    assert sent.command.claims.tolist() == [7, 7]  # type: ignore[attr-defined]
    with pytest.raises(StopIteration) as done:
        operation.send(Sent(4, c.ClaimsSettled(cleared=np.array([1]))))
    assert done.value.value == ["b"]
    operation = claim.settle_claims(STATE, c.Nack, meta())
    operation.send(None)
    with pytest.raises(StaleSampleError, match="'a' of partition 'p' is not held") as caught:
        operation.throw(StaleSampleError(partition="p", task="train", samples=["sample 0"], positions=[0]))
    assert caught.value.samples == ["a"]


@pytest.mark.parametrize("given", [None, "lease", ["a"]])
def test_what_is_no_meta_is_refused(given: Any) -> None:
    with pytest.raises(UnsupportedValueError, match=r"argument meta: .* claim_meta return"):
        next(claim.settle_claims(STATE, c.Ack, given))


def test_a_meta_that_no_claim_returned_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="meta has no claim"):
        next(claim.settle_claims(STATE, c.Ack, KVBatchMeta("p", "train", ["a"])))


def test_nothing_is_asked_for_no_samples() -> None:
    with pytest.raises(StopIteration) as done:
        next(claim.settle_claims(STATE, c.Ack, meta().slice(0, 0)))
    assert done.value.value == []


def test_options_are_the_fields_of_the_commands() -> None:
    """So that an option that is in one of the two only is found."""
    arguments = {"partition", "task", "fields", "batch_size", "blocking", "timeout_s", "dp_rank", "dp_world", "step"}
    own = {"samples", "peek"}
    assert set(c.Claim.__struct_fields__) - arguments - own == set(claim.ClaimOptions.__annotations__)
    assert set(c.WhyBlocked.__struct_fields__) - arguments == set(claim.ClaimConditions.__annotations__)


@pytest.mark.parametrize("kind", [claim.ClaimConditions, claim.ClaimOptions])
def test_the_contract_of_every_option_is_written(kind: type) -> None:
    text = f"{claim.ClaimConditions.__doc__} {claim.ClaimOptions.__doc__}"
    assert [name for name in kind.__annotations__ if not re.search(rf"\b{name}[:=`]", text)] == []


def test_an_option_that_there_is_not_is_named() -> None:
    with pytest.raises(TypeError, match="group_sise"):
        claim.claim_command("p", "train", ["x"], 2, group_sise=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="peek"):
        claim.claim_command("p", "train", ["x"], 2, peek=True)  # type: ignore[call-arg]


# --- Draining, as steps of an operation: what is done where there is no space.


NO_SPACE = CapacityTimeoutError(wanted_bytes=64, free_bytes=0, waited_s=0.0, holders=[])


def page(*lengths: int) -> c.FoundCells:
    numbers = np.arange(len(lengths), dtype=np.int64)
    return c.FoundCells(
        partition="p",
        field="x",
        spec=FieldSpec(FieldKind.JAGGED, "uint8", ()),
        rows=numbers,
        generations=numbers + 1,
        index=numbers,
        offsets=numbers * 64,
        lengths=np.array(lengths, np.int64),
        live={},
    )


@pytest.mark.parametrize("lengths", [(0, 0), (1, 0), (5, 7, 9), (64 << 20, 64 << 20)])
def test_pages_get_smaller_until_space_is_waited_for(lengths: tuple[int, ...]) -> None:
    """Also where they cannot: values of no bytes take space of an open unit, too."""
    progress = _Progress(1, timeout_s=60.0)
    progress.page = page(*lengths)
    steps = (next(_handle_lack_of_space(progress, NO_SPACE), None) for _ in range(40))
    asked = next(step for step in steps if step is not None)
    assert isinstance(asked, Send)
    assert isinstance(asked.command, c.Allocate)
    assert asked.command.on_full is c.OnFull.WAIT
    assert asked.command.moving


# --- Operations that begin anew while a storage unit is coming back.


GONE = StorageUnitError(unit=1, endpoint="ipc://x", why="it cannot be reached")
RESTARTED = ServiceRestartedError(expected_epoch=1, got_epoch=2, what="storage unit 1")
ANEW = ServiceRestartedError(expected_epoch=1, got_epoch=2, what="the service", lost="everything")
MISSING = SampleNotFoundError(partition="p", samples=["a"], total=1)


def session_state(*, durable: bool = True, reconnect_s: float = 60.0) -> Any:
    return SimpleNamespace(durable=durable, config=DataPlaneConfig(reconnect_s=reconnect_s))


class Attempts:
    """An operation that fails so often, and then returns its arguments."""

    def __init__(self, *failures: DataPlaneError) -> None:
        self.left = list(failures)
        self.begun = 0

    def operation(self, session_state: Any, *args: Any, **kwargs: Any) -> Operation[Any]:
        self.begun += 1
        yield Work(lambda: None)
        if self.left:
            raise self.left.pop(0)
        return args, kwargs

    def run(self, session_state: Any, *args: Any, **kwargs: Any) -> Any:
        operation = Attempts.operation

        def bound(session_state: Any, *args: Any, **kwargs: Any) -> Operation[Any]:
            return (yield from operation(self, session_state, *args, **kwargs))

        running = with_retry(bound)(session_state, *args, **kwargs)
        try:
            while True:
                step = next(running)
                assert isinstance(step, Work)
                step.run()
        except StopIteration as stop:
            return stop.value


def clock(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    """What `retry` has of `time`, and no other thread of this process."""
    monkeypatch.setattr(retry, "time", SimpleNamespace(**{"monotonic": time.monotonic, **functions}))


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    clock(monkeypatch, sleep=made.append)
    return made


def test_it_goes_on_until_the_unit_is_back(pauses: list[float]) -> None:
    attempts = Attempts(GONE, RESTARTED, GONE)
    assert attempts.run(session_state(), 1, two=2) == ((1,), {"two": 2})
    assert attempts.begun == 4
    assert len(pauses) == 3
    assert all(0 < pause <= retry.LONGEST_PAUSE_S for pause in pauses)


@pytest.mark.parametrize("failure", [MISSING, ANEW])
def test_other_errors_are_raised_at_once(failure: DataPlaneError) -> None:
    attempts = Attempts(failure)
    with pytest.raises(type(failure)):
        attempts.run(session_state())
    assert attempts.begun == 1


def test_units_that_keep_nothing_are_not_waited_for() -> None:
    attempts = Attempts(GONE)
    with pytest.raises(StorageUnitError):
        attempts.run(session_state(durable=False))
    assert attempts.begun == 1


def test_the_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock(monkeypatch, sleep=sleep, monotonic=lambda: now)
    attempts = Attempts(*[GONE] * 1000)
    with pytest.raises(StorageUnitError):
        attempts.run(session_state(reconnect_s=10.0))
    assert 8.0 < now <= 10.0
    assert attempts.begun > 10


# --- The generated calls of the async client are what `make async-client` makes of `client.py`.


@pytest.mark.integration
def test_generating_again_changes_nothing() -> None:
    assert generated(CLIENT.read_text()) == CALLS.read_text(), "run `make async-client`"


# --- preallocated


UNIT = 3


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ticking() -> Clock:
    return Clock()


@pytest.fixture
def buffer(ticking: Clock) -> PreallocatedBuffer:
    buffer = PreallocatedBuffer(ticking)
    buffer.next_request(64, UNIT)  # the first small put, which requests nothing
    return buffer


def request(buffer: PreallocatedBuffer, nbytes: int, *limits: int) -> int:
    """The size of a request that ends at once."""
    command = buffer.next_request(nbytes, UNIT, *limits)
    assert isinstance(command, Preallocate)
    buffer.end_request()
    return command.nbytes


def add(buffer: PreallocatedBuffer, call_id: int = 7, nbytes: int = 256, offset: int = 1024) -> None:
    buffer.add(call_id, Preallocate(unit=UNIT, nbytes=nbytes), offset)


def take(buffer: PreallocatedBuffer, nbytes: int) -> Any:
    return buffer.take(nbytes)


def test_the_first_small_put_asks_for_nothing_ahead_and_one_soon_after_does(ticking: Clock) -> None:
    buffer = PreallocatedBuffer(ticking)
    assert buffer.next_request(64, UNIT) is None
    next_request = buffer.next_request(64, UNIT)
    assert (next_request.unit, next_request.nbytes) == (UNIT, LEAST_BYTES)
    ticking.now += SOON_S
    assert buffer.next_request(64, UNIT) is None


def test_space_is_for_several_puts_within_bounds(buffer: PreallocatedBuffer, ticking: Clock) -> None:
    for nbytes, limits, expected in [
        (6_400, (), PUTS_AHEAD * 6_400),
        (6_400, (64_000,), 64_000),
        (6_400, (64,), 6_400),
        (SMALL_BYTES, (), MOST_BYTES),
    ]:
        ticking.now += SOON_S
        buffer.next_request(64, UNIT)
        assert request(buffer, nbytes, *limits) == expected


def test_requests_that_follow_each_other_grow(buffer: PreallocatedBuffer, ticking: Clock) -> None:
    sizes = [request(buffer, 1024) // 1024 for _ in range(6)]
    assert sizes == [64, 128, 256, 512, 1024, 1024]
    ticking.now += SOON_S
    buffer.next_request(64, UNIT)
    assert request(buffer, 1024) == 64 * 1024


@pytest.mark.parametrize(("nbytes", "unit"), [(SMALL_BYTES + 1, UNIT), (0, UNIT), (64, None)])
def test_nothing_is_asked_for_large_or_empty_puts_or_without_a_mapped_arena(
    buffer: PreallocatedBuffer, nbytes: int, unit: int | None
) -> None:
    assert buffer.next_request(nbytes, unit) is None


def test_a_refusal_stands_for_a_while(buffer: PreallocatedBuffer, ticking: Clock) -> None:
    buffer.record_rejection()
    assert buffer.next_request(64, UNIT) is None
    ticking.now += SOON_S / 2
    assert buffer.next_request(64, UNIT) is None
    ticking.now += SOON_S / 2
    assert buffer.next_request(64, UNIT) is not None


def test_parts_follow_one_another_until_the_space_is_used_up(buffer: PreallocatedBuffer) -> None:
    add(buffer)
    assert [take(buffer, n).offset for n in (64, 128, 64)] == [1024, 1088, 1216]
    assert take(buffer, 64) is None


def test_space_goes_back_once_replaced_and_no_longer_in_use(buffer: PreallocatedBuffer) -> None:
    add(buffer, call_id=7)
    first, second = take(buffer, 64), take(buffer, 64)
    assert take(buffer, 256) is None
    buffer.next_request(256, UNIT)
    add(buffer, call_id=8)
    assert list(buffer.returned) == []
    buffer.finish(first, failed=False)
    assert list(buffer.returned) == []
    buffer.finish(second, failed=False)
    assert list(buffer.returned) == [7]
    assert take(buffer, 64).space.call_id == 8


def test_space_that_several_puts_asked_for_is_used_by_the_next_ones(buffer: PreallocatedBuffer) -> None:
    add(buffer, call_id=7, nbytes=128)
    add(buffer, call_id=8, nbytes=128)
    taken = [take(buffer, 64) for _ in range(5)]
    assert [part and part.space.call_id for part in taken] == [7, 7, 8, 8, None]
    assert list(buffer.returned) == []


def test_of_puts_that_begin_at_once_one_requests_space_and_the_others_wait(buffer: PreallocatedBuffer) -> None:
    assert isinstance(buffer.next_request(64, UNIT), Preallocate)
    waiting = [buffer.next_request(64, UNIT) for _ in range(3)]
    assert all(isinstance(each, Future) and not each.done() for each in waiting)
    buffer.end_request()
    assert all(each.done() for each in waiting)
    assert isinstance(buffer.next_request(64, UNIT), Preallocate)
    waiting = [buffer.next_request(64, UNIT)]
    buffer.give_up_all()
    assert waiting[0].done()


def test_after_a_failure_the_space_is_given_up_once_nobody_writes_to_it(buffer: PreallocatedBuffer) -> None:
    add(buffer)
    failed, other = take(buffer, 64), take(buffer, 64)
    buffer.finish(failed, failed=True)
    assert take(buffer, 64) is None
    assert list(buffer.returned) == []
    buffer.finish(other, failed=False)
    assert list(buffer.returned) == [7]


def test_two_failures_give_space_back_once(buffer: PreallocatedBuffer) -> None:
    add(buffer)
    first, second = take(buffer, 64), take(buffer, 64)
    buffer.finish(first, failed=True)
    buffer.finish(second, failed=True)
    assert list(buffer.returned) == [7]


def test_a_part_may_be_finished_twice(buffer: PreallocatedBuffer) -> None:
    add(buffer)
    part, other = take(buffer, 64), take(buffer, 64)
    buffer.finish(part, failed=False)
    buffer.finish(part, failed=True)
    assert list(buffer.returned) == [], "the other is in use"
    buffer.finish(other, failed=False)
    assert list(buffer.returned) == [7]


def test_space_unused_for_a_heartbeat_goes_back(buffer: PreallocatedBuffer) -> None:
    add(buffer)
    buffer.give_up_idle()
    buffer.finish(take(buffer, 64), failed=False)
    buffer.give_up_idle()
    assert list(buffer.returned) == []
    buffer.give_up_idle()
    assert list(buffer.returned) == [7]
    assert take(buffer, 64) is None


def test_idle_space_that_is_written_to_goes_back_afterwards(buffer: PreallocatedBuffer) -> None:
    add(buffer)
    part = take(buffer, 64)
    buffer.give_up_idle()
    buffer.give_up_idle()
    assert list(buffer.returned) == []
    buffer.finish(part, failed=False)
    assert list(buffer.returned) == [7]


def test_columns_are_placed_each_at_a_granule_of_its_own(buffer: PreallocatedBuffer) -> None:
    columns = encode_fields({"a": ["x" * 100], "b": ["y"], "c": ["z"]}, rows=1, specs={})
    add(buffer, nbytes=4096)
    nbytes = bytes_of(columns)
    placements = take(buffer, nbytes).placements(columns)
    assert [(p.column, p.first, p.last, p.unit, p.offset) for p in placements] == [
        (0, 0, 1, UNIT, 1024),
        (1, 0, 1, UNIT, 1024 + 128),
        (2, 0, 1, UNIT, 1024 + 192),
    ]
    assert take(buffer, 64).offset == 1024 + nbytes == 1024 + 256


def test_the_bounds_make_sense() -> None:
    assert preallocated.SMALL_BYTES <= preallocated.MOST_BYTES
    assert preallocated.LEAST_BYTES <= preallocated.MOST_BYTES


def test_all_space_is_given_up_once_its_parts_are_finished(buffer: PreallocatedBuffer) -> None:
    add(buffer, call_id=7, nbytes=64)
    add(buffer, call_id=8)
    part = take(buffer, 64)
    buffer.give_up_all()
    assert list(buffer.returned) == [8]
    assert take(buffer, 64) is None
    buffer.finish(part, failed=False)
    assert list(buffer.returned) == [8, 7]
