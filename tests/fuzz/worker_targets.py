"""What workers of one job say to each other, where it is no pickle: streams of channels, directories, message heads."""

from __future__ import annotations

import msgspec

from dataplane.errors import DataPlaneError
from tests.fuzz.target import Feed, FindingError, Target
from workers.channels import wire as channels
from workers.directory import wire as directory
from workers.messages import wire as messages
from workers.messages.wire import CollectiveGroupOptions
from workers.transport import framing
from workers.transport.encoding import encode, error_of
from workers.transport.pickling import Layout, Segment

DEFECTS = (msgspec.DecodeError, ValueError)


def channel_streams(data: bytes) -> None:
    """What a broker reads of a client, or a client of a broker, in whatever pieces it comes."""
    feed, splitter = Feed(data), framing.Splitter()
    decode = (channels.decode_request, channels.decode_answer)[feed.number(2)]
    while feed:
        splitter.feed(feed.take(1 + feed.number(64)))
        while (message := splitter.next()) is not None:
            decoded = decode(message.body)
            if decode(channels.encode(decoded)[framing.HEADER.size :]) != decoded:
                raise FindingError(f"{decoded!r} changes when it is written again")


def channel_seeds() -> list[bytes]:
    item = channels.Item(head=["tensor", 3], body=b"bytes", space=64, nbytes=10)
    requests = [
        channels.OpenBroker(1, channels.VERSION, "token", True),
        channels.Put(2, "c", b"key", item, 1.5, False, 100),
        channels.Get(3, "c", b"", 2.5, True),
        channels.Reserve(4, "c", b"k", 1 << 40, False),
    ]
    answers = [channels.Items(3, [item]), channels.Welcome(1, 1 << 20, 0, 64), channels.Counted(7, 1, 2, 3, 4, 5, True)]
    return [_cut(0, [channels.encode(each) for each in requests]), _cut(1, [channels.encode(each) for each in answers])]


def _cut(kind: int, written: list[bytes]) -> bytes:
    """The stream in pieces of 32 bytes, as `channel_streams` takes it apart."""
    whole = b"".join(written)
    return bytes([kind]) + b"".join(b"\x1f" + whole[at : at + 32] for at in range(0, len(whole), 32))


def directory_messages(data: bytes) -> None:
    """Requests to a directory, and its replies with the errors they carry."""
    feed = Feed(data)
    if feed.number(2):
        directory.decode_request(feed.rest())
        return
    reply = directory.decode_reply(feed.rest())
    if isinstance(reply, directory.Failed):
        raise error_of(reply)


def directory_seeds() -> list[bytes]:
    entry = directory.DirectoryEntry(
        kind=directory.Kind.WORKER, name="w:0", incarnation=3, endpoints=("a:1",), facts={"x": [1]}
    )
    requests = [
        directory.OpenDirectory(directory.Process(host="h", pid=1, started=2)),
        directory.RegisterProcess(
            request_id=1, kind=directory.Kind.WORKER_GROUP, name="g", endpoints=(), facts={"n": 1.5}, owned=True
        ),
        directory.Lookup(request_id=2, kind=directory.Kind.CHANNEL, name="c", wait_s=1.0),
    ]
    failed = directory.Failed(3, "NameNotFoundError", {"kind": "group", "name": "g", "waited_s": 0.5})
    replies = [directory.Found(1, (entry,)), directory.Gone(entry), failed, directory.Unknown("gone")]
    return [b"\1" + encode(r) for r in requests] + [b"\0" + encode(r) for r in replies]


def message_heads(data: bytes) -> None:
    """Heads of messages between workers, and what answers them."""
    feed = Feed(data)
    if feed.number(2):
        messages.decode_request(feed.rest())
        return
    answer = messages.decode_answer(feed.rest())
    if isinstance(answer, messages.RefusedMessage):
        raise error_of(answer)


def message_seeds() -> list[bytes]:
    post = messages.PostMessage(
        stream=b"s",
        sequence=1,
        source="a:0",
        incarnation=2,
        receiver=3,
        form=messages.TensorForm("torch.int64", (2, 3)),
        options=CollectiveGroupOptions(),
        layout=Layout((Segment(0, 48, "torch.int64", (2, 3)),), 48, 48),
        slab=messages.Slab("h", 1, 2, 3, 64),
        serial=4,
        relay=messages.Relay("b:0", 5, "h:1", 1),
        passes_on=True,
    )
    data = messages.Data(stream=b"", sequence=1, source="a:0", incarnation=2, receiver=5, start=0)
    want = messages.WantMessage(
        source="a:0", incarnation=2, serial=4, stream=b"s", sequence=1, asker=3, receiver=5, start=0, nbytes=9
    )
    requests = [post, data, messages.ForgetMessage(inodes=(1, 2)), want]
    answers = [
        messages.Held(stream=b"", sequence=1, kept=True),
        messages.Pull(stream=b"", sequence=1, start=0, nbytes=9),
        data,
        messages.Absent(source="a:0", stream=b"", sequence=1),
        messages.RefusedMessage(stream=b"", sequence=1, error="NoSuchError", facts={"a": 1}),
    ]
    return [b"\1" + encode(r) for r in requests] + [b"\0" + encode(a) for a in answers]


TARGETS = [
    Target(name="channel-streams", run=channel_streams, seeds=channel_seeds, allowed=DEFECTS, examples=300),
    Target(
        name="directory-messages",
        run=directory_messages,
        seeds=directory_seeds,
        allowed=(msgspec.DecodeError, DataPlaneError),
        examples=300,
    ),
    Target(
        name="message-heads",
        run=message_heads,
        seeds=message_seeds,
        allowed=(msgspec.DecodeError, DataPlaneError),
        examples=300,
    ),
]
