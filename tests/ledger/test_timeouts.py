"""Timeouts of parked calls: each call ends at its deadline, and a call without a timeout has none."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dataplane.core.durations import as_timeout
from dataplane.errors import ClaimTimeoutError, PartitionDroppedError
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from tests.ledger.driver import Driver
from tests.ledger.fingerprint import fingerprint

NONE = [None, math.inf, 1e18]
TIMEOUTS = st.one_of(st.sampled_from(NONE), st.floats(0.1, 1e6))


@given(
    st.lists(TIMEOUTS, min_size=1, max_size=8),
    st.lists(st.floats(0.1, 2e6), max_size=8),
    st.booleans(),
)
@example([None, 3.0, math.inf], [2.0, 4.0, 1e6], True)
@settings(deadline=None)
def test_a_call_ends_at_its_deadline_or_not_at_all(
    timeouts: list[float | None], times: list[float], restored: bool
) -> None:
    driver = Driver(session_timeout_s=1e12)  # sessions do not end by silence
    client = driver.client()
    client.register()
    commands = [client.claim(1, timeout_s=as_timeout("timeout_s", each)) for each in timeouts]
    call_ids = [client.waits(command) for command in commands]
    until = {wait.until for wait in client.call(c.WaitList, c.Waits()).waits}
    assert until == {math.inf if each in NONE else each for each in timeouts}
    if restored:
        driver.ledger = Ledger.restored(driver.ledger.image())
    for now in sorted(times):
        driver.tick(now)
        for call_id, timeout_s in zip(call_ids, timeouts, strict=True):
            late = timeout_s not in NONE and timeout_s <= now
            assert isinstance(client.result(call_id), ClaimTimeoutError) == late
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    for call_id in call_ids:
        assert isinstance(client.result(call_id), ClaimTimeoutError | PartitionDroppedError)


def test_the_timeout_of_another_language_may_be_infinite() -> None:
    driver = Driver(capacity=1024, reserve_fraction=0.0)
    client = driver.client(attach=[1])
    client.register()
    claims = [client.waits(client.claim(1, timeout_s=math.inf))]
    filled = client.raw(client.allocate({"x": [1024]}))
    assert isinstance(filled, c.Allocated)
    claims.append(client.waits(client.allocate({"x": [1024]}, timeout_s=math.inf)))
    for now in np.linspace(1.0, 19.0, 10):
        driver.tick(float(now))
        assert driver.ledger.next_deadline() is not None  # of the session
    assert [client.result(call_id) for call_id in claims] == [None, None]
    assert fingerprint(driver.replay()) == fingerprint(driver.ledger)
