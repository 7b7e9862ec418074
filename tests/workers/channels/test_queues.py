"""The broker's queues, waits and leases, without sockets."""

from __future__ import annotations

import pytest

from dataplane.core.types import granules_up
from tests.workers.channels.queue_driver import CAPACITY, KEY, Backed, QueueDriver, heads, kinds
from workers.channels import wire
from workers.channels.queues import Effects


def test_items_leave_in_the_order_they_came() -> None:
    driver = QueueDriver()
    for number in range(3):
        assert kinds(driver.put(number)) == [wire.BrokerDone]
    assert [heads(driver.get()) for _ in range(3)] == [[[0]], [[1]], [[2]]]


def test_keys_are_independent() -> None:
    driver = QueueDriver(maxsize=1)
    driver.put("a", key=b"a")
    assert driver.get(key=b"b") == []
    assert kinds(driver.put("b", key=b"b")) == [wire.BrokerDone, wire.Items]
    assert heads(driver.get(key=b"a")) == [["a"]]


def test_a_full_queue_makes_puts_wait_in_line() -> None:
    driver = QueueDriver(maxsize=1)
    driver.put(0)
    assert driver.put(1) == []
    assert driver.put(2, client=3) == []
    assert kinds(driver.put(3, nowait=True)) == [wire.Full]
    effects = driver.get()
    assert heads(effects) == [[0]]
    assert kinds(effects) == [wire.Items, wire.BrokerDone]
    assert heads(driver.get()) == [[1]]
    assert heads(driver.get()) == [[2]]


