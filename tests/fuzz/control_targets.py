"""The control plane: requests into a real ledger, reports of storage units, and answers as clients read them."""

from __future__ import annotations

import functools
import zlib

import msgspec
import numpy as np

from dataplane.controller.requests import Facts, frame_of
from dataplane.errors import ERROR_TYPES, DataPlaneError, InvalidRequestError, SessionExpiredError, to_wire
from dataplane.ledger import Ledger, Limits
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.protocol import zmq_frames
from tests.fuzz.target import Feed, FindingError, Target, piece
from tests.ledger.driver import Driver
from tests.ledger.fingerprint import fingerprint
from tests.ledger.test_replay import a_busy_day
from tests.protocol.values import plain

FACTS = Facts(address="here:1", epoch=7, host="host", endpoints=("ipc://@x",), heartbeat_s=1.0)
COMMANDS = {kind.__name__: kind for kind in c.Answered.__subclasses__()}
METHODS = sorted([*COMMANDS, "OpenSession", "Heartbeat", "DropUnit"])
MAX_SEEDS = 60
LIMITS = Limits(samples=1 << 12, parked=64, sessions=16, partitions=16)


@functools.cache
def day() -> Driver:
    """A ledger with samples, leases, pins and waiting claims, and the inputs that led there."""
    driver = Driver(capacity=64 * 1024, limits=LIMITS)
    a_busy_day(driver, 4, 40)
    return driver


@functools.cache
def _image() -> bytes:
    return day().ledger.image()


def requests(data: bytes) -> None:
    """A series of requests, as the endpoints take them: parsed, applied, answered, and the answer read by the
    client."""
    feed, ledger = Feed(data), Ledger.restored(_image())
    refused: DataPlaneError | None = None
    while feed:
        try:
            item = messages.decode_request(feed.piece())
        except DataPlaneError as error:
            refused = error
            continue
        _apply(ledger, item)
    _still_whole(ledger, data)
    if refused is not None:
        raise refused


def _apply(ledger: Ledger, item: c.Input) -> None:
    _journalled(item)
    for output in ledger.apply(item):
        _answered(item, output)


HEADER = 3
HEADER_BYTES = 8 * HEADER


def headers(data: bytes) -> None:
    """Good commands of the day in any place of any session: signed integers of 64 bits."""
    feed, ledger = Feed(data), Ledger.restored(_image())
    calls = [item for item in day().log if isinstance(item, c.Call)]
    refused: DataPlaneError | None = None
    while feed:
        command = calls[feed.number(len(calls))].command
        place = np.frombuffer(feed.take(HEADER_BYTES).ljust(HEADER_BYTES, b"\xff"), "<i8").tolist()
        session, call_id, watermark = place
        call = c.Call(session=session, call_id=call_id, watermark=watermark, command=command)
        try:
            item = messages.decode_request(messages.encode(call))
        except DataPlaneError as error:
            refused = error
            continue
        _apply(ledger, item)
    _still_whole(ledger, data)
    if refused is not None:
        raise refused


def header_seeds() -> list[bytes]:
    sessions = sorted({item.session for item in day().log if isinstance(item, c.Call)})
    places = [(sessions[-1], 900, 900), (sessions[0], 1, 1), (sessions[-1], -1, 900), (-1, 900, 1), (7, 1, -900)]
    return [bytes([number]) + np.array(place, "<i8").tobytes() for number, place in enumerate(places * 4)]


def _journalled(item: c.Input) -> None:
    """What a ledger is given can be written down and read again."""
    back = messages.decode(messages.encode(item))
    if repr(plain(back)) != repr(plain(item)):
        raise FindingError(f"{item!r} comes back from the journal as {back!r}")


def _answered(item: c.Input, output: c.Output) -> None:
    """What comes out becomes a message that the client, or the storage unit, reads."""
    if isinstance(output, c.FenceSession | c.GrowArena):
        _order(zmq_frames.answer(0, output))
        return
    (reply,) = zmq_frames.Reply.parse([frame_of(output, FACTS)])
    error = getattr(output, "error", None)
    if isinstance(output, c.Answer) and isinstance(output.result, DataPlaneError):
        error = output.result
    if error is not None:
        back = reply.error
        if type(back) is not type(error) or str(back) != str(error):
            raise FindingError(f"the client reads {back!r} for {error!r}")
    elif isinstance(output, c.Answer) and isinstance(item, c.Call) and output.call_id == item.call_id:
        messages.decode_result(type(item.command), reply.body)


def _still_whole(ledger: Ledger, data: bytes) -> None:
    """Time goes on. The state can be imaged, and goes on from there as the same (looked at for some inputs only: it
    takes long)."""
    if not zlib.crc32(data) % 8 and fingerprint(Ledger.restored(ledger.image())) != fingerprint(ledger):
        raise FindingError("the ledger is another one once restored from its image")
    ledger.apply(c.Tick(now=ledger.now + 1e6))


