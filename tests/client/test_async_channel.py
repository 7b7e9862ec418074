"""The async channel: what differs from the sync one, cancelling above all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest
import zmq

from dataplane.client.rpc import call_socket, pending_calls
from dataplane.client.rpc.async_channel import AsyncChannel
from dataplane.client.rpc.call_socket import WaitingCall
from dataplane.config import DataPlaneConfig
from dataplane.controller.controller import Controller
from dataplane.core import failpoints
from dataplane.errors import CallTimeoutError, ClientClosedError, PartitionNotFoundError, ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.protocol import zmq_frames
from tests.controller.service import QUICK, STILL, ScriptedLedger, ledger, scripted, unhurried  # noqa: F401
from tests.open_files import exhausted

pytestmark = pytest.mark.integration

CLAIM = c.Claim(partition="p", task="t", fields=(), batch_size=1, timeout_s=60.0)

Script = Callable[[AsyncChannel], Coroutine[Any, Any, None]]


@pytest.fixture
def real() -> Iterator[Controller]:
    with Controller(QUICK, epoch=1) as controller:
        yield controller


async def opened(config: DataPlaneConfig) -> AsyncChannel:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, AsyncChannel.open, config, loop)


def run(controller: Controller, script: Script, config: DataPlaneConfig = QUICK) -> None:
    """Run `script` with a channel, in a loop of its own."""

    async def main() -> None:
        channel = await opened(replace(config, address=controller.address))
        try:
            await script(channel)
        finally:
            await channel.close()
            await channel.close()

    asyncio.run(main(), debug=True)


async def seen(ledger: ScriptedLedger, kind: type[Any], count: int = 1) -> list[Any]:
    return await asyncio.get_running_loop().run_in_executor(None, ledger.wait_for, kind, count)


def test_many_calls_at_once(real: Controller) -> None:
    async def script(channel: AsyncChannel) -> None:
        await channel.call(c.Register(partition="p", fields={}, num_samples=None, tasks=("t",)))
        outcomes = await asyncio.gather(*[channel.call(c.Describe(partition="p")) for _ in range(100)])
        assert len({call_id for call_id, _ in outcomes}) == 100
        with pytest.raises(PartitionNotFoundError):
            await channel.call(c.Describe(partition="other"))
        assert (channel.session, channel.address, channel.units) == (1, real.address, ())

    run(real, script)


def test_cancelling_a_call_undoes_it(scripted: Controller, ledger: ScriptedLedger, unhurried: None) -> None:
    async def script(channel: AsyncChannel) -> None:
        ledger.answer = lambda call: None if isinstance(call.command, c.Claim) else c.Done()
        waiting = asyncio.create_task(channel.call(CLAIM))
        await seen(ledger, c.Claim)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        (undo,) = await seen(ledger, c.Unclaim)
        assert (undo.command.claimed, undo.watermark) == (1, 1)

    run(scripted, script, STILL)


def test_a_lost_answer_is_asked_for_again(
    scripted: Controller, ledger: ScriptedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_calls, "RESEND_S", 0.1)

    async def script(channel: AsyncChannel) -> None:
        ledger.answer = lambda call: (
            c.Done() if isinstance(call.command, c.Bye) or len(ledger.of(type(call.command))) >= 2 else None
        )
        call_id, _ = await channel.call(c.Seal(partition="p"))
        assert {call.call_id for call in ledger.of(c.Seal)} == {call_id}
        channel.post(c.Release(located=1))
        assert len({call.call_id for call in await seen(ledger, c.Release, 2)}) == 1

    run(scripted, script)


def test_a_callback_that_an_interrupt_lost_delays_a_call_only(
    scripted: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_calls, "RESEND_S", 0.1)

    async def script(channel: AsyncChannel) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(channel, "_use_socket", lambda: None)
            channel._send_once(channel._calls.begin_post(c.Release(located=1)))
        await channel.call(c.Seal(partition="p"))

    run(scripted, script)


def test_no_answer_in_time(scripted: Controller, ledger: ScriptedLedger) -> None:
    async def script(channel: AsyncChannel) -> None:
        ledger.answer = lambda call: None if isinstance(call.command, c.Locate) else c.Done()
        with pytest.raises(CallTimeoutError, match="Locate: no response"):
            await channel.call(c.Locate(partition="p", samples=c.Samples(ids=("a",)), fields=("f",)), timeout_s=0.05)
        await seen(ledger, c.Release)

    run(scripted, script)


def test_closing_wakes_waiting_calls(scripted: Controller, ledger: ScriptedLedger, unhurried: None) -> None:
    async def script(channel: AsyncChannel) -> None:
        ledger.answer = lambda call: None if isinstance(call.command, c.Claim) else c.Done()
        waiting = [asyncio.create_task(channel.call(CLAIM)) for _ in range(2)]
        await seen(ledger, c.Claim, 2)
        await channel.close()
        for task in waiting:
            with pytest.raises(ClientClosedError):
                await task
        with pytest.raises(ClientClosedError):
            channel.post(c.Release(located=1))

    run(scripted, script, STILL)
    assert len(ledger.of(c.Bye)) == 1


class Running(WaitingCall):
    """A call that does not end."""

    ended = True

    def __init__(self) -> None:
        self.active = threading.Lock()

    def end(self, outcome: object) -> None:
        """Do nothing."""


def test_a_cancelled_close_continues(scripted: Controller, ledger: ScriptedLedger, unhurried: None) -> None:
    async def script(channel: AsyncChannel) -> None:
        channel._waiting[9] = running = Running()
        with running.active:  # as if a call was still cleaning up
            closing = asyncio.create_task(channel.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert not ledger.of(c.Bye)
        await channel.close()
        assert channel._context.closed

    run(scripted, script, STILL)
    assert len(ledger.of(c.Bye)) == 1


def test_a_close_that_failed_can_be_repeated(scripted: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(channel: AsyncChannel) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(channel._heartbeat, "close", failing)
            with pytest.raises(ZeroDivisionError):
                await channel.close()
        await channel.close()
        assert channel._context.closed

    run(scripted, script)


def failing(*arguments: Any) -> None:
    raise ZeroDivisionError


def test_failpoints_stand_around_every_command(scripted: Controller) -> None:
    reached: list[str] = []
    names = ["call.Seal.before", "call.Seal.after", "call.Release.before", "call.Release.after"]
    for name in names:
        failpoints.arm(name, lambda name=name: reached.append(name))  # type: ignore[misc]

    async def script(channel: AsyncChannel) -> None:
        await channel.call(c.Seal(partition="p"))
        channel.post(c.Release(located=1))

    run(scripted, script)
    assert reached == names


def test_a_dead_address_is_an_error_at_once() -> None:
    async def main() -> None:
        with pytest.raises(ServiceUnavailableError, match="no data plane service at 127"):
            await opened(replace(QUICK, address="127.0.0.1:1"))

    asyncio.run(main())


def test_a_service_that_goes_away_is_noticed(ledger: ScriptedLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "RESEND_S", 0.1)
    controller = Controller(QUICK, ledger=ledger, epoch=1).start()

    async def script(channel: AsyncChannel) -> None:
        await asyncio.get_running_loop().run_in_executor(None, controller.stop)
        with pytest.raises(ServiceUnavailableError, match=controller.address):
            await channel.call(c.Units())

    run(controller, script)


def test_too_few_open_files_are_a_named_error_and_lose_no_post(
    scripted: Controller, ledger: ScriptedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(channel: AsyncChannel) -> None:
        with exhausted(monkeypatch, call_socket, "dealer_socket", zmq.ZMQError):
            with pytest.raises(ServiceUnavailableError, match="cannot open more files"):
                await channel.call(c.Seal(partition="p"))
            channel.post(c.Release(located=1))
            assert not ledger.of(c.Release)
        await channel.call(c.Seal(partition="p"))
        channel._reconnect()
        await seen(ledger, c.Release)

    run(scripted, script)


def test_too_few_open_files_when_the_session_moved(
    scripted: Controller, ledger: ScriptedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits is told; the next call finds the session where it is now."""

    async def script(channel: AsyncChannel) -> None:
        ledger.answer = lambda call: None if isinstance(call.command, c.Claim) else c.Done()
        waiting = asyncio.create_task(channel.call(CLAIM))
        await seen(ledger, c.Claim)
        with exhausted(monkeypatch, call_socket, "dealer_socket", zmq.ZMQError):
            channel._reconnect()
            with pytest.raises(ServiceUnavailableError, match="cannot open more files"):
                await waiting
        await channel.call(c.Seal(partition="p"))
        channel._reconnect()
        await seen(ledger, c.Unclaim)

    run(scripted, script)


