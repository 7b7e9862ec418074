# ruff: noqa: F401
"""Waiting for messages: from threads, from async code, never without a bound."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

from tests.late import Late
from tests.logs import logged
from tests.processor import costs_little
from tests.restarts import wait_until
from tests.workers.messages.messengers import Here, address, here, one_connection
from workers.errors import MessageBacklogError, MessageTimeoutError, MessengerClosedError, NameNotFoundError
from workers.messages import async_work
from workers.transport import waiting as waiting_module

pytestmark = pytest.mark.integration

A, B, C = address(0), address(1), address(2)
BIG = 3 << 20
"""float32 values that take several chunks."""


def test_waits_from_async_code(here: Here) -> None:
    a, b = here.workers(2)

    async def talk() -> tuple[Any, Any]:
        receiving = b.recv(A, async_op=True)
        ticks = 0
        waiting = asyncio.ensure_future(receiving.async_wait())
        while ticks < 3:
            await asyncio.sleep(0)
            ticks += 1
        assert not waiting.done()
        sending = a.send(torch.ones(BIG), B, async_op=True)
        assert sending is not None
        return await asyncio.gather(sending.async_wait(), waiting)

    nothing, values = asyncio.run(talk())
    assert nothing is None
    assert values.sum() == BIG


def test_a_cancelled_wait_leaves_the_operation(one_connection: Here) -> None:
    a, b = one_connection.workers(2)

    async def give_up(receiving: Any) -> None:
        with pytest.raises(MessageTimeoutError):
            await receiving.async_wait(timeout=0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receiving.async_wait(), 0.01)

    receiving = b.recv(A, async_op=True)
    asyncio.run(give_up(receiving))
    with pytest.raises(MessageTimeoutError, match="g:1: recv from g:0: not done within"):
        receiving.wait(timeout=0.01)
    a.send(5, B)
    assert receiving.wait() == 5
    assert receiving.wait() == 5


def test_what_follows(one_connection: Here) -> None:
    a, b = one_connection.workers(2)
    receiving = b.recv(A, async_op=True)
    next_receiving = receiving.then(b.recv, A, async_op=True)
    doubled = next_receiving.then(lambda factor: factor * 2, 21)
    wrong = receiving.then(lambda: 1 // 0)
    a.send("first", B)
    a.send("second", B)
    assert next_receiving.wait() == "second"
    assert doubled.wait() == 42
    with pytest.raises(ZeroDivisionError):
        wrong.wait()
    with pytest.raises(ZeroDivisionError):
        wrong.then(lambda: 1).wait()
    waits = receiving.then(b.recv, A)
    a.send("third", B)
    assert waits.wait() == "third"


def test_no_operation_waits_without_a_bound(here: Here) -> None:
    a, b = here.workers(2)
    with pytest.raises(MessageTimeoutError, match=r"g:1: recv from g:0: not done within \d"):
        b.recv(A, timeout_s=0.1)
    with pytest.raises(MessageTimeoutError, match="g:1: recv_tensor from g:0"):
        b.recv_tensor(torch.ones(1), A, timeout_s=0.1)
    with pytest.raises(
        MessageTimeoutError, match=r"g:0: send to g:7 \(no such worker is registered; check that its group"
    ):
        a.send(1, address(7), timeout_s=0.1)
    with pytest.raises(MessageTimeoutError, match="g:0: broadcast"):
        a.broadcast(1, [A, address(7)], timeout_s=0.1)
    a.send("for the next receive", B)
    assert b.recv(A) == "for the next receive"


def test_the_default_bound(one_connection: Here) -> None:
    a = one_connection.worker(A, timeout_s=0.1)
    with pytest.raises((MessageTimeoutError, NameNotFoundError)):
        a.recv(B)


def test_a_long_wait_is_logged(one_connection: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "LOG_EVERY_S", 0.02)
    (a,) = one_connection.workers(1)
    with logged("g:0: recv from g:1: waiting for"):
        waits = [one_connection.start(a.recv, B)]
    with logged("g:0: recv from g:2: waiting for"):
        waits.append(one_connection.start(lambda: asyncio.run(a.recv(C, async_op=True).async_wait())))
    a.close()
    for each in waits:
        with pytest.raises(MessengerClosedError):
            each.result(60)


def test_what_is_done_as_a_wait_runs_out_is_not_lost() -> None:
    assert async_work.AsyncWork(Late("done"), "recv").wait(0.01) == "done"


def test_waiting_costs_no_processor_time(one_connection: Here) -> None:
    a, _ = one_connection.workers(2)

    def wait() -> None:
        with pytest.raises(MessageTimeoutError):
            a.recv(B, timeout_s=1.0)

    assert costs_little(wait)


def test_what_nobody_receives_is_bounded(here: Here) -> None:
    a = here.worker(A, backlog_bytes=1 << 20)
    b = here.worker(B)
    sending = [a.send(torch.zeros(100_000), B, async_op=True) for _ in range(2)]
    with pytest.raises(MessageBacklogError, match="limit of 1,048,576 bytes"):
        a.send(torch.zeros(100_000), B)
    assert b.recv(A).numel() == b.recv(A).numel() == 100_000
    for each in sending:
        assert each is not None
        each.wait()
    b.send("caught up", A)
    assert a.recv(B) == "caught up"
    # That both were received comes by another connection than what B sends.
    wait_until(lambda: a._backlog.waiting_bytes == 0, "nothing is kept for B")
    a.send(torch.ones(100_000), B)
    assert b.recv(A).sum() == 100_000