def test_a_small_item_does_not_overtake_one_that_waits_for_memory() -> None:
    driver = QueueDriver()

    def put(head: str, nbytes: int, *, nowait: bool = False) -> Effects:
        return driver.say(1, wire.Put, "c", KEY, wire.Item(head, bytes(nbytes)), 0, nowait)[1]

    assert kinds(put("first", CAPACITY * 3 // 4)) == [wire.BrokerDone]
    assert put("large", CAPACITY // 2) == []
    assert put("small", 1) == []
    assert kinds(put("none", 1, nowait=True)) == [wire.Full]
    request_id, effects = driver.say(2, wire.Get, "c", KEY, None, False)
    assert heads(effects) == [["first"]]
    assert kinds(driver.broker.apply(2, wire.AckItems(request_id))) == [wire.BrokerDone, wire.BrokerDone]
    assert [heads(driver.get()) for _ in range(2)] == [[["large"]], [["small"]]]


def test_gets_are_served_in_the_order_they_asked() -> None:
    driver = QueueDriver()
    assert driver.get(client=2) == []
    assert driver.get(client=3) == []
    assert [client for client, answer in driver.put("a") if isinstance(answer, wire.Items)] == [2]
    assert [client for client, answer in driver.put("b") if isinstance(answer, wire.Items)] == [3]


def test_nowait_of_an_empty_queue_is_answered_at_once() -> None:
    assert kinds(QueueDriver().get(nowait=True)) == [wire.Empty]


@pytest.mark.parametrize(
    ("weights", "target", "first", "left"),
    [
        ([1, 1, 1], 2, [0, 1], 1),
        ([1, 5], 3, [0], 1),
        ([5, 1], 3, [0], 1),
        ([0, 0, 2, 9], 2, [0, 1, 2], 1),
        ([0], 0, [0], 0),
        ([1.5, 1.5], 3, [0, 1], 0),
        ([0.1] * 11, 1.0, [*range(10)], 1),
        ([1e308, 1e308], 1.5e308, [0], 1),
    ],
)
def test_a_batch_ends_at_its_weight_or_before_what_would_exceed_it(
    weights: list[float], target: float, first: list[int], left: int
) -> None:
    driver = QueueDriver()
    for number, weight in enumerate(weights):
        driver.put(number, weight=weight)
    assert heads(driver.get(target=target)) == [first]
    assert driver.say(3, wire.Count, "c", KEY)[1][0][1].size == left


def test_a_batch_that_is_not_whole_waits_and_two_each_get_whole_ones() -> None:
    driver = QueueDriver()
    assert driver.get(client=2, target=2) == []
    assert driver.get(client=3, target=2) == []
    seen = [effect for number in range(4) for effect in driver.put(number, weight=1)]
    batches = [
        (client, [item.head for item in answer.items])
        for client, answer in seen
        if kinds([(0, answer)]) == [wire.Items]
    ]
    assert batches == [(2, [0, 1]), (3, [2, 3])]


def test_a_batch_heavier_than_its_queue_is_long_still_comes() -> None:
    driver = QueueDriver(maxsize=2)
    assert driver.get(target=5) == []
    seen = [effect for number in range(5) for effect in driver.put(number, weight=1)]
    assert heads(seen) == [[0, 1, 2, 3, 4]]


def test_nobody_takes_from_a_batch_that_is_being_collected() -> None:
    driver = QueueDriver()
    driver.get(client=2, target=2)
    driver.put(0, weight=1)
    assert driver.get(client=3) == []
    assert kinds(driver.get(client=3, nowait=True)) == [wire.Empty]
    effects = [*driver.put(1, weight=1), *driver.put(2, weight=1)]
    assert heads(effects) == [[0, 1], [2]]


def test_what_a_client_that_left_had_goes_to_the_next_in_its_old_place() -> None:
    driver = QueueDriver()
    for number in range(3):
        driver.put(number)
    driver.get(client=2)
    driver.get(client=2)
    assert driver.broker.leave(2) == []
    assert [heads(driver.get(client=3)) for _ in range(3)] == [[[0]], [[1]], [[2]]]


def test_a_collecting_batch_whose_client_left_gives_everything_back() -> None:
    driver = QueueDriver()
    driver.get(client=2, target=3)
    driver.put(0, weight=1)
    driver.put(1, weight=1)
    driver.get(client=3)
    assert heads(driver.broker.leave(2)) == [[0]]


def test_an_item_given_back_goes_to_who_waits() -> None:
    driver = QueueDriver()
    driver.put("a")
    request_id, effects = driver.say(2, wire.Get, "c", KEY, None, False)
    assert heads(effects) == [["a"]]
    assert driver.get(client=3) == []
    effects = driver.broker.apply(2, wire.NackItems(request_id))
    assert [client for client, _ in effects] == [3]


def test_items_given_back_without_those_that_are_lost() -> None:
    driver = QueueDriver()
    for head in "abc":
        driver.say(1, wire.Put, "c", KEY, wire.Item(head, b"x" * (CAPACITY // 4)), 1, False)
    request_id, _ = driver.say(2, wire.Get, "c", KEY, 3, False)
    assert heads(driver.broker.apply(2, wire.NackItems(request_id, (1,)))) == []
    assert heads(driver.get(target=2)) == [["a", "c"]]
    assert kinds(driver.put("d", client=3)) == [wire.BrokerDone]
    assert driver.broker._carried_bytes == CAPACITY // 2


def test_acknowledging_what_was_not_handed_out_is_refused() -> None:
    driver = QueueDriver()
    with pytest.raises(ValueError, match="holds no items"):
        driver.broker.apply(2, wire.AckItems(77))


def test_an_acknowledgement_is_answered_where_that_is_asked_for() -> None:
    driver = QueueDriver()
    for head in "ab":
        driver.put(head)
    for confirm, answers in ((False, []), (True, [wire.BrokerDone])):
        request_id, _ = driver.say(2, wire.Get, "c", KEY, None, False)
        assert kinds(driver.broker.apply(2, wire.AckItems(request_id, confirm))) == answers


def test_closing_refuses_puts_and_lets_gets_drain() -> None:
    driver = QueueDriver(maxsize=1)
    driver.put("a")
    assert driver.put("b") == []
    assert driver.close() == [(1, wire.Closed(3))]
    assert kinds(driver.put("c")) == [wire.Closed]
    request_id, effects = driver.say(2, wire.Get, "c", KEY, None, False)
    assert heads(effects) == [["a"]]
    driver.broker.apply(2, wire.AckItems(request_id))
    assert kinds(driver.get()) == [wire.Ended]
    assert kinds(driver.get(nowait=True)) == [wire.Ended]
    assert driver.broker.channels == 0


def test_the_end_waits_for_items_that_may_come_back() -> None:
    driver = QueueDriver()
    driver.put("a")
    driver.get(client=2)
    driver.close()
    assert driver.get(client=3) == []
    assert kinds(driver.get(client=3, nowait=True)) == [wire.Empty]
    assert heads(driver.broker.leave(2)) == [["a"]]


def test_closing_hands_out_the_batch_that_will_never_be_whole() -> None:
    driver = QueueDriver()
    driver.get(target=3)
    driver.put("a", weight=1)
    assert heads(driver.close()) == [["a"]]


def test_cancelling_a_wait_takes_it_out_of_its_line() -> None:
    driver = QueueDriver()
    request_id, _ = driver.say(2, wire.Get, "c", KEY, None, False)
    assert driver.broker.apply(2, wire.Cancel(request_id)) == [(2, wire.Cancelled(request_id))]
    assert kinds(driver.put("a")) == [wire.BrokerDone]


def test_cancelling_what_was_answered_says_nothing() -> None:
    driver = QueueDriver()
    driver.put("a")
    request_id, _ = driver.say(2, wire.Get, "c", KEY, None, False)
    assert driver.broker.apply(2, wire.Cancel(request_id)) == []
    assert heads(driver.broker.apply(2, wire.NackItems(request_id))) == []
    assert heads(driver.get(client=3)) == [["a"]]


def test_space_is_waited_for_in_line_and_given_back() -> None:
    driver = QueueDriver()
    space = driver.reserve(CAPACITY)[0][1].space
    assert kinds(driver.reserve(64, nowait=True)) == [wire.Full]
    assert driver.reserve(64) == []
    assert kinds(driver.say(1, wire.ReleaseSpace, space)[1]) == [wire.ItemSpace]
    assert kinds(driver.reserve(CAPACITY + 1, client=3)) == [wire.TooLarge]


def test_a_put_that_waits_for_memory_holds_up_its_own_queue_only() -> None:
    driver = QueueDriver()
    driver.broker.apply(3, wire.Create(1, "d", "d", 0))
    driver.reserve(CAPACITY // 2)
    assert driver.reserve(CAPACITY) == []
    assert driver.reserve(64) == []
    assert kinds(driver.reserve(64, nowait=True)) == [wire.Full]
    assert kinds(driver.reserve(64, key=b"other")) == [wire.ItemSpace]
    assert kinds(driver.reserve(64, channel="d", nowait=True)) == [wire.ItemSpace]


def test_queues_that_wait_for_memory_are_served_in_turn_as_far_as_there_is() -> None:
    driver = QueueDriver()
    offsets = [driver.reserve(CAPACITY // 2)[0][1].space for _ in range(2)]
    assert driver.reserve(CAPACITY, client=1, key=b"a") == []
    for _ in range(2):
        assert driver.reserve(CAPACITY // 2, client=2, key=b"b") == []
        assert driver.reserve(CAPACITY // 2, client=3, key=b"c") == []
    first = driver.say(1, wire.ReleaseSpace, offsets[0])[1]
    second = driver.say(1, wire.ReleaseSpace, offsets[1])[1]
    third = driver.say(2, wire.ReleaseSpace, first[0][1].space)[1]
    assert [client for client, _ in (*first, *second, *third)] == [2, 3, 2]
    assert driver.broker.leave(3) == []
    assert [client for client, _ in driver.broker.leave(2)] == [1]


def test_closing_ends_waits_for_memory() -> None:
    driver = QueueDriver()
    space = driver.reserve(CAPACITY)[0][1].space
    assert driver.reserve(64, client=2) == []
    assert kinds(driver.close()) == [wire.Closed]
    assert kinds(driver.reserve(64, client=2)) == [wire.Closed]
    assert driver.say(1, wire.ReleaseSpace, space)[1] == []
    assert driver.broker.channels == 0


def test_space_that_is_not_its_own_is_refused() -> None:
    driver = QueueDriver()
    item = wire.Item("a", b"", driver.reserve(64)[0][1].space, 64)
    with pytest.raises(ValueError, match="not reserved for this client"):
        driver.say(2, wire.Put, "c", KEY, item, 0, False)
    item.nbytes = 65
    with pytest.raises(ValueError, match="not reserved for this client"):
        driver.say(1, wire.Put, "c", KEY, item, 0, False)


def test_a_put_brings_space_for_the_next_while_there_is_plenty() -> None:
    driver = QueueDriver()
    _, effects = driver.say(1, wire.Put, "c", KEY, wire.Item("a"), 0, False, 128)
    assert effects[0][1].space >= 0
    assert driver.memory.used_bytes == 128
    _, effects = driver.say(1, wire.Put, "c", KEY, wire.Item("a"), 0, False, CAPACITY // 2)
    assert effects[0][1].space == wire.NOWHERE
    driver.broker.leave(1)
    assert driver.memory.used_bytes == 0


def test_items_that_carry_their_bytes_are_bounded_too() -> None:
    driver = QueueDriver()
    item = wire.Item("a", b"x" * CAPACITY)
    assert kinds(driver.say(1, wire.Put, "c", KEY, item, 0, False)[1]) == [wire.BrokerDone]
    assert driver.say(1, wire.Put, "c", KEY, item, 0, False)[1] == []
    request_id, effects = driver.say(2, wire.Get, "c", KEY, None, False)
    assert kinds(effects) == [wire.Items]
    assert kinds(driver.broker.apply(2, wire.AckItems(request_id))) == [wire.BrokerDone]


def test_a_key_stays_where_it_was_first_used() -> None:
    driver = QueueDriver()
    assert driver.say(1, wire.RouteKey, "c", b"x", 2)[1][0][1].replica == 2
    assert driver.say(2, wire.RouteKey, "c", b"x", 0)[1][0][1].replica == 2
    assert driver.say(2, wire.RouteKey, "c", b"y", 0)[1][0][1].replica == 0
    assert [driver.say(2, wire.Count, "c", key)[1][0][1].routed for key in (b"x", b"y", b"z")] == [True, True, False]


def test_sizes_are_whole_granules() -> None:
    memory = Backed()
    memory.take(1)
    assert memory.used_bytes == granules_up(1)