def test_too_few_open_files_to_say_goodbye(
    scripted: Controller, ledger: ScriptedLedger, monkeypatch: pytest.MonkeyPatch, unhurried: None
) -> None:
    async def script(channel: AsyncChannel) -> None:
        with exhausted(monkeypatch, call_socket, "dealer_socket", zmq.ZMQError):
            await channel.close()

    run(scripted, script, STILL)
    assert [silent.session for silent in ledger.wait_for(c.SessionSilent)] == [1]


def test_calls_of_one_turn_share_a_message(real: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[int] = []
    send = call_socket.send

    def counted(dealer: Any, frames: list[bytes]) -> None:
        messages.append(len(zmq_frames.split_requests(frames)))
        send(dealer, frames)

    async def script(channel: AsyncChannel) -> None:
        await channel.call(c.Register(partition="p", fields={}, num_samples=None, tasks=("t",)))
        monkeypatch.setattr(call_socket, "send", counted)
        await channel.call(c.Describe(partition="p"))
        assert messages == [1]
        wanted = [*["p"] * 40, "other", *["p"] * 4]
        outcomes = await asyncio.gather(
            *[channel.call(c.Describe(partition=name)) for name in wanted], return_exceptions=True
        )
        assert messages == [1, 32, 13]
        assert [isinstance(each, PartitionNotFoundError) for each in outcomes] == [name == "other" for name in wanted]

    run(real, script)


def test_what_was_sent_before_the_loop_stops_arrives(scripted: Controller, ledger: ScriptedLedger) -> None:
    """The program drives its loop only now and then."""
    loop = asyncio.new_event_loop()
    try:
        channel = loop.run_until_complete(opened(replace(STILL, address=scripted.address)))

        async def post() -> None:
            channel.post(c.Release(located=1))

        loop.run_until_complete(post())
        assert ledger.wait_for(c.Release, 1)
        loop.run_until_complete(channel.close())
    finally:
        loop.close()
