from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, connect, serve
from dataplane.data.conditions import Where
from dataplane.errors import CallTimeoutError, ClaimTimeoutError, RolloutAbortedError, SchemaError
from dataplane.training.replay_buffer import GROUP, ReplayBuffer, Reservation
from dataplane.training.staleness import InOrder, ReadyFirst, StalenessPolicy, WeightFifo, Windowed

pytestmark = pytest.mark.integration

BATCH = 4
WAIT_S = 60.0
_names = itertools.count()


@pytest.fixture(scope="module")
def client() -> Iterator[DataPlaneClient]:
    with serve({"capacity_bytes": 32 << 20}) as server, connect(server.address) as client:
        yield client


@pytest.fixture
def partition(client: DataPlaneClient) -> Iterator[str]:
    name = f"p{next(_names)}"
    client.register_partition(name, ["tokens"], None, ["train"])
    yield name
    client.clear_samples(None, name)


def buffer_of(client: DataPlaneClient, partition: str, policy: StalenessPolicy, **more: object) -> ReplayBuffer:
    return ReplayBuffer(client, partition, policy, required_fields=["tokens"], **more)


def produce(buffer: ReplayBuffer, reservation: Reservation) -> None:
    count = len(reservation.sample_ids)
    buffer.commit(reservation, {"tokens": torch.arange(count)}, [{"reward": float(n)} for n in range(count)])


def store(buffer: ReplayBuffer, count: int) -> list[str]:
    reservation = buffer.reserve(count, 0.0)
    produce(buffer, reservation)
    return reservation.sample_ids


def versions(meta: object) -> list[int]:
    return [tags["weight_version"] for tags in meta.tags]


def test_samples_go_from_producer_to_trainer(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, Windowed(batch_size=BATCH, window=1))
    names = store(buffer, BATCH)
    taken = buffer.take(WAIT_S)
    assert taken.sample_ids == names
    assert [tags["reward"] for tags in taken.tags] == [0.0, 1.0, 2.0, 3.0]
    assert versions(taken) == [0] * BATCH
    assert client.get_samples(taken, partition, ["tokens"])["tokens"].tolist() == [0, 1, 2, 3]
    assert (buffer.flow.consumed, buffer.flow.stored, buffer.flow.running) == (BATCH, 0, 0)


class Rewarded(Windowed):
    """Takes what has a reward, and says so in a text."""

    def claims(self, version: int) -> Sequence[Where]:
        return ["reward > 0"]


def test_a_policy_may_write_its_conditions_as_text(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, Rewarded(batch_size=3, window=1))
    names = store(buffer, BATCH)
    assert buffer.take(WAIT_S).sample_ids == names[1:]


def test_producers_wait_for_the_trainer(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, Windowed(batch_size=BATCH, window=0))
    store(buffer, BATCH)
    with pytest.raises(CallTimeoutError, match=r"4 stored, 0 running.*version 0"):
        buffer.reserve(1, 0.01)
    assert buffer.reserve_nowait(1) is None
    got: list[Reservation] = []
    waiting = threading.Thread(target=lambda: got.append(buffer.reserve(2, WAIT_S)))
    waiting.start()
    buffer.take(WAIT_S)
    assert buffer.advance(1) == (0, [])
    waiting.join(WAIT_S)
    assert [len(r.sample_ids) for r in got] == [2]
    assert got[0].version == 1


def test_a_rollback_lets_others_begin(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, Windowed(batch_size=BATCH, window=0))
    with pytest.raises(ZeroDivisionError), buffer.reserve(BATCH, 0.0):
        raise ZeroDivisionError
    with buffer.reserve(BATCH, 0.0) as reservation:
        produce(buffer, reservation)
    assert buffer.flow.stored == BATCH
    with pytest.raises(RolloutAbortedError, match="already rolled back or committed"):
        produce(buffer, reservation)


def test_a_commit_that_fails_may_be_repeated(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, Windowed(batch_size=2, window=0))
    store(buffer, 1)
    reservation = buffer.reserve(1, 0.0)
    with pytest.raises(SchemaError):
        buffer.commit(reservation, {"tokens": torch.zeros(1)})
    with pytest.raises(ValueError, match="2 mappings of tags"):
        buffer.commit(reservation, {"tokens": torch.zeros(1, dtype=torch.int64)}, [{}, {}])
    assert buffer.flow.running == 1
    produce(buffer, reservation)
    assert buffer.take(WAIT_S).size == 2