def request_seeds() -> list[bytes]:
    """The day's own requests, each alone, and many in a row."""
    log = [item for item in day().log if _name(item) in METHODS]
    later = [_later(item) for item in log]
    return [*map(_request, later[:MAX_SEEDS]), b"".join(map(_request, log[:40])), b"".join(map(_request, later[-40:]))]


def _name(item: c.Input) -> str:
    return type(item.command if isinstance(item, c.Call) else item).__name__


def _later(item: c.Input) -> c.Input:
    """The same request under a call id that was not used yet."""
    if not isinstance(item, c.Call):
        return item
    return c.Call(session=item.session, call_id=item.call_id + 400, watermark=item.watermark, command=item.command)


def _request(item: c.Input) -> bytes:
    return piece(messages.encode(item))


# --- storage units ------------------------------------------------------------------------------------------------


def unit_reports(data: bytes) -> None:
    """What storage units say, and what the ledger makes of it."""
    feed, ledger = Feed(data), Ledger.restored(_image())
    refused: Exception | None = None
    while feed:
        try:
            item = messages.decode_request(feed.piece())
        except InvalidRequestError as error:
            refused = error
            continue
        _apply(ledger, item)
    _still_whole(ledger, data)
    if refused is not None:
        raise refused


def report_seeds() -> list[bytes]:
    session = max(item.session for item in day().log if isinstance(item, c.Call))
    add = next(item for item in day().log if isinstance(item, c.AddUnit))
    known: list[c.Input] = [
        c.SessionAttached(unit=1, session=session, lock_path="/dev/shm/x"),
        c.SessionAlive(unit=1, session=session),
        c.Grown(unit=1, backed_bytes=1 << 16, error="full"),
        c.SessionGone(unit=1, session=session),
        c.AddUnit(**{name: getattr(add, name) for name in add.__struct_fields__} | {"unit": 1, "epoch": 2}),
        c.AddUnit(**{name: getattr(add, name) for name in add.__struct_fields__} | {"cookie": "new"}),
    ]
    written = [piece(messages.encode(item)) for item in known]
    return [*written, b"".join(written)]


def unit_orders(data: bytes) -> None:
    """What a storage unit makes of the controller's orders."""
    _order(data)


def _order(frame: bytes) -> zmq_frames.UnitMessage:
    """What a unit reads of a message."""
    return messages.decode_with(zmq_frames.UNIT_MESSAGE, zmq_frames.decode_reply(frame).good_body())


def order_seeds() -> list[bytes]:
    orders = [
        c.UnitAdded(cookie="a", unit=3),
        c.FenceSession(unit=1, session=2, lock_path="/x"),
        c.GrowArena(unit=1, backed_bytes=1 << 30),
        zmq_frames.ReportHandled(),
    ]
    return [zmq_frames.answer(0, order) for order in orders]


# --- answers ------------------------------------------------------------------------------------------------------

RESULTS = sorted(COMMANDS)


def answers(data: bytes) -> None:
    """A reply of the ZMQ server as a client reads it: a result, or an error."""
    feed = Feed(data)
    command = COMMANDS[RESULTS[feed.number(len(RESULTS))]]
    body = zmq_frames.Reply.parse([feed.rest()])[0].good_body()
    result = messages.decode_result(command, body)
    if repr(plain(messages.decode_result(command, messages.encode(result)))) != repr(plain(result)):
        raise FindingError(f"{result!r} changes on its way")


def answer_seeds() -> list[bytes]:
    found: dict[str, bytes] = {}
    for item in day().log:
        if isinstance(item, c.Call):
            for result in day().answers.get((item.session, item.call_id), ()):
                if isinstance(result, c.Result):
                    method = type(item.command).__name__
                    found[method] = bytes([RESULTS.index(method)]) + zmq_frames.answer(7, messages.encode(result))
    expired = SessionExpiredError(session=3, why="it is over")
    frames = [zmq_frames.refusal(7, expired), msgspec.msgpack.encode((7, "NoSuchError", [128]))]
    return [*found.values(), *(b"\0" + frame for frame in frames)]


def errors(data: bytes) -> None:
    """An error of any kind, with whatever facts, as a client makes it again."""
    feed = Feed(data)
    names = sorted(ERROR_TYPES)
    reply = zmq_frames.Reply(0, names[feed.number(len(names))], msgspec.Raw(feed.rest()))
    error = reply.error
    if error is not None:
        str(error)
        raise error


def error_seeds() -> list[bytes]:
    names = sorted(ERROR_TYPES)
    seen = [result for results in day().answers.values() for result in results if isinstance(result, DataPlaneError)]
    some = [SessionExpiredError(session=3, why="it is over"), *seen]
    return [bytes([names.index(type(error).__name__)]) + to_wire(error)[1] for error in some[:20]]


TARGETS = [
    Target(name="requests", run=requests, seeds=request_seeds),
    Target(name="headers", run=headers, seeds=header_seeds, examples=300),
    Target(name="unit-reports", run=unit_reports, seeds=report_seeds),
    Target(name="unit-orders", run=unit_orders, seeds=order_seeds),
    Target(name="answers", run=answers, seeds=answer_seeds, examples=300),
    Target(name="errors", run=errors, seeds=error_seeds, examples=300),
]
