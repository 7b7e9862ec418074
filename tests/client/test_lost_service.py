"""Clients and storage units whose controller does not restart, or restarts without its state."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from dataplane.errors import ClientClosedError, ServiceRestartedError, ServiceUnavailableError
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
from tests.restarts import WAIT_S, RestartableService, wait_until

pytestmark = pytest.mark.slow

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
    wait_until(lambda: calls_of(client)._numbering.unanswered, "a call under way")
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