@pytest.mark.parametrize("policy", [ReadyFirst, WeightFifo])
def test_a_producer_elsewhere_puts_the_samples_itself(
    client: DataPlaneClient, partition: str, policy: type[StalenessPolicy]
) -> None:
    buffer = buffer_of(client, partition, policy(batch_size=2, window=0), group_size=2)
    reservation = buffer.reserve(2, 0.0)
    put = client.put_samples(reservation.sample_ids, partition, {"tokens": torch.arange(2)}, tags=[{"length": 7}] * 2)
    with pytest.raises(ClaimTimeoutError):
        buffer.take(0.01)
    with pytest.raises(ValueError, match="but the reservation has"):
        buffer.commit(reservation, put.slice(0, 1))
    committed = buffer.commit(reservation, put, [{"reward": 1.0}, {"reward": 2.0}])
    taken = buffer.take(WAIT_S)
    assert taken.tags == committed.stamp_tags([{"length": 7}] * 2).tags
    assert versions(taken) == [0, 0]
    assert (buffer.flow.consumed, buffer.flow.stored, buffer.flow.running) == (2, 0, 0)
    with pytest.raises(RolloutAbortedError, match="already rolled back or committed"):
        buffer.commit(reservation, put)


def test_what_a_producer_put_in_vain_is_cleared(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, Windowed(batch_size=2, window=0))
    reservation = buffer.reserve(2, 0.0)
    put = client.put_samples(reservation.sample_ids, partition, {"tokens": torch.arange(2)})
    assert buffer.advance(1) == (0, [reservation])
    with pytest.raises(RolloutAbortedError):
        buffer.commit(reservation, put)
    assert client.list_samples(partition).size == 0
    assert (buffer.flow.stored, buffer.flow.running) == (0, 0)


def test_a_rollback_clears_what_was_put_of_it(client: DataPlaneClient, partition: str) -> None:
    """A producer elsewhere fails, or is killed, in the middle of a group."""
    buffer = buffer_of(client, partition, Windowed(batch_size=4, window=0), group_size=2)
    whole = store(buffer, 2)
    reservation = buffer.reserve(2, 0.0)
    client.put_samples(reservation.sample_ids[:1], partition, {"tokens": torch.arange(1)})
    with pytest.raises(ZeroDivisionError), reservation:
        raise ZeroDivisionError
    assert client.list_samples(partition).sample_ids == whole
    again = store(buffer, 2)
    buffer.rollback(reservation)
    assert buffer.take(WAIT_S).sample_ids == [*whole, *again]


def test_what_was_committed_is_neither_rolled_back_nor_cleared_by_a_second_commit(
    client: DataPlaneClient, partition: str
) -> None:
    buffer = buffer_of(client, partition, Windowed(batch_size=2, window=0))
    reservation = buffer.reserve(2, 0.0)
    put = client.put_samples(reservation.sample_ids, partition, {"tokens": torch.arange(2)})
    buffer.commit(reservation, put)
    buffer.rollback(reservation)
    with pytest.raises(RolloutAbortedError, match="already rolled back or committed"):
        buffer.commit(reservation, put)
    assert client.list_samples(partition).sample_ids == put.sample_ids
    assert (buffer.flow.stored, buffer.flow.running) == (2, 0)


def test_a_second_commit_beside_the_first_clears_nothing(client: DataPlaneClient, partition: str) -> None:
    class Twice:
        def __getattr__(self, name: str) -> object:
            return getattr(client, name)

        def set_tags(self, *args: object) -> object:
            with pytest.raises(RolloutAbortedError, match="another commit of their reservation is in progress"):
                buffer.commit(reservation, put)
            return client.set_tags(*args)

    buffer = ReplayBuffer(Twice(), partition, Windowed(batch_size=2, window=0), required_fields=["tokens"])
    reservation = buffer.reserve(2, 0.0)
    put = client.put_samples(reservation.sample_ids, partition, {"tokens": torch.arange(2)})
    buffer.commit(reservation, put)
    assert buffer.take(WAIT_S).sample_ids == put.sample_ids


def test_producers_are_told_when_their_work_is_given_up(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, Windowed(batch_size=2, window=0))
    reservation, told = buffer.reserve(2, 0.0), []
    reservation.when_aborted(lambda: told.append("first"))
    reservation.when_aborted(lambda: told.append("second"))
    assert not told
    buffer.advance(1)
    assert sorted(told) == ["first", "second"]
    reservation.when_aborted(lambda: told.append("late"))
    buffer.advance(2)
    assert told[2:] == ["late"]
    kept = buffer.reserve(1, 0.0)
    kept.when_aborted(lambda: told.append("never"))
    buffer.rollback(kept)
    buffer.advance(3)
    assert len(told) == 3


