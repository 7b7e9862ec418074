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
from dataplane.errors import ClaimTimeoutError
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
    wait_until(lambda: calls_of(client)._numbering.unanswered >= 4, "calls under way")
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


def test_a_unit_that_was_cut_off_keeps_its_number_and_its_rows(
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
