"""Clients and storage units whose controller restarts with its state, or that lose their connection to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane import connect
from dataplane.client.rpc import handshake
from dataplane.core import failpoints
from dataplane.core.addresses import register_resolver
from dataplane.errors import ClaimTimeoutError, ClientClosedError, ServiceRestartedError, ServiceUnavailableError
from tests.client.reconnecting import (  # noqa: F401
    FIELDS,
    STILL,
    Open,
    calls_of,
    check,
    claim_two,
    ending,
    endpoint,
    open_client,
    pool,
    proxy_to,
    put,
    register,
    restartable,
    rows,
    style,
)
from tests.client.test_channel import in_fork
from tests.restarts import NO_HEARTBEATS, WAIT_S, Proxy, RestartableService, wait_until

pytestmark = pytest.mark.slow


# --- the service restarts with its state


def test_everything_goes_on(
    restartable: RestartableService, open_client: Open, pool: ThreadPoolExecutor, style: str, ending: str, endpoint: str
) -> None:
    client, other = open_client(style), open_client()
    register(client)
    put(client, 1, 2)
    assert client.claim_meta("p", "train", FIELDS, 1).sample_ids == ["s1"]
    waiting = claim_two(pool, client, other)
    before = client.stats()
    restartable.restart()
    check(client, 1, 2)
    put(client, 3)
    assert waiting.result(WAIT_S).sample_ids == ["s2", "s3"]
    check(client, 3, 1)
    after = client.stats()
    assert after.epoch > before.epoch
    assert {each.session for each in after.sessions} == {each.session for each in before.sessions}
    assert client.check_consumption_status("p", ["train"]) is False
    check(open_client(style), 1, 2, 3)


def test_calls_wait_for_its_return(
    restartable: RestartableService, open_client: Open, pool: ThreadPoolExecutor, style: str
) -> None:
    client = open_client(style)
    register(client)
    put(client, 1)
    restartable.stop()
    wait_until(lambda: calls_of(client).waiting, "a lost service")
    calls = [pool.submit(put, client, number) for number in (2, 3, 4)]
    claim = pool.submit(client.claim_meta, "p", "train", FIELDS, 4)
    # The claim, and a request for space for which all puts may wait.
    wait_until(lambda: calls_of(client)._call_ids.unanswered >= 2, "calls under way")
    assert not any(call.done() for call in [*calls, claim])
    restartable.start()
    for call in calls:
        assert call.result(WAIT_S).size == 1
    assert sorted(claim.result(WAIT_S).sample_ids) == ["s1", "s2", "s3", "s4"]
    check(client, 1, 2, 3, 4)
    with pytest.raises(ClaimTimeoutError):
        client.claim_meta("p", "train", FIELDS, 1, timeout_s=0.0)


@pytest.mark.parametrize(
    "point", ["put.before_commit", "call.Allocate.after", "call.Commit.after", "call.Commit.before"]
)
def test_a_put_in_flight_is_done_once(
    restartable: RestartableService, open_client: Open, ending: str, point: str
) -> None:
    client = open_client()
    register(client)

    def restart() -> None:
        failpoints.disarm()
        restartable.restart()

    failpoints.arm(point, restart)
    meta = client.put_samples(["s1"], "p", rows(1), mode="create")
    assert meta.sample_ids == ["s1"]
    check(client, 1)
    (partition,) = client.stats().partitions
    assert (partition.live, partition.born) == (1, 1)
    assert sum(unit.reserved_bytes for unit in client.stats().units) == 0


def test_views_stay_pinned_and_their_release_arrives(
    restartable: RestartableService, open_client: Open, style: str
) -> None:
    client, other = open_client("local-async" if style.endswith("async") else "local"), open_client(style)
    register(client)
    put(client, 1, 2)
    views = client.get_samples(["s1", "s2"], "p", FIELDS, copy=False)
    restartable.restart()
    client.clear_samples(["s1", "s2"], "p")
    for number in range(3, 8):
        put(other, number)
    assert torch.equal(views["x"], rows(1, 2)["x"])
    assert views["n"].tolist() == [1, 2]
    assert sum(unit.pinned_bytes for unit in other.stats().units) > 0
    restartable.stop()
    wait_until(lambda: calls_of(client).waiting, "a lost service")
    del views
    restartable.start()
    wait_until(lambda: sum(unit.pinned_bytes for unit in other.stats().units) == 0, "an unpinned arena")
    check(other, 3, 4, 5, 6, 7)


def test_the_end_of_a_service_that_keeps_its_state_is_noticed_at_once(tmp_path: Path, ending: str) -> None:
    """Not after two heartbeats, which last longer here than the call may take."""
    restartable = RestartableService(tmp_path / "state", replace(STILL, units=0))
    restartable.start()
    try:
        with connect(restartable.address, **NO_HEARTBEATS, call_timeout_s=WAIT_S) as client:
            client.register_partition("p", FIELDS, None, ["train"])
            restartable.restart()
            assert client.check_consumption_status("p", ["train"]) is False
    finally:
        restartable.close()


def test_an_address_that_names_a_service_is_resolved_again(
    restartable: RestartableService, open_client: Open, pool: ThreadPoolExecutor, style: str
) -> None:
    register_resolver("moving", lambda rest: restartable.address)
    moving = restartable.unit("moving:service")
    client = open_client(style, "moving:service")
    restartable.units[0].stop()
    register(client)
    put(client, 1)
    waiting = pool.submit(client.claim_meta, "p", "train", FIELDS, 2)
    before = restartable.address
    restartable.stop()
    restartable.start(elsewhere=True)
    assert restartable.address != before
    check(client, 1)
    wait_until(lambda: [unit.connected for unit in client.stats().units].count(True) == 1, "the unit")
    put(client, 2)
    assert waiting.result(WAIT_S).size == 2
    assert not moving.lost.is_set()


def test_it_goes_on_again_and_again(restartable: RestartableService, open_client: Open, style: str) -> None:
    client = open_client(style)
    register(client)
    for number in range(4):
        put(client, number)
        restartable.restart()
    check(client, 0, 1, 2, 3)


def test_work_under_way_is_done_exactly_once(
    restartable: RestartableService, open_client: Open, pool: ThreadPoolExecutor, style: str, ending: str
) -> None:
    """Producers and consumers continue while the controller is restarted again and again."""
    each, producers = 25, [open_client(style) for _ in range(2)]
    consumers, done = [open_client(style) for _ in range(2)], threading.Event()
    finished: list[int] = []
    register(producers[0])

    def produce(which: int) -> None:
        for number in range(which * each, (which + 1) * each):
            producers[which].put_samples([f"s{number}"], "p", rows(number), mode="create")
            finished.append(number)

    def consume(client: Any) -> list[str]:
        found: list[str] = []
        while True:
            meta = client.claim_meta("p", "train", FIELDS, 4, min_batch_size=1, timeout_s=WAIT_S)
            if not meta.size:
                return found
            check(client, *[int(sample[1:]) for sample in meta.sample_ids])
            found += meta.sample_ids

    def restart() -> int:
        count = 0
        while not done.is_set():
            before = len(finished)
            wait_until(lambda before=before: len(finished) >= before + 5 or done.is_set(), "puts of this run")
            restartable.restart()
            count += 1
        return count

    restarting = pool.submit(restart)
    try:
        claims = [pool.submit(consume, client) for client in consumers]
        for work in [pool.submit(produce, which) for which in range(2)]:
            work.result(WAIT_S)
        producers[0].seal("p")
        claimed = [sample for work in claims for sample in work.result(WAIT_S)]
    finally:
        done.set()
    assert restarting.result(WAIT_S) > 0
    assert sorted(claimed) == sorted(f"s{number}" for number in range(2 * each))
    (partition,) = producers[0].stats().partitions
    assert (partition.live, partition.born) == (2 * each, 2 * each)
    wait_until(lambda: not sum(u.reserved_bytes + u.pinned_bytes for u in producers[0].stats().units), "all given back")


# --- the network


@pytest.mark.parametrize("failure", ["pause", "cut"])
def test_a_network_that_heals_is_no_end(
    restartable: RestartableService,
    open_client: Open,
    proxy_to: Callable[[int], Proxy],
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    style: str,
    failure: str,
) -> None:
    monkeypatch.setattr(handshake, "boot_id", lambda: "another host")
    proxy = proxy_to(restartable.port)
    client, other = open_client(style, f"127.0.0.1:{proxy.port}"), open_client()
    register(client)
    put(client, 1)
    waiting = claim_two(pool, client, other)
    with monkeypatch.context() as impatient:
        impatient.setattr(handshake, "RESUME_STEP_S", 0.2)  # only while nothing can answer
        getattr(proxy, failure)()
        wait_until(lambda: calls_of(client).waiting, "a lost service")
    more = pool.submit(put, client, 2)
    proxy.heal()
    more.result(WAIT_S)
    assert waiting.result(WAIT_S).sample_ids == ["s1", "s2"]
    check(client, 1, 2)


def test_a_unit_that_was_cut_off_keeps_its_id_and_its_rows(
    restartable: RestartableService, open_client: Open, proxy_to: Callable[[int], Proxy], style: str
) -> None:
    proxy = proxy_to(restartable.port)
    far = restartable.unit(f"127.0.0.1:{proxy.port}")
    restartable.units[0].stop()
    client = open_client(style)
    register(client)
    put(client, 1)
    before = {unit.unit for unit in client.stats().units if unit.connected}
    for _ in range(2):
        proxy.cut()
        wait_until(lambda: not any(unit.connected for unit in client.stats().units), "a lost unit")
        check(client, 1)
        proxy.heal()
        wait_until(lambda: {u.unit for u in client.stats().units if u.connected} == before, "the unit again")
    put(client, 2)
    check(open_client(style), 1, 2)
    assert not far.lost.is_set()


# --- Clients and storage units whose controller does not restart, or restarts without its state.


# --- clients


@pytest.mark.parametrize("restartable", [STILL], indirect=True, ids=["still"])
def test_after_the_window_calls_fail_and_a_late_return_is_found(
    restartable: RestartableService, open_client: Open, style: str
) -> None:
    client = open_client(style, reconnect_s=0.3)
    register(client)
    put(client, 1)
    restartable.stop()
    with pytest.raises(
        ServiceUnavailableError, match=rf"at {restartable.address}: .* not return within reconnect_s=0\.3 s"
    ):
        put(client, 2)
    with pytest.raises(ServiceUnavailableError):
        client.claim_meta("p", "train", FIELDS, 1)
    restartable.start()
    wait_until(lambda: not calls_of(client).unreachable, "the service")
    check(client, 1)
    put(client, 2)
    assert sorted(client.claim_meta("p", "train", FIELDS, 2).sample_ids) == ["s1", "s2"]


@pytest.mark.parametrize("restartable", [STILL], indirect=True, ids=["still"])
def test_a_call_under_way_fails_when_the_window_ends(
    restartable: RestartableService, open_client: Open, pool: ThreadPoolExecutor, style: str
) -> None:
    client, other = open_client(style, reconnect_s=0.3), open_client()
    register(client)
    waiting = claim_two(pool, client, other)
    restartable.stop()
    with pytest.raises(ServiceUnavailableError, match=restartable.address):
        waiting.result(WAIT_S)


def test_a_lost_state_is_told_to_whoever_waits_and_to_all_later_calls(
    restartable: RestartableService, open_client: Open, pool: ThreadPoolExecutor, style: str, ending: str, endpoint: str
) -> None:
    client, other = open_client(style), open_client()
    register(client)
    put(client, 1)
    waiting = claim_two(pool, client, other)
    before = client.stats().epoch
    restartable.stop()
    restartable.forget()
    restartable.start()
    for call in (waiting.result, lambda *_: check(client, 1), lambda *_: put(client, 2)):
        with pytest.raises(ServiceRestartedError) as caught:
            call(WAIT_S)
        assert (caught.value.expected_epoch, caught.value.got_epoch > before) == (before, True)
        assert "every partition, sample and claim" in caught.value.lost
        assert restartable.address in str(caught.value)
    wait_until(lambda: calls_of(other).over, "the other client's end")
    register(open_client(style))


def test_a_service_without_a_state_is_not_waited_for(
    restartable: RestartableService, open_client: Open, style: str
) -> None:
    restartable.stop()
    restartable.start(durable=False)
    client = open_client(style)
    register(client)
    epoch = client.stats().epoch
    restartable.stop()
    with pytest.raises(ServiceUnavailableError):
        put(client, 1)
    restartable.start(durable=False)

    def told() -> Any:
        try:
            client.stats()
        except ServiceUnavailableError:
            return None
        except ServiceRestartedError as error:
            return error

    error = wait_until(told)
    assert error.expected_epoch == epoch


def test_closing_while_it_is_gone_ends_calls_and_is_quick(
    restartable: RestartableService, open_client: Open, pool: ThreadPoolExecutor, style: str
) -> None:
    client = open_client(style)
    register(client)
    restartable.stop()
    wait_until(lambda: calls_of(client).waiting, "a lost service")
    waiting = pool.submit(client.claim_meta, "p", "train", FIELDS, 2)
    wait_until(lambda: calls_of(client)._call_ids.unanswered, "a call under way")
    client.close()
    with pytest.raises(ClientClosedError):
        waiting.result(WAIT_S)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_while_it_is_gone_is_told_so_and_the_parent_goes_on(
    restartable: RestartableService, open_client: Open
) -> None:
    client = open_client()
    register(client)
    put(client, 1)
    restartable.stop()
    wait_until(lambda: calls_of(client).waiting, "a lost service")

    def child() -> None:
        with pytest.raises(ServiceUnavailableError, match=restartable.address):
            client.stats()
        client.close()

    assert in_fork(child) == 0
    restartable.start()
    check(client, 1)


# --- storage units


def test_a_unit_without_its_service_starts_over_with_one_that_knows_nothing(
    restartable: RestartableService, open_client: Open, style: str
) -> None:
    (unit,) = restartable.units
    client = open_client("local")
    register(client)
    put(client, 1)
    views = client.get_samples(["s1"], "p", FIELDS, copy=False)
    (before,) = client.stats().units
    restartable.stop()
    restartable.forget()
    restartable.start()
    after = open_client(style)
    register(after)
    wait_until(lambda: [each.connected for each in after.stats().units] == [True], "the unit")
    assert after.stats().units[0].live_bytes == 0
    put(after, 7)
    check(after, 7)
    assert torch.equal(views["x"], rows(1)["x"])
    assert before.name == after.stats().units[0].name
    assert not unit.lost.is_set()


def test_a_unit_waits_no_longer_than_it_is_told(restartable: RestartableService) -> None:
    unit = restartable.unit(reconnect_s=0.2)
    restartable.stop()
    assert unit.lost.wait(WAIT_S)
    assert not restartable.units[0].lost.is_set()
