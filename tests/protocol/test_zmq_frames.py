"""Frames of the ZMQ server, the token check, and addresses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.client.rpc.handshake import zmq_address_of
from dataplane.controller.requests import parse
from dataplane.core.addresses import register_resolver, resolve
from dataplane.errors import AuthenticationError, InternalError, InvalidRequestError, PartitionNotFoundError
from dataplane.ledger import commands as c
from dataplane.protocol import zmq_frames
from dataplane.protocol.proof import Secret, Ticket
from dataplane.protocol.zmq_frames import MAX_GROUP


def test_a_request_is_method_and_message() -> None:
    method, body = zmq_frames.request(c.Heartbeat(session=3))
    assert method == b"Heartbeat"
    assert body


def test_a_long_request_comes_in_short_frames() -> None:
    seal = c.Seal(partition="p" * (600 << 10))
    method, *parts = zmq_frames.request(c.Call(session=3, number=1, watermark=1, command=seal))
    assert [len(part) for part in parts[:2]] == [zmq_frames.REQUEST_FRAME_BYTES] * 2
    back = parse(method.decode(), b"".join(parts))
    assert isinstance(back, c.Call)
    assert isinstance(back.command, c.Seal)
    assert back.command.partition == seal.partition


@pytest.mark.parametrize("method", [b'w\xc2"', b"Clear\n", b"x" * 81, b"a b"])
@pytest.mark.parametrize("group", [[], [zmq_frames.GROUP, b"Clear", b""]])
def test_other_bytes_are_no_method(group: list[bytes], method: bytes) -> None:
    frames = [*group, method, b""]
    with pytest.raises(InvalidRequestError, match="not a request of this protocol: it ") as caught:
        zmq_frames.split_requests(frames)
    assert str(caught.value).isprintable()
    assert str(caught.value).isascii()
    assert len(str(caught.value)) < 150


def test_a_method_of_a_group_is_not_empty() -> None:
    with pytest.raises(InvalidRequestError, match="it is empty"):
        zmq_frames.split_requests([zmq_frames.GROUP, b"", b"body"])


def test_answers_and_refusals_come_back() -> None:
    reply = zmq_frames.Reply.parse(zmq_frames.answer(7, b"body"))[0]
    assert (reply.number, reply.error, reply.good_body()) == (7, None, b"body")
    refusal = zmq_frames.Reply.parse(zmq_frames.refusal(8, PartitionNotFoundError(partition="p")))[0]
    assert refusal.number == 8
    with pytest.raises(PartitionNotFoundError, match="'p'"):
        refusal.good_body()


@pytest.mark.parametrize("frames", [[], [b"x" * 8, b"ok"], [b"short", b"ok", b""]])
def test_other_frames_are_no_reply(frames: list[bytes]) -> None:
    with pytest.raises(InternalError, match="malformed reply of"):
        zmq_frames.Reply.parse(frames)


def test_the_token_is_checked_only_where_there_is_one() -> None:
    Secret(None).check(b"whatever", peer="x")
    Secret("s").check(b"s", peer="x")
    with pytest.raises(AuthenticationError, match="the token is wrong"):
        Secret("s").check(b"t", peer="x")
    with pytest.raises(AuthenticationError, match="no token was given"):
        Secret("s").check(b"", peer="x")
    ticket = Ticket.of("s", "instance")
    assert ticket is not None
    Secret("s", ticket).check(ticket.code.encode(), peer="x")
    with pytest.raises(AuthenticationError, match="the token is wrong"):
        Secret("s", Ticket.of("s", "another instance")).check(ticket.code.encode(), peer="x")


def test_addresses_resolve() -> None:
    register_resolver("somewhere", lambda rest: f"{rest}:80")
    assert resolve("somewhere:there") == "there:80"
    assert resolve("localhost:1") == "localhost:1"
    assert resolve("[::1]:1") == "[::1]:1"
    assert zmq_address_of("[::1]:1") == "[::1]:2"
    for bad in ("localhost", "host:port", ":80", "host:0", "host:99999", "host:²"):
        with pytest.raises(ValueError, match="is not host:port"):
            resolve(bad)


def test_an_actors_address_needs_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.core.addresses._resolvers", {})
    with pytest.raises(ValueError, match="run `import workers` first"):
        resolve("actor:tq")


@given(
    st.lists(
        st.tuples(st.sampled_from(["Units", "Seal"]), st.binary(max_size=9), st.booleans()), max_size=3 * MAX_GROUP + 2
    )
)
def test_requests_keep_their_order_in_shared_messages(sent: list[tuple[str, bytes, bool]]) -> None:
    frames = [[method.encode(), body, *([b"rest"] if long else [])] for method, body, long in sent]
    messages = list(zmq_frames.messages(frames))
    split = [zmq_frames.split_requests(message) for message in messages]
    assert [each for message in split for each in message] == [
        (method, body + b"rest" * long) for method, body, long in sent
    ]
    assert all(len(message) <= MAX_GROUP for message in split)
    # Every message but the last is full, or one of its neighbours has several body frames.
    for first, second in itertools.pairwise(messages):
        assert len(first) in (3, 1 + 2 * MAX_GROUP) or len(second) == 3


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([], "2 or more frames"),
        ([b"Units"], "2 or more frames"),
        ([b"", b"Units"], "2 frames for each"),
        ([b"", *[b"Units", b""] * (MAX_GROUP + 1)], "up to 32 requests, got 66"),
    ],
)
def test_other_frames_are_no_requests(frames: list[bytes], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        zmq_frames.split_requests(frames)


def test_a_message_of_several_replies() -> None:
    error = PartitionNotFoundError(partition="p")
    replies = zmq_frames.Reply.parse([*zmq_frames.answer(7, b"body"), *zmq_frames.refusal(8, error)])
    assert [(reply.number, reply.outcome) for reply in replies] == [(7, "ok"), (8, "PartitionNotFoundError")]
    assert str(replies[1].error) == str(error)
