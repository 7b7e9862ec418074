# ruff: noqa: F401
"""Large values of a broadcast reach many hosts by way of each other: here each worker has a loopback address of its
own, and is on another host to all others."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
import torch

from tests.restarts import wait_until
from tests.workers.messages.messengers import Here, address, elsewhere, one_connection, want_of
from workers.directory.address import WorkerAddress
from workers.errors import WorkerLostError
from workers.messages import Messenger, fetches, messenger, relays, snapshots
from workers.messages.io_thread import IoThread
from workers.messages.relays import Relays, Tree
from workers.messages.wire import Absent, Data, Relay, WantMessage
from workers.transport.links import Links

BIG = 50_000
"""Integers that take several chunks."""
CHUNK_BYTES = 64 << 10
CHUNKS = -(-8 * BIG // CHUNK_BYTES)
COUNT = 12
NAMES = [address(rank) for rank in range(COUNT)]


class Hosts(Here):
    """Workers of this process, as if there were `per_host` on each host."""

    def __init__(self, per_host: int = 1) -> None:
        super().__init__(False)
        self._per_host = per_host

    def worker(self, name: WorkerAddress, **options: Any) -> Messenger:
        host = name.rank_path[-1] // self._per_host
        return super().worker(name, **{"host": f"127.0.0.{1 + host}", **options})


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody turns to the source because the machine is slow; and little is much."""
    monkeypatch.setattr(fetches, "RELAY_S", 600.0)
    monkeypatch.setattr(relays, "RELAY_S", 600.0)
    monkeypatch.setattr(relays, "KEEP_S", 600.0)
    monkeypatch.setattr(fetches, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    workers = Hosts()
    yield workers
    workers.close()


class Served:
    """How many parts each worker sent, and what it has to hold back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_source = 0
        self.passed_on = 0
        real_serve, real_pass = IoThread._send_chunk, Relays._serve

        def serve(engine: IoThread, *args: Any) -> None:
            self.by_source += 1
            real_serve(engine, *args)

        def pass_on(kept: Relays, *args: Any) -> None:
            self.passed_on += 1
            real_pass(kept, *args)

        monkeypatch.setattr(IoThread, "_send_chunk", serve)
        monkeypatch.setattr(Relays, "_serve", pass_on)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


@pytest.mark.parametrize(
    ("hosts_of", "above"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [None, None, 0, 0, 1, 1, 2]),
        ([1, 1, 2, 2, 3, 1, 3], [None, 0, None, 2, 0, 0, 4]),
        ([0, 0, 1, 0], [None, None, None, None]),
    ],
)
def test_who_pulls_from_whom(hosts_of: list[int], above: list[int | None]) -> None:
    tree = Tree("h0")
    placed = [tree.place(f"w:{rank}", 1, f"h{host}:{rank + 1}") for rank, host in enumerate(hosts_of)]
    found = [None if relay is None else int(relay.worker.removeprefix("w:")) for relay, _ in placed]
    assert found == above
    firsts = [passes_on for _, passes_on in placed]
    assert firsts == [host > 0 and host not in hosts_of[:rank] for rank, host in enumerate(hosts_of)]


def test_the_way_is_short_and_nobody_serves_many() -> None:
    tree = Tree("here")
    placed = [tree.place(f"w:{rank}", 1, f"h{rank}:1")[0] for rank in range(1_500)]
    serves = Counter("the source" if relay is None else relay.worker for relay in placed)
    assert max(serves.values()) == relays.FAN_OUT
    assert max(relay.depth for relay in placed if relay is not None) <= math.log2(len(placed))


def _spread(hosts: Here, workers: list[Messenger], value: Any) -> list[Any]:
    """Everybody waits before the source sends."""
    names = [worker.address for worker in workers]
    works = [worker.broadcast(None, names, async_op=True) for worker in workers[1:]]
    workers[0].broadcast(value, names)
    return [work.wait() for work in works]


def _first_contact(hosts: Here, workers: list[Messenger]) -> None:
    """Afterwards each knows that the source lives: a receiver passes on nothing of one of which it does not."""
    assert _spread(hosts, workers, "first contact") == ["first contact"] * (len(workers) - 1)
    source = workers[0].address.get_name()
    for worker in workers[1:]:
        wait_until(lambda worker=worker: worker._io_thread.incoming._is_alive(source), "the directory has answered")


@pytest.mark.integration
def test_the_source_serves_few(hosts: Hosts, served: Served) -> None:
    workers = hosts.workers(COUNT)
    value = torch.arange(BIG)
    _first_contact(hosts, workers)
    for got in _spread(hosts, workers, {"a": value, "b": "text"}):
        assert torch.equal(got["a"], value)
        assert got["b"] == "text"
        got["a"].zero_()
    assert served.by_source == relays.FAN_OUT * CHUNKS
    assert served.passed_on == (COUNT - 1 - relays.FAN_OUT) * CHUNKS


@pytest.mark.integration
def test_what_is_pickled_goes_the_same_way(hosts: Hosts, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large it is, the source does not send it to each."""
    workers = hosts.workers(COUNT)
    _first_contact(hosts, workers)
    sent: list[int] = []
    real = Links.send

    def send(links: Links, peer: str, endpoint: str, frames: Any, *idle: Any) -> None:
        if msgspec.msgpack.decode(frames[0])["type"] == "PostMessage":
            sent.append(sum(map(len, frames)))
        real(links, peer, endpoint, frames, *idle)

    monkeypatch.setattr(Links, "send", send)
    text = "word " * 100_000
    assert _spread(hosts, workers, text) == [text] * (COUNT - 1)
    assert max(sent) < 1_000
    assert served.by_source == relays.FAN_OUT * -(-len(text) // CHUNK_BYTES)


@pytest.mark.integration
def test_one_of_each_host_pulls_from_another_host(served: Served) -> None:
    hosts = Hosts(per_host=4)
    workers = hosts.workers(COUNT)
    _first_contact(hosts, workers)
    for got in _spread(hosts, workers, torch.arange(BIG)):
        assert torch.equal(got, torch.arange(BIG))
    assert served.by_source == (3 + 2) * CHUNKS, "three of its own host, which share no memory here, and one of each"
    assert served.passed_on == 6 * CHUNKS
    hosts.close()


@pytest.mark.integration
def test_few_or_small_go_from_the_source(hosts: Hosts, served: Served) -> None:
    workers = hosts.workers(relays.RECEIVERS_FROM)
    _spread(hosts, workers, torch.arange(BIG))
    workers += [hosts.worker(address(relays.RECEIVERS_FROM))]
    _spread(hosts, workers, torch.arange(64))
    assert served.passed_on == 0


@pytest.mark.integration
def test_what_is_passed_on_counts_and_is_given_back(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "KEEP_S", 0.2)
    workers = hosts.workers(COUNT)
    _first_contact(hosts, workers)
    admitted = []
    real = relays.Relays.begin

    def begin(kept: Relays, *args: Any) -> bool:
        admitted.append(real(kept, *args))
        assert kept._backlog.waiting_bytes >= 8 * BIG
        return admitted[-1]

    monkeypatch.setattr(relays.Relays, "begin", begin)
    _spread(hosts, workers, torch.arange(BIG))
    assert admitted == [True] * (COUNT - 1)
    for worker in workers[1:]:
        wait_until(lambda worker=worker: worker._backlog.waiting_bytes == 0, "what was passed on is given back")


@pytest.mark.integration
def test_without_place_for_them_they_come_from_the_source(hosts: Hosts, served: Served) -> None:
    workers = [hosts.worker(NAMES[0]), *(hosts.worker(name, backlog_bytes=1 << 18) for name in NAMES[1:])]
    for got in _spread(hosts, workers, torch.arange(BIG)):
        assert torch.equal(got, torch.arange(BIG))
    assert served.passed_on == 0


@pytest.mark.integration
def test_messages_and_broadcasts_keep_their_order(hosts: Hosts) -> None:
    workers = hosts.workers(COUNT)
    first, *others = workers
    works: list[Any] = []
    for step in range(4):
        works += [first.send((step, "before"), other.address, async_op=True) for other in others]
        works.append(first.broadcast(torch.full((BIG,), step), NAMES, async_op=True))
        works.append(first.broadcast(step, NAMES, async_op=True))
        works += [first.send((step, "after"), other.address, async_op=True) for other in others]

    def receive(worker: Messenger) -> None:
        for step in range(4):
            assert worker.recv(NAMES[0]) == (step, "before")
            large = worker.broadcast(None, NAMES)
            assert large.shape == (BIG,)
            assert (large == step).all()
            assert worker.broadcast(None, NAMES) == step
            assert worker.recv(NAMES[0]) == (step, "after")

    for receiving in [hosts.start(receive, other) for other in others]:
        receiving.result(60)
    for work in works:
        work.wait()


# --- those that pass on fail ---------------------------------------------------------------------------------------


@pytest.mark.integration
def test_one_that_passes_nothing_on_is_gone_round(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetches, "RELAY_S", 0.05)
    workers = hosts.workers(COUNT)
    _first_contact(hosts, workers)
    asked = threading.Event()
    monkeypatch.setattr(workers[1]._io_thread.incoming, "handle_want", lambda *_: asked.set())
    for got in _spread(hosts, workers, torch.arange(BIG)):
        assert torch.equal(got, torch.arange(BIG))
    assert asked.wait(60)
    assert "Relay g:1 sent no bytes of a message of g:0; pulling from the source" in caplog.text


def _receive_until_killed(messenger: Messenger, pipe: Any) -> None:
    """The second broadcast is one too many: who passes it on to others dies as soon as it is asked for parts."""
    messenger.broadcast(None, NAMES)
    waiting = messenger.broadcast(None, NAMES, async_op=True)
    messenger._io_thread.incoming.handle_want = lambda *_: pipe.send("asked")  # type: ignore[method-assign]
    pipe.send("ready")
    pipe.poll(120)
    waiting.wait()


@pytest.mark.slow
@pytest.mark.integration
def test_one_that_passes_on_and_dies_takes_nobody_along(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "RELAY_S", 0.2)
    others = [hosts.worker(name) for name in NAMES[2:]]
    source = hosts.worker(NAMES[0])
    with elsewhere(hosts.directory, NAMES[1], _receive_until_killed, host="127.0.0.2") as inner:
        first = [worker.broadcast(None, NAMES, async_op=True) for worker in others]
        source.broadcast("first contact", NAMES)
        assert [work.wait() for work in first] == ["first contact"] * len(others)
        assert inner.hear() == "ready"
        waiting = [worker.broadcast(None, NAMES, async_op=True) for worker in others]
        sending = source.broadcast(torch.arange(BIG), NAMES, async_op=True)
        assert inner.hear() == "asked"
        inner.kill()
        for work in waiting:
            assert torch.equal(work.wait(), torch.arange(BIG))
        with contextlib.suppress(WorkerLostError):
            # It knew of the message before it died: the source hears of its death here, or in the next one.
            sending.wait()
        with pytest.raises(WorkerLostError, match="g:1 is gone"):
            source.send("to the dead", NAMES[1])


@pytest.mark.integration
def test_the_first_ask_begins_to_pull(hosts: Hosts, served: Served) -> None:
    """One that passes on need not receive itself before others can."""
    workers = hosts.workers(COUNT)
    _first_contact(hosts, workers)
    workers[0].broadcast(torch.arange(BIG), NAMES)
    works = [worker.broadcast(None, NAMES, async_op=True) for worker in workers[3:]]
    for work in works:
        assert torch.equal(work.wait(), torch.arange(BIG))
    assert served.by_source == relays.FAN_OUT * CHUNKS
    for late in workers[1:3]:
        assert torch.equal(late.broadcast(None, NAMES), torch.arange(BIG))
    assert served.by_source == relays.FAN_OUT * CHUNKS


@pytest.mark.integration
def test_the_source_s_death_is_everybody_s_error(hosts: Hosts) -> None:
    others = [hosts.worker(name) for name in NAMES[1:]]
    with elsewhere(hosts.directory, NAMES[0], _send_and_hold_back, host="127.0.0.1") as source:
        first = [worker.broadcast(None, NAMES, async_op=True) for worker in others]
        for work in first:
            assert work.wait() == "first contact"
        waiting = [worker.broadcast(None, NAMES, async_op=True) for worker in others]
        assert source.hear() == "asked"
        source.kill()
        for work in waiting:
            with pytest.raises(WorkerLostError, match="g:0 is gone"):
                work.wait()
    for worker in others:
        wait_until(lambda worker=worker: worker._backlog.waiting_bytes == 0, "nothing is kept of it")
        assert not worker._io_thread.incoming._fetches


def _send_and_hold_back(messenger: Messenger, pipe: Any) -> None:
    asked = threading.Event()
    messenger.broadcast("first contact", NAMES)
    messenger._io_thread._send_chunk = lambda *_: asked.set()  # type: ignore[method-assign]
    messenger.broadcast(torch.arange(BIG), NAMES, async_op=True)
    asked.wait(60)
    pipe.send("asked")
    pipe.poll(120)


@pytest.mark.integration
def test_one_whose_port_is_another_s_by_now_is_not_asked(one_connection: Here) -> None:
    """And what is under way to the other goes on."""
    a, b = one_connection.worker(NAMES[0]), one_connection.worker(NAMES[1], shared_memory=False)
    sending = a.send(torch.arange(BIG), NAMES[1], async_op=True)
    assert sending is not None
    wait_until(lambda: b._io_thread.incoming._arrivals, "the message has come")
    want = want_of("g:5")
    asked: Future[bool] = Future()
    relay = Relay("g:9", 1, a._io_thread._peer("g:1").endpoint, 1)
    a._io_thread.call(lambda: asked.set_result(a._io_thread._ask_relay(relay, want)))
    assert not asked.result(60)
    assert torch.equal(b.recv(NAMES[0]), torch.arange(BIG))
    sending.wait()


# --- parts that nobody asked for -------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("wrong", [{"serial": -1}, {"start": 3}, {"nbytes": 7}, {"incarnation": 0}])
def test_what_is_not_passed_on_is_refused(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, int]) -> None:
    workers = hosts.workers(COUNT)
    _first_contact(hosts, workers)
    _spread(hosts, workers, torch.arange(BIG))
    (key,) = workers[1]._io_thread.incoming._relays._forwarded
    answered: list[Any] = []
    done = threading.Event()
    want = want_of(key[0], incarnation=key[1], serial=key[2], nbytes=CHUNK_BYTES)
    kept = workers[1]._io_thread.incoming._relays
    monkeypatch.setattr(kept, "_reply", lambda route, answer, body: answered.append(answer))

    def ask() -> None:
        for each in (want, msgspec.structs.replace(want, **wrong)):
            workers[1]._io_thread.incoming.handle_want(b"route", each)
        done.set()

    workers[1]._io_thread.call(ask)
    assert done.wait(60)
    assert [type(answer) for answer in answered] == [Data, Absent]


@pytest.mark.integration
@pytest.mark.parametrize("comes", [True, False])
def test_what_is_asked_for_early_waits_for_its_message(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    monkeypatch.setattr(relays, "RELAY_S", 600.0 if comes else 0.1)
    workers = hosts.workers(COUNT)
    _first_contact(hosts, workers)
    engine = workers[1]._io_thread
    answered: list[Any] = []
    monkeypatch.setattr(engine.incoming._relays, "_reply", lambda route, answer, body: answered.append(answer))
    source = workers[0]._io_thread.incarnation
    serial = next(snapshots._serials) + 1 if comes else 10**9
    stream = messenger.stream_of(NAMES)
    want = want_of(
        "g:0", incarnation=source, serial=serial, stream=stream, receiver=engine.incarnation, nbytes=CHUNK_BYTES
    )
    done = threading.Event()

    def ask() -> None:
        engine.incoming.handle_want(b"route", want)
        done.set()

    engine.call(ask)
    assert done.wait(60)
    if comes:
        workers[0].broadcast(torch.arange(BIG), NAMES, async_op=True)
        assert torch.equal(workers[1].broadcast(None, NAMES), torch.arange(BIG))
        wait_until(lambda: any(type(answer) is Data for answer in answered), "it is answered")
    else:
        wait_until(lambda: bool(answered), "it is refused")
        assert [type(answer) for answer in answered] == [Absent]
