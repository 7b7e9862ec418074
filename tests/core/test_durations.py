"""Waits, leases and intervals: what is none is refused by name where it enters, on every call that takes one."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import typer

from dataplane import DataPlaneClient, DataPlaneConfig, KVBatchMeta, StreamingDataLoader
from dataplane.cli.output import duration, time_limit
from dataplane.cli.top import _interval
from dataplane.client.operations import claim, drain_unit
from dataplane.compat.nemo_rl.client import as_timeout as of_nemo_rl
from dataplane.core.durations import (
    LONGEST_S,
    as_timeout,
    seconds,
    seconds_if_any,
)
from dataplane.errors import InvalidRequestError
from dataplane.training.replay_buffer import ReplayBuffer
from dataplane.training.staleness import Windowed
from workers.messages.async_work import AsyncWork
from workers.training.replica_group import Deadline

NO_TIMES = [math.inf, -math.inf, math.nan, -1.0, 10**400, -(10**400)]
NO_TIMEOUTS = [-math.inf, math.nan, -1.0, -(10**400)]
UNLIMITED = [None, math.inf, 10**400, 1e18]
NO_NUMBERS = [True, "5", [5], 1j, np.bool_(True)]
STATE: Any = None
CLIENT = DataPlaneClient(DataPlaneConfig(address="127.0.0.1:1"))
BUFFER = ReplayBuffer(CLIENT, "p", Windowed(batch_size=4, window=1))
CLAIMED = KVBatchMeta("p", "train", ["a"])


def stream(**options: Any) -> StreamingDataLoader:
    return StreamingDataLoader(CLIENT, "p", "train", ["x"], batch_size=2, **options)


DURATIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "claim, partial": ("partial_after_s", lambda value: CLIENT.claim_meta("p", "t", [], 1, partial_after_s=value)),
    "claim, lease": ("lease_s", lambda value: CLIENT.claim_meta("p", "train", ["x"], 1, lease_s=value)),
    "extend": ("lease_s", lambda value: next(claim.extend(STATE, CLAIMED, value))),
    "stream, lease": ("lease_s", lambda value: stream(lease_s=value)),
    "stream, partial": ("partial_after_s", lambda value: stream(partial_after_s=value)),
}
WAITS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "claim": ("timeout_s", lambda value: CLIENT.claim_meta("p", "train", [], 1, timeout_s=value)),
    "drain": ("timeout_s", lambda value: next(drain_unit.drain(STATE, 1, value))),
    "stream": ("timeout_s", lambda value: stream(timeout_s=value)),
    "reserve": ("timeout_s", lambda value: BUFFER.reserve(4, value)),
    "take": ("timeout_s", lambda value: BUFFER.take(value)),
    "work": ("timeout", lambda value: AsyncWork(Future(), "a message").wait(value)),
    "fetch": ("timeout_s", Deadline),
}


@pytest.mark.parametrize("call", DURATIONS)
@pytest.mark.parametrize("value", NO_TIMES, ids=lambda value: repr(value)[:6])
def test_a_duration_without_an_end_is_refused_by_name(call: str, value: float) -> None:
    name, wait = DURATIONS[call]
    with pytest.raises(InvalidRequestError, match=rf"^{name}=.*: expected seconds, .* and finite$"):
        wait(value)


@pytest.mark.parametrize("call", WAITS)
@pytest.mark.parametrize("value", NO_TIMEOUTS, ids=lambda value: repr(value)[:6])
def test_a_negative_timeout_is_refused_by_name(call: str, value: float) -> None:
    name, wait = WAITS[call]
    expected = "expected seconds, 0 or more, or None or infinity for no timeout"
    with pytest.raises(InvalidRequestError, match=rf"^{name}=.*: {expected}$"):
        wait(value)


@pytest.mark.parametrize("value", UNLIMITED, ids=lambda value: repr(value)[:6])
def test_no_timeout_is_a_very_long_one(value: float | None) -> None:
    assert as_timeout("timeout_s", value) == LONGEST_S
    command = claim.claim_command("p", "train", ["x"], 1, timeout_s=value)
    assert command.timeout_s == LONGEST_S
    next(drain_unit.drain(STATE, 1, value))
    stream(timeout_s=value, prefetch=0).close()
    assert Deadline(value).left_s > LONGEST_S / 2
    done: Future[int] = Future()
    done.set_result(3)
    assert AsyncWork(done, "a message").wait(value) == 3


def test_a_timeout_is_a_time() -> None:
    values = (0, 2, 0.5, Fraction(1, 4))
    assert [as_timeout("t", value) for value in values] == [0.0, 2.0, 0.5, 0.25]
    assert of_nemo_rl is as_timeout


@pytest.mark.parametrize("call", [*WAITS, *DURATIONS])
@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_number_is_refused_by_name(call: str, value: object) -> None:
    name, wait = (WAITS | DURATIONS)[call]
    with pytest.raises(TypeError, match=rf"^{name}=.*: expected seconds as a number, got "):
        wait(value)


@pytest.mark.parametrize("call", ["claim, lease", "extend", "stream, lease"])
def test_a_lease_takes_some_time(call: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"lease_s=0\.0: expected seconds, more than 0 and finite"):
        DURATIONS[call][1](0)


def test_numbers_are_seconds_and_what_is_too_long_is_very_long() -> None:
    assert [seconds("t", value) for value in (0, 2, 0.5, np.float32(0.5), np.int64(3), Fraction(1, 4))] == [
        *(0.0, 2.0, 0.5, 0.5, 3.0, 0.25)
    ]
    assert seconds("t", 1e18) == seconds("t", 1e308) == LONGEST_S
    assert seconds_if_any("t", None) is None
    assert seconds_if_any("t", 1) == 1.0


@pytest.mark.parametrize("value", NO_TIMES, ids=lambda value: repr(value)[:6])
@pytest.mark.parametrize(
    "name",
    ["reconnect_s", "heartbeat_s", "call_timeout_s", "connect_timeout_s"],
)
def test_settings_are_times(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}="):
        DataPlaneConfig(**{name: value})
    with pytest.raises(TypeError, match=f"^{name}=True: expected"):
        DataPlaneConfig(**{name: True})


@pytest.mark.parametrize("value", [*NO_TIMEOUTS, 0, 0.0], ids=lambda value: repr(value)[:6])
def test_the_time_of_puts_is_one_or_none(value: float) -> None:
    with pytest.raises(ValueError, match=r"^put_timeout_s=.*: must be positive, infinity for no "):
        DataPlaneConfig(put_timeout_s=value)
    with pytest.raises(TypeError, match=r"^put_timeout_s=True: expected"):
        DataPlaneConfig(put_timeout_s=True)
    assert DataPlaneConfig(put_timeout_s=math.inf).put_timeout_s == math.inf


def test_a_time_limit_may_be_none() -> None:
    limits = [time_limit(text) for text in ("inf", "1e400", "0.5", "0")]
    assert limits == [LONGEST_S, LONGEST_S, 0.5, 0.0]
    for text in ("-inf", "nan", "-1", "soon", ""):
        with pytest.raises(typer.BadParameter, match=r'is not a time limit; .* "inf" for no limit'):
            time_limit(text)


@pytest.mark.parametrize("parser", [duration, _interval])
@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e400", "-1", "soon", ""])
def test_flags_are_times(parser: Callable[[str], float], text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a duration; write a number of seconds"):
        parser(text)
    assert parser("0.5") == 0.5