def test_one_producer_that_cannot_be_told_keeps_nobody_else_from_it(client: DataPlaneClient, partition: str) -> None:
    buffer, told = buffer_of(client, partition, Windowed(batch_size=2, window=0)), []
    one, other = buffer.reserve(1, 0.0), buffer.reserve(1, 0.0)
    one.when_aborted(lambda: told.append(1 / 0))
    other.when_aborted(lambda: told.append(1))
    with pytest.raises(ZeroDivisionError):
        buffer.advance(1)
    assert told == [1]
    assert (buffer.flow.version, buffer.flow.running) == (1, 0)


def test_claims_with_a_lag_follow_the_buffer(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, ReadyFirst(batch_size=2, window=1))
    old = store(buffer, 2)
    buffer.advance(1)
    fresh = store(buffer, 1)
    assert client.why_blocked(partition, "train").version == 1
    assert client.claim_meta(partition, "train", ["tokens"], 4, blocking=False, max_lag=0).sample_ids == fresh
    other = buffer_of(client, partition, ReadyFirst(batch_size=2, window=1))
    other.load_state_dict({**buffer.state_dict(), "version": 7})
    assert client.why_blocked(partition, "train").version == 7
    assert client.claim_meta(partition, "train", ["tokens"], 4, blocking=False).sample_ids == old


def test_what_is_being_stored_is_not_given_up(client: DataPlaneClient, partition: str) -> None:
    """The trainer moves on while a commit is under way."""

    class Moving:
        def __getattr__(self, name: str) -> object:
            return getattr(client, name)

        def put_samples(self, *args: object, **kwargs: object) -> object:
            assert buffer.advance(2) == (0, [])
            return client.put_samples(*args, **kwargs)

    buffer = ReplayBuffer(Moving(), partition, Windowed(batch_size=2, window=0), required_fields=["tokens"])
    store(buffer, 2)
    assert (buffer.flow.stored, buffer.flow.running) == (2, 0)
    assert buffer.advance(3) == (2, [])
    assert buffer.flow.stored == 0


def test_what_is_too_old_is_evicted_and_what_is_running_given_up(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, Windowed(batch_size=BATCH, window=1))
    old = store(buffer, 2)
    slow = buffer.reserve(2, 0.0)
    assert buffer.advance(1) == (0, [])
    fresh = store(buffer, BATCH)
    evicted, aborted = buffer.advance(2)
    assert (evicted, aborted) == (2, [slow])
    assert slow.aborted
    with pytest.raises(RolloutAbortedError, match="version 0; the trainer is at version 2"):
        produce(buffer, slow)
    assert set(client.list_samples(partition).sample_ids) == set(fresh)
    assert not set(old) & set(fresh)
    assert buffer.take(WAIT_S).sample_ids == fresh
    assert (buffer.flow.stored, buffer.flow.running) == (0, 0)


def test_what_a_step_has_taken_is_not_evicted(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, Windowed(batch_size=BATCH, window=0))
    store(buffer, BATCH)
    taken = buffer.take(WAIT_S)
    assert buffer.advance(1) == (0, [])
    assert client.get_samples(taken, partition, ["tokens"])["tokens"].tolist() == [0, 1, 2, 3]


def test_weight_fifo_uses_older_weights_first(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, WeightFifo(batch_size=BATCH, window=2))
    slow = buffer.reserve(3, 0.0)
    buffer.advance(1)
    store(buffer, BATCH)
    produce(buffer, slow)
    assert sorted(versions(buffer.take(WAIT_S))) == [0, 0, 0, 1]


def test_a_batch_that_does_not_fill_up_takes_nothing(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, WeightFifo(batch_size=BATCH, window=1))
    store(buffer, 2)
    buffer.advance(1)
    store(buffer, 1)
    with pytest.raises(ClaimTimeoutError):
        buffer.take(0.05)
    store(buffer, 1)
    assert sorted(versions(buffer.take(WAIT_S))) == [0, 0, 1, 1]


def test_in_order_waits_for_the_samples_of_the_step(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, InOrder(batch_size=BATCH, window=1))
    first, second = buffer.reserve(BATCH, 0.0), buffer.reserve(BATCH, 0.0)
    produce(buffer, second)
    with pytest.raises(ClaimTimeoutError):
        buffer.take(0.05)
    produce(buffer, first)
    assert buffer.take(WAIT_S).sample_ids == first.sample_ids
    buffer.advance(1)
    assert buffer.take(WAIT_S).sample_ids == second.sample_ids


