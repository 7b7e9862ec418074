""""""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
import zmq
from torch.utils._python_dispatch import TorchDispatchMode

from dataplane import DataPlaneClient, KVBatchMeta, connect, serve
from dataplane.client.rpc.channel import ControllerChannel
from dataplane.config import MIB
from dataplane.core import failpoints, row_copy
from dataplane.data.columns import parallel_copy
from dataplane.errors import (
    CallTimeoutError,
    ClientClosedError,
    ServiceUnavailableError,
    SessionExpiredError,
    StorageUnitError,
)
from dataplane.ledger.commands import Abort, FenceSession, SessionAlive, SessionAttached, SessionGone
from dataplane.storage import client as client_module
from dataplane.storage.client import UnitConnection
from dataplane.storage.server import BulkServer
from dataplane.storage.session_lock import SessionLock
from dataplane.storage.transport.request_chunks import CHUNK_BYTES, READ_BYTES
from tests.alone import alone
from tests.children import Child
from tests.data.columns_helpers import nested_of
from tests.open_files import exhausted
from tests.restarts import NO_HEARTBEATS, wait_until
from tests.storage.unit_under_test import TOKEN, UNIT, WAIT_S, Process, Unit, changed, interrupt_when, noise

pytestmark = pytest.mark.integration


@pytest.fixture
def unit():
    with Unit() as made:
        yield made


@pytest.fixture(params=["ipc", "tcp"])
def connection_kind(request):
    return request.param


@pytest.fixture
def connection(unit, connection_kind):
    with unit.connect(connection_kind) as made:
        yield made


@pytest.fixture
def lock():
    with SessionLock.create() as made:
        yield made


# --- bytes ----------------------------------------------------------------------------------------------------


