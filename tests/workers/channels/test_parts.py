"""Keys and messages of channels, each by itself."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.channels import wire
from workers.channels.endpoint import Endpoint
from workers.channels.keys import key_bytes

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(-(2.0**60), 2.0**60)
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


@given(plain, plain)
def test_keys_are_the_same_bytes_where_a_dict_holds_them_for_one(first: Any, second: Any) -> None:
    assert (key_bytes(first) == key_bytes(second)) == (first == second)


@pytest.mark.parametrize("pair", [(1, 1.0), (1, True), (0.0, -0.0), ((1, "a"), (True, "a"))])
def test_numbers_that_are_equal_are_one_key(pair: tuple[Any, Any]) -> None:
    assert key_bytes(pair[0]) == key_bytes(pair[1])


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Stage:
    source: str
    sink: str


def test_other_keys_are_told_apart() -> None:
    keys = [Colour.RED, Colour.BLUE, 2**100, (Colour.RED, 1), "RED", frozenset({1}), Stage("a", "b"), Stage("b", "a")]
    assert len({key_bytes(key) for key in keys}) == len(keys)
    with pytest.raises(TypeError, match="unhashable"):
        key_bytes([1])


def test_it_does_not_matter_whether_equal_parts_of_a_key_are_one_object() -> None:
    once, again = "actor" * 3, "".join(["actor"] * 3)
    assert once is not again
    assert key_bytes(Stage(once, once)) == key_bytes(Stage(once, again))


REQUESTS = [
    wire.OpenBroker(1, wire.VERSION, "token", True),
    wire.Create(2, "c", "name", 3),
    wire.Put(3, "c", b"k", wire.Item(b"head", b"abc"), 1.5, False, 9),
    wire.Get(4, "c", b"k", None, True),
    wire.Reserve(5, "c", b"k", 100, False),
    wire.AckItems(6),
    wire.Cancel(7),
]


@given(st.lists(st.sampled_from(REQUESTS), max_size=5), st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_messages_come_out_of_a_stream_however_it_is_cut(requests: list[Any], cuts: list[int]) -> None:
    stream = b"".join(wire.encode(request) for request in requests)
    splitter, found, at = wire.Splitter(), [], 0
    for turn in range(len(stream) + 1):
        size = cuts[turn % len(cuts)]
        splitter.feed(stream[at : at + size])
        at += size
        while (message := splitter.next()) is not None:
            found.append(wire.decode_request(message.body))
    assert found == requests


def test_a_payload_is_taken_between_messages() -> None:
    splitter = wire.Splitter()
    splitter.feed(wire.encode(REQUESTS[2], 5) + b"12345" + wire.encode(REQUESTS[3]))
    message = splitter.next()
    assert message is not None
    assert message.payload_bytes == 5
    assert splitter.rest(5) == b"12345"
    following = splitter.next()
    assert following is not None
    assert wire.decode_request(following.body) == REQUESTS[3]


def test_a_stream_that_is_none_is_refused() -> None:
    splitter = wire.Splitter()
    splitter.feed(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ValueError, match="at most"):
        splitter.next()


def test_endpoints_are_strings_and_back() -> None:
    endpoint = Endpoint(host="boot", name="name", address="127.0.0.1:1", token="t")
    assert Endpoint.parse(str(endpoint)) == endpoint
    with pytest.raises(ValueError, match="not the endpoint"):
        Endpoint.parse("127.0.0.1:1")