def test_in_order_gives_the_place_of_a_rollback_to_the_next(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, InOrder(batch_size=2, window=1))
    lost = buffer.reserve(1, 0.0)
    store(buffer, 1)
    later = store(buffer, 2)
    buffer.rollback(lost)
    store(buffer, 1)
    assert not set(buffer.take(WAIT_S).sample_ids) & set(later)
    buffer.advance(1)
    assert buffer.take(WAIT_S).sample_ids == later


def test_groups_stay_whole(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, ReadyFirst(batch_size=BATCH, window=1), group_size=2)
    for _ in range(3):
        store(buffer, 2)
    taken = buffer.take(WAIT_S)
    groups = [tags[GROUP] for tags in taken.tags]
    assert sorted(groups.count(group) for group in set(groups)) == [2, 2]
    with pytest.raises(ValueError, match="in whole groups of 2"):
        buffer.reserve(3, 0.0)
    with pytest.raises(ValueError, match="must be a multiple of group_size="):
        buffer_of(client, partition, ReadyFirst(batch_size=BATCH, window=1), group_size=3)


def test_arguments_of_another_type_are_named(client: DataPlaneClient, partition: str) -> None:
    policy = ReadyFirst(batch_size=BATCH, window=1)
    wrong: Any = "2"
    with pytest.raises(ValueError, match="count='2': expected an integer of 1 or more"):
        buffer_of(client, partition, policy).reserve(wrong)
    with pytest.raises(ValueError, match="group_size='2': expected an integer of 1 or more"):
        buffer_of(client, partition, policy, group_size=wrong)
    with pytest.raises(ValueError, match="batch_size='2': expected an integer of 1 or more"):
        ReadyFirst(batch_size=wrong, window=1)
    with pytest.raises(ValueError, match="window='2': expected an integer of 0 or more"):
        ReadyFirst(batch_size=BATCH, window=wrong)
    with pytest.raises(TypeError, match="argument task_name: None"):
        buffer_of(client, partition, policy, task_name=None)
    with pytest.raises(ValueError, match="required_fields='x': pass a list of names"):
        ReplayBuffer(client, partition, policy, required_fields="x")


def test_a_saved_state_goes_on_where_it_was(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, InOrder(batch_size=2, window=1))
    store(buffer, 2)
    buffer.take(WAIT_S)
    buffer.advance(1)
    stored = store(buffer, 1)
    running = buffer.reserve(1, 0.0)
    state = buffer.state_dict()
    other = buffer_of(client, partition, InOrder(batch_size=2, window=1))
    other.load_state_dict(state)
    assert (other.flow.version, other.flow.consumed, other.flow.stored, other.flow.running) == (1, 2, 1, 0)
    again = other.reserve(1, 0.0)
    assert not set(again.sample_ids) & {*stored, *running.sample_ids}
    produce(other, again)
    assert set(other.take(WAIT_S).sample_ids) == {*stored, *again.sample_ids}
    with pytest.raises(RuntimeError, match="not committed yet"):
        buffer.load_state_dict(state)


def test_the_weights_do_not_go_back(client: DataPlaneClient, partition: str) -> None:
    buffer = buffer_of(client, partition, ReadyFirst(batch_size=2, window=1))
    buffer.advance(3)
    with pytest.raises(ValueError, match="already at version 3"):
        buffer.advance(2)


@pytest.mark.parametrize("make", [Windowed, ReadyFirst, WeightFifo, InOrder])
def test_producers_and_trainer_in_threads(client: DataPlaneClient, partition: str, make: type[StalenessPolicy]) -> None:
    """Every sample is trained on once or evicted, and none is older than the window unless the policy allows it."""
    steps, window = 6, 1
    buffer = buffer_of(client, partition, make(batch_size=BATCH, window=window))
    done = threading.Event()
    failed: list[BaseException] = []

    def producer() -> None:
        try:
            while not done.is_set():
                reservation = buffer.reserve_nowait(2)
                if reservation is None:
                    done.wait(0.001)
                    continue
                try:
                    produce(buffer, reservation)
                except RolloutAbortedError:
                    continue
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=producer) for _ in range(3)]
    for thread in threads:
        thread.start()
    used: list[str] = []
    try:
        for version in range(steps):
            taken = buffer.take(WAIT_S)
            if make is not ReadyFirst:
                assert all(version - begun <= window for begun in versions(taken))
            used += taken.sample_ids
            client.clear_samples(taken, partition)
            buffer.advance(version + 1)
    finally:
        done.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert not failed
    assert len(set(used)) == len(used) == steps * BATCH