def test_many_chunks_there_and_back(unit, connection):
    data = noise(11 * MIB + 13)
    connection.write([64], [data], reservation=1, timeout_s=WAIT_S)
    assert unit.arena.data[64 : 64 + len(data)].tobytes() == data.tobytes()
    whole = connection.read([64], [len(data)], timeout_s=WAIT_S)
    assert len(data) > READ_BYTES > CHUNK_BYTES
    assert whole.range(0, len(data)).tobytes() == data.tobytes()
    sizes = np.full(len(data) // 999, 999)
    offsets = 64 + 999 * np.arange(len(sizes))
    rows = connection.read(offsets, sizes, timeout_s=WAIT_S)
    got = np.concatenate([rows.range(k, 999) for k in range(len(sizes))])
    assert got.tobytes() == data[: 999 * len(sizes)].tobytes()


def test_too_few_open_files_are_a_named_error(unit, connection, monkeypatch):
    data = noise(100)
    with exhausted(monkeypatch, client_module, "Wire", zmq.ZMQError), monkeypatch.context() as patch:
        patch.setattr(connection, "_idle", [])
        with pytest.raises(ServiceUnavailableError, match="cannot open more files"):
            connection.write([64], [data], reservation=1, timeout_s=WAIT_S)
    connection.write([64], [data], reservation=1, timeout_s=WAIT_S)
    assert connection.read([64], [100], timeout_s=WAIT_S).range(0, 100).tobytes() == data.tobytes()


def test_scattered_rows_of_every_size(unit, connection):
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 200_000, 60)
    offsets = np.concatenate([[0], np.cumsum(sizes + rng.integers(0, 500, 60))[:-1]])
    rows = [noise(size, seed=int(size)) for size in sizes]
    order = rng.permutation(60)
    pieces = [[rows[k][: sizes[k] // 2], rows[k][sizes[k] // 2 :]] if k % 2 else rows[k] for k in order]
    connection.write(offsets[order].tolist(), pieces, reservation=1, timeout_s=WAIT_S)
    wanted = np.concatenate([order, order[:20]])
    got = connection.read(offsets[wanted], sizes[wanted], timeout_s=WAIT_S)
    for number, k in enumerate(wanted):
        assert got.range(number, sizes[k]).tobytes() == rows[k].tobytes()


def test_each_column_begins_aligned_in_a_buffer_of_its_own(connection):
    offsets, sizes = [8 * MIB + 64, 200, 300, 9 * MIB, 16], [READ_BYTES, 48, 3, 800, 0]
    got = connection.read(offsets, sizes, columns=[1, 2, 1, 1], timeout_s=WAIT_S)
    assert not got.shared
    assert [len(buffer) for buffer in got.buffers] == [READ_BYTES, 51, 800, 0]
    assert all(buffer.ctypes.data % 16 == 0 and buffer.flags.writeable for buffer in got.buffers)
    assert [(got.which[number], got.offsets[number]) for number in range(4)] == [(0, 0), (1, 0), (1, 48), (2, 0)]


def test_a_read_of_one_request_is_used_from_its_frame(unit, connection):
    unit.arena.data[: 8 * MIB] = noise(8 * MIB)
    offsets, sizes = [64, 200, 300, 3 * MIB, 16], [400_000, 48, 3, MIB, 0]
    got = connection.read(offsets, sizes, columns=[1, 2, 1, 1], timeout_s=WAIT_S)
    assert got.shared
    assert len({buffer.base is not None and id(buffer.base) for buffer in got.buffers}) == 1
    for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        assert got.range(number, size).tobytes() == unit.arena.data[offset : offset + size].tobytes()


def test_nothing_to_move_asks_nobody(unit, connection):
    connection.write([], [], reservation=1, timeout_s=WAIT_S)
    connection.write([5], [b""], reservation=1, timeout_s=WAIT_S)
    got = connection.read([7], [0], timeout_s=WAIT_S)
    assert got.range(0, 0).tobytes() == b""


def test_threads_share_a_connection(unit, connection):
    wrong = []

    def work(number):
        data = noise(MIB, seed=number)
        for _ in range(5):
            connection.write([number * MIB], [data], reservation=1, timeout_s=WAIT_S)
            got = connection.read([number * MIB], [MIB], timeout_s=WAIT_S)
            if got.range(0, MIB).tobytes() != data.tobytes():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- fencing, death and silence -------------------------------------------------------------------------------


def test_a_fenced_writer_is_refused(unit, connection):
    connection.write([0], [b"abc"], reservation=1, timeout_s=WAIT_S)
    unit.server.order(FenceSession(unit=UNIT, session=1))
    unit.expect(SessionGone)
    with pytest.raises(SessionExpiredError):
        connection.write([0], [noise(9 * MIB)], reservation=1, timeout_s=WAIT_S)
    with pytest.raises(SessionExpiredError):
        connection.read([0], [3], timeout_s=WAIT_S)
    assert unit.arena.data[:3].tobytes() == b"abc"
    with pytest.raises(SessionExpiredError):
        unit.connect(session=1)


def test_a_write_outside_is_refused_and_the_connection_goes_on(unit, connection):
    with pytest.raises(StorageUnitError, match="outside"):
        connection.write([16 * MIB - 1], [b"ab"], reservation=1, timeout_s=WAIT_S)
    connection.write([0], [b"abc"], reservation=1, timeout_s=WAIT_S)


LOCAL_CLIENT = """
import sys, time, msgspec
from dataplane.storage.client import UnitConnection
from dataplane.storage.session_lock import SessionLock
from dataplane.ledger.commands import UnitInfo
info = msgspec.json.decode(sys.argv[1], type=UnitInfo)
lock = SessionLock.create()
connection = UnitConnection(info, session=5, lock=lock, token=sys.argv[2], timeout_s=60)
print(lock.path if connection.local else "remote", flush=True)
sys.stdin.readline()
connection.close()
lock.close()
print("closed", flush=True)
"""


def local_client(unit):
    return Process(LOCAL_CLIENT, msgspec.json.encode(unit.info).decode(), TOKEN)


def test_a_killed_client_is_gone_and_leaves_no_file(unit):
    with local_client(unit) as process:
        path = process.line()
        unit.expect(SessionAttached)
        assert os.path.exists(path)
        process.kill()
    unit.server.order(FenceSession(unit=UNIT, session=5))
    assert unit.expect(SessionGone).session == 5
    assert not os.path.exists(path)
    with pytest.raises(SessionExpiredError):
        unit.connect(session=5)


def test_a_client_killed_before_it_attached_leaves_no_file_either(unit):
    code = (
        "from dataplane.storage import session_lock as s; lock = s.SessionLock.create(); print(lock.path, flush=True)"
    )
    with Process(f"{code}; input()") as process:
        path = process.line()
        assert os.path.exists(path)
        process.kill()
    unit.server.order(FenceSession(unit=UNIT, session=5))
    unit.expect(SessionGone)
    assert not os.path.exists(path)


REMOTE_WRITER = """
import os, signal, sys, msgspec
from dataplane import failpoints
from dataplane.storage.client import UnitConnection
from dataplane.ledger.commands import UnitInfo
info = msgspec.json.decode(sys.argv[1], type=UnitInfo)
connection = UnitConnection(info, session=5, token=sys.argv[2], timeout_s=60)
frames = iter(range(100))
def die_between_the_frames_of_the_second_request():
    if next(frames) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
failpoints.arm("bulk.write.between_frames", die_between_the_frames_of_the_second_request)
connection.write(list(range(0, 8 << 20, 1 << 19)), [b"x" * (1 << 19)] * 16, reservation=1, timeout_s=60)
"""


def test_a_writer_killed_between_frames_leaves_whole_requests_and_is_fenced(unit, connection_kind):
    with Process(REMOTE_WRITER, msgspec.json.encode(unit.by(connection_kind)).decode(), TOKEN) as process:
        assert process.line() == ""
        process.kill()
    unit.server.order(FenceSession(unit=UNIT, session=5))
    assert unit.expect(SessionGone).session == 5
    with unit.connect(connection_kind) as other:
        other.write([12 * MIB], [b"after"], reservation=1, timeout_s=WAIT_S)
    assert not unit.arena.data[CHUNK_BYTES : 8 * MIB].any(), "of the torn request nothing"
    assert len(set(unit.arena.data[:CHUNK_BYTES].tolist())) == 1, "of the request before it all or nothing"


def test_a_stopped_client_is_alive(unit):
    with local_client(unit) as process:
        process.line()
        unit.expect(SessionAttached)
        process.signal(signal.SIGSTOP)
        unit.server.order(FenceSession(unit=UNIT, session=5))
        assert unit.expect(SessionAlive).session == 5
        process.signal(signal.SIGCONT)
        process.kill()
        unit.server.order(FenceSession(unit=UNIT, session=5))
        assert unit.expect(SessionGone).session == 5


def test_what_a_killed_clients_child_inherited_stays(unit, lock):
    ready, release = os.pipe(), os.pipe()
    with unit.connect(session=5, lock=lock) as connection:
        unit.expect(SessionAttached)
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"x")
            os.read(release[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        connection.close()
    lock.close()
    unit.server.order(FenceSession(unit=UNIT, session=5))
    assert unit.expect(SessionAlive).session == 5
    os.write(release[1], b"x")
    os.waitpid(child, 0)
    unit.server.order(FenceSession(unit=UNIT, session=5))
    assert unit.expect(SessionGone).session == 5
    for end in (*ready, *release):
        os.close(end)


def test_a_silent_unit_is_a_timeout_that_names_it(unit, connection, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(BulkServer, "_read", lambda *_: release.wait(WAIT_S) and b"")
    with pytest.raises(CallTimeoutError, match="storage unit 7 at"):
        connection.read([0], [3], timeout_s=0.05)
    release.set()


def test_a_unit_that_goes_is_noticed_at_once(connection_kind):
    unit = Unit()
    with unit.connect(connection_kind) as connection:
        connection.write([0], [b"abc"], reservation=1, timeout_s=WAIT_S)
        unit.close()
        with pytest.raises(StorageUnitError, match="cannot be reached"):
            connection.read([0], [3], timeout_s=600.0)
        with pytest.raises(StorageUnitError, match="cannot be reached"):
            connection.write([0], [b"abc"], reservation=1, timeout_s=600.0)


def test_a_writer_that_dies_between_frames_leaves_no_torn_write(unit, connection):
    count = iter(range(100))

    def die_at_the_second():
        if next(count) == 1:
            raise RuntimeError("interrupted")

    data = noise(2 * MIB)
    failpoints.arm("bulk.write.between_frames", die_at_the_second)
    with pytest.raises(RuntimeError, match="interrupted"):
        connection.write([0, 4 * MIB], [data[:MIB], data[MIB:]], reservation=1, timeout_s=WAIT_S)
    failpoints.disarm()
    assert not unit.arena.data[: 8 * MIB].any()
    connection.write([0], [b"abc"], reservation=1, timeout_s=WAIT_S)
    assert unit.arena.data[:3].tobytes() == b"abc"


def test_a_reader_interrupted_between_frames_starts_afresh(unit, connection):
    def die():
        raise KeyboardInterrupt

    data = noise(2 * MIB)
    connection.write([0], [data], reservation=1, timeout_s=WAIT_S)
    failpoints.arm("bulk.read.between_frames", die)
    with pytest.raises(KeyboardInterrupt):
        connection.read([0], [2 * MIB], timeout_s=WAIT_S)
    failpoints.disarm()
    assert connection.read([0], [2 * MIB], timeout_s=WAIT_S).range(0, 2 * MIB).tobytes() == data.tobytes()


class Mine(np.ndarray):
    """An array that can be watched dying."""


def watched_frames(monkeypatch):
    """The trackers of all frames that are sent from now on."""
    trackers = []
    send = client_module.Wire.send

    def watched(wire, header, frames=(), *, held):
        try:
            send(wire, header, frames, held=held)
        finally:
            trackers.extend(held)

    monkeypatch.setattr(client_module.Wire, "send", watched)
    return trackers


@pytest.mark.parametrize("ending", ["return", "timeout", "interrupt", "refused", "closed"])
def test_zmq_has_let_go_of_the_buffers_however_a_write_ends(unit, connection, monkeypatch, ending):
    trackers = watched_frames(monkeypatch)
    data = noise(10 * MIB).view(Mine)
    gone = weakref.ref(data)
    release = threading.Event()
    original = BulkServer._write
    if ending in ("timeout", "closed"):
        monkeypatch.setattr(BulkServer, "_write", lambda *call: original(*call) if release.wait(WAIT_S) else 0)
    if ending == "interrupt":
        interruptions = iter([False, False, True])
        receive = client_module.Wire.receive
        monkeypatch.setattr(
            client_module.Wire, "receive", lambda *call: interrupt_when(next(interruptions)) or receive(*call)
        )
    if ending == "closed":
        failpoints.arm("bulk.write.between_frames", lambda: threading.Thread(target=connection.close).start())
    errors = {
        "timeout": CallTimeoutError,
        "interrupt": KeyboardInterrupt,
        "refused": StorageUnitError,
        "closed": ClientClosedError,
    }
    with pytest.raises(errors[ending]) if ending in errors else contextlib.nullcontext() as caught:
        offset = 10 * MIB if ending == "refused" else 0
        connection.write([offset], [data], reservation=1, timeout_s=0.05 if ending == "timeout" else WAIT_S)
    assert trackers
    assert all(each.done for each in trackers), "ZMQ still refers to the buffer"
    del data, caught
    gc.collect()
    # The thread that ZMQ tells drops its own reference just after it has told the tracker.
    wait_until(lambda: gone() is None, "nothing refers to the buffer")
    release.set()


# --- closing and forking --------------------------------------------------------------------------------------


def test_closing_wakes_who_waits(unit, connection, monkeypatch):
    arrived, release = threading.Event(), threading.Event()

    def stall(*_):
        arrived.set()
        release.wait(WAIT_S)
        return b""

    monkeypatch.setattr(BulkServer, "_read", stall)
    errors = []

    def wait():
        try:
            connection.read([0], [3], timeout_s=600.0)
        except ClientClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert arrived.wait(WAIT_S)
    connection.close()
    thread.join(WAIT_S)
    release.set()
    assert len(errors) == 1


def test_a_closed_connection_refuses(unit, connection):
    connection.close()
    connection.close()
    with pytest.raises(ClientClosedError):
        connection.read([0], [3], timeout_s=WAIT_S)


def test_a_forked_child_is_refused_and_hurts_nobody(unit, connection):
    connection.write([0], [b"abc"], reservation=1, timeout_s=WAIT_S)
    child = os.fork()
    if child == 0:
        try:
            connection.read([0], [3], timeout_s=WAIT_S)
        except ClientClosedError as error:
            connection.close()
            os._exit(7 if "before fork()" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert connection.read([0], [3], timeout_s=WAIT_S).range(0, 3).tobytes() == b"abc"


def test_a_forked_child_opens_its_own(unit, connection):
    connection.write([0], [noise(MIB)], reservation=1, timeout_s=WAIT_S)
    child = os.fork()
    if child == 0:
        with unit.connect(session=2) as own:
            own.write([MIB], [noise(MIB, seed=3)], reservation=1, timeout_s=WAIT_S)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert unit.arena.data[MIB : 2 * MIB].tobytes() == noise(MIB, seed=3).tobytes()


def test_descriptors_do_not_leak():
    alone(_connect_again_and_again)


def _connect_again_and_again():
    def round_trip(number):
        with unit.connect(session=number, lock=lock) as connection:
            connection.write([0], [noise(MIB)], reservation=1, timeout_s=WAIT_S)
            connection.read([0], [MIB], timeout_s=WAIT_S)

    with Unit() as unit, SessionLock.create() as lock:
        round_trip(1)
        before = psutil.Process().num_fds()
        for number in range(2, 8):
            round_trip(number)
        unit_keeps = 6
        wait_until(lambda: psutil.Process().num_fds() <= before + unit_keeps, "no more descriptors than before")


def test_an_answer_that_makes_no_sense_is_a_lost_unit(unit):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        nonsense = threading.Thread(target=lambda: router.send_multipart([router.recv_multipart()[0], b"\xff"]))
        nonsense.start()
        with pytest.raises(StorageUnitError, match="malformed reply"):
            UnitConnection(changed(unit.info, endpoints=(f"tcp://127.0.0.1:{port}",)), session=1, timeout_s=WAIT_S)
        nonsense.join()


# --- What reads and puts on one host cost, counted: copies of values, memory beside the result,
# commands.


MIB = 1 << 20
ROWS = 64
NAMES = itertools.count()


@pytest.fixture(scope="module")
def client() -> Iterator[DataPlaneClient]:
    """Without heartbeats: what one of them posted, or allocated, would be counted as a test's own."""
    settings = {"capacity_bytes": 128 * MIB, **NO_HEARTBEATS}
    with serve(settings) as server, connect(server.address, copy_threads=2, **NO_HEARTBEATS) as client:
        get(client, put(client, fields()))  # a process's first read looks into what torch can do
        yield client


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy of values that `rowcopy` makes or asks for, in order."""
    copied: list[int] = []
    place, scatter = row_copy._copy_ranges, row_copy._copy_short_rows

    def placed(buffers: Any, ranges: Any, *more: Any, **padded: Any) -> None:
        ranges = list(ranges)
        copied.extend(stop - start for _, start, stop in ranges)
        place(buffers, ranges, *more, **padded)

    def scattered(buffers: Any, which: Any, offsets: Any, sizes: Any, *more: Any) -> None:
        copied.append(int(sizes.sum()))
        scatter(buffers, which, offsets, sizes, *more)

    monkeypatch.setattr(row_copy, "_copy_ranges", placed)
    monkeypatch.setattr(row_copy, "_copy_short_rows", scattered)
    return copied


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many long copies each call of a copier shared among threads."""
    shared: list[int] = []
    pieces = parallel_copy._pieces

    def counted(runs: list[row_copy.Run]) -> Any:
        shared.append(len(runs))
        return pieces(runs)

    monkeypatch.setattr(parallel_copy, "_pieces", counted)
    return shared


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands sent, in order; not those by which preallocated space of small puts goes back with a heartbeat."""
    sent: list[str] = []

    def counted(send: Callable[..., Any]) -> Callable[..., Any]:
        def counting(channel: ControllerChannel, command: Any, **more: Any) -> Any:
            if not isinstance(command, Abort):
                sent.append(type(command).__name__)
            return send(channel, command, **more)

        return counting

    monkeypatch.setattr(ControllerChannel, "call", counted(ControllerChannel.call))
    monkeypatch.setattr(ControllerChannel, "post", counted(ControllerChannel.post))
    return sent


class TorchCopies(TorchDispatchMode):
    """Names of torch's operators that ran and made 1 KiB of new memory or more."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {storage for tensor in args for storage in self._storages(tensor)}
        if any(storage not in inputs for storage in self._storages(out)):
            self.made.append(str(func))
        return out

    @staticmethod
    def _storages(value: Any) -> list[int]:
        plain = isinstance(value, torch.Tensor) and not value.is_nested and value.nbytes >= 1024
        return [value.untyped_storage().data_ptr()] if plain else []


def fields(rows: int = ROWS, length: int = 1000) -> dict[str, torch.Tensor]:
    """Two jagged columns of the same lengths and a dense one, rows of some KB each."""
    lengths = [length + row % 7 for row in range(rows)]
    return {
        "input_ids": nested_of([torch.arange(n) for n in lengths]),
        "generation_logprobs": nested_of([torch.arange(n, dtype=torch.float32) for n in lengths]),
        "hidden": torch.rand(rows, length),
    }


def nbytes(columns: dict[str, torch.Tensor]) -> list[int]:
    return [(column.values() if column.is_nested else column).nbytes for column in columns.values()]


def put(client: DataPlaneClient, columns: dict[str, torch.Tensor]) -> KVBatchMeta:
    partition = f"copies-{next(NAMES)}"
    ids = [f"s{row}" for row in range(len(columns["hidden"]))]
    client.register_partition(partition, list(columns), len(ids), [])
    return client.put_samples(ids, partition, columns)


def get(client: DataPlaneClient, meta: KVBatchMeta, *, copy: bool = True) -> Any:
    return client.get_samples(meta, meta.partition_id, list(meta.fields or ()), copy=copy)


def test_the_instrument_sees_copies() -> None:
    with TorchCopies() as torch_copies:
        torch.ones(1000).clone()[100:].view(900, 1)
        torch.arange(1000).min()
    assert torch_copies.made == ["aten.ones.default", "aten.clone.default", "aten.arange.default"]


def test_rows_that_lie_together_are_one_copy_for_each_column(client: DataPlaneClient, copies: list[int]) -> None:
    columns = fields()
    meta = put(client, columns)
    for read in (get, lambda client, meta: client.get_batch(meta, layout="jagged")):
        copies.clear()
        with TorchCopies() as torch_copies:
            read(client, meta)
        assert copies == nbytes(columns)
        assert torch_copies.made == []


def test_padded_rows_are_copied_once_to_their_place(client: DataPlaneClient, copies: list[int]) -> None:
    columns = fields()
    meta = put(client, columns)
    copies.clear()
    with TorchCopies() as torch_copies:
        batch = client.get_batch(meta, pad_to_seqlen=2048)
    assert batch["input_ids"].shape == (ROWS, 2048)
    assert len(copies) == ROWS + ROWS + 1
    assert sum(copies) == sum(nbytes(columns))
    assert torch_copies.made == []


def test_rows_in_another_order_are_copied_once(client: DataPlaneClient, copies: list[int]) -> None:
    columns = fields()
    meta = put(client, columns).subset(list(range(ROWS - 1, -1, -1)))
    copies.clear()
    get(client, meta)
    assert len(copies) == 3 * ROWS
    assert sum(copies) == sum(nbytes(columns))


def test_many_short_rows_are_copied_together(client: DataPlaneClient, copies: list[int]) -> None:
    columns = fields(rows=512, length=2)
    meta = put(client, columns).subset([*range(0, 512, 2), *range(1, 512, 2)])
    copies.clear()
    get(client, meta)
    assert copies == nbytes(columns)


def test_views_are_no_copies(client: DataPlaneClient, copies: list[int]) -> None:
    meta = put(client, fields())
    copies.clear()
    with TorchCopies() as torch_copies:
        views = get(client, meta, copy=False)
    assert copies == []
    assert torch_copies.made == []
    assert views["input_ids"].offsets() is views["generation_logprobs"].offsets()


def test_long_columns_are_copied_by_one_call_of_the_copier(
    client: DataPlaneClient, copies: list[int], together: list[int]
) -> None:
    columns = fields(length=10_000)
    meta = put(client, columns)
    assert together == [3]
    get(client, meta)
    assert together == [3, 3]
    assert sum(copies) == 2 * sum(nbytes(columns))


def test_a_put_copies_every_byte_once(client: DataPlaneClient, copies: list[int]) -> None:
    columns = fields()
    with TorchCopies() as torch_copies:
        meta = put(client, columns)
    assert copies == nbytes(columns)
    assert torch_copies.made == []

    copies.clear()
    padded = {"input_ids": torch.ones(ROWS, 2048, dtype=torch.int64), "hidden": columns["hidden"]}
    with TorchCopies() as torch_copies:
        client.put_samples(meta, meta.partition_id, padded)
    assert copies == [row.nbytes for row in columns["input_ids"].unbind()] + [columns["hidden"].nbytes]
    assert torch_copies.made == []


@pytest.mark.parametrize("read", ["get", "batch", "views"])
def test_memory_beside_the_result(client: DataPlaneClient, read: str) -> None:
    """No second copy by numpy or Python either (results of this size lie in mappings, which are not traced)."""
    columns = fields(length=10_000)
    meta = put(client, columns)
    reads: dict[str, Callable[[], Any]] = {
        "get": lambda: get(client, meta),
        "batch": lambda: client.get_batch(meta),
        "views": lambda: get(client, meta, copy=False),
    }
    reads[read]()
    tracemalloc.start()
    try:
        result = reads[read]()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(result["hidden"]) == ROWS
    assert peak < sum(nbytes(columns)) / 20


def test_memory_beside_a_put(client: DataPlaneClient) -> None:
    columns = fields(length=10_000)
    meta = put(client, columns)
    tracemalloc.start()
    try:
        client.put_samples(meta, meta.partition_id, columns)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < sum(nbytes(columns)) / 20


def test_a_read_is_one_command(client: DataPlaneClient, commands: list[str]) -> None:
    """Another one follows only if no call confirms the read soon."""
    meta = put(client, fields())
    for read in (get, lambda client, meta: client.get_batch(meta)):
        commands.clear()
        read(client, meta)
        assert [name for name in commands if name != "Release"] in (["Locate"], ["LocateRows"])


def test_views_are_released_when_the_last_is_gone(client: DataPlaneClient, commands: list[str]) -> None:
    meta = put(client, fields())
    commands.clear()
    views = get(client, meta, copy=False)
    one = views["input_ids"].values()[5:7]
    del views
    gc.collect()
    client.check_consumption_status(meta.partition_id, [])
    assert commands == ["Locate", "CheckConsumption"]
    assert one.tolist() == [5, 6]
    commands.clear()
    del one
    gc.collect()
    client.check_consumption_status(meta.partition_id, [])
    assert sorted(commands) == ["CheckConsumption", "Release"]


WRITES_TO_A_VIEW = """
import resource, sys, torch
from dataplane import connect
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file
client = connect(sys.argv[1])
client.register_partition("written", ["x"], None, [])
client.put_samples(["a"], "written", {"x": torch.ones(1)})
view = client.get_samples(["a"], "written", ["x"], copy=False)["x"]
own = view.clone()
own += 1
print(view.item(), own.item(), flush=True)
view += 1
"""


def test_a_write_to_a_view_ends_the_process_and_changes_no_row() -> None:
    with serve({"capacity_bytes": MIB}) as server, connect(server.address) as client:
        with Child([sys.executable, "-c", WRITES_TO_A_VIEW, server.address]) as child:
            assert child.line() == "1.0 2.0"
            assert child.finish()[0] == -signal.SIGSEGV
        assert client.get_samples(["a"], "written", ["x"])["x"].tolist() == [1.0]
