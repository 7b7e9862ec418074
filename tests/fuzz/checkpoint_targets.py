"""Checkpoints: the manifest and the files of a good one damaged, with checksums that fit again, and restored."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch

import dataplane
from dataplane import DataPlaneClient, Shared
from dataplane.client.checkpoint import manifest
from tests.fuzz.target import Feed, FindingError, Standing, Target, piece

MIB = 1 << 20
FIELDS = ["dense", "jagged", "shared", "notes"]


def manifests(data: bytes) -> None:
    """A manifest alone: as it is, or as the content of one whose checksum fits."""
    feed, path = Feed(data), Path("/nowhere/manifest.json")
    if feed.number(2):
        found = manifest.decode(path, feed.rest())
    else:
        found = manifest.decode(path, _sealed(feed.rest()))
    again = manifest.encode(found)
    if manifest.encode(manifest.decode(path, again)) != again:
        raise FindingError(f"{found!r} changes when it is written again")


def _sealed(inner: bytes) -> bytes:
    """The whole file around such a content."""
    digest = hashlib.sha256(inner).hexdigest().encode()
    return b'{"format":%d,"sha256":"%s","checkpoint":%s}' % (manifest.FORMAT, digest, inner)


def manifest_seeds() -> list[bytes]:
    outer, _ = _saved()
    return [b"\1" + outer, b"\0" + _inner()]


def _inner() -> bytes:
    outer, _ = _saved()
    return bytes(msgspec.json.decode(outer, type=dict[str, msgspec.Raw])["checkpoint"])


# --- whole checkpoints --------------------------------------------------------------------------------------------


def _begin(ends: ExitStack) -> DataPlaneClient:
    server = ends.enter_context(dataplane.serve({"capacity_bytes": 4 * MIB}))
    return ends.enter_context(dataplane.connect(server.address))


_client = Standing(_begin)


def _fill(client: DataPlaneClient) -> None:
    client.register_partition("p", FIELDS, 4, ["train", "score"])
    ids = ["a", "b", "c", "d"]
    rows = {
        "dense": torch.arange(8).reshape(4, 2),
        "jagged": [torch.arange(n) for n in (3, 0, 1, 2)],
        "shared": Shared(torch.ones(2, 3), [0, 1, 1, 0]),
        "notes": ["one", {"two": 2}, None, [4]],
    }
    client.put_samples(ids, "p", rows, tags=[{"n": n, "t": "x"} for n in range(4)])
    client.claim_meta("p", "train", ["dense"], 2)


@functools.cache
def _saved() -> tuple[bytes, dict[str, bytes]]:
    """The manifest of a checkpoint, and its files by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        _clear(_client())
        _fill(_client())
        _client().checkpoint(path)
        files = {entry.name: (path / entry.name).read_bytes() for entry in manifest.read(path).files}
        return (path / manifest.NAME).read_bytes(), files


def checkpoints(data: bytes) -> None:
    """A checkpoint with damages in its files or its manifest, whose checksums fit. It is restored as something, or
    refused; then nothing is there."""
    feed = Feed(data)
    _, files = _saved()
    inner = _patched(feed, _inner())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        for name, content in files.items():
            changed = _patched(feed, content)
            path.mkdir(exist_ok=True)
            (path / name).write_bytes(changed)
            inner = inner.replace(
                hashlib.sha256(content).hexdigest().encode(), hashlib.sha256(changed).hexdigest().encode()
            )
            inner = inner.replace(b'"nbytes":%d,"sha' % len(content), b'"nbytes":%d,"sha' % len(changed))
        (path / manifest.NAME).write_bytes(_sealed(inner))
        client = _client()
        _clear(client)
        try:
            done = client.restore(path)
        except Exception:
            if client.stats().partitions:
                raise FindingError("a refused checkpoint left something") from None
            raise
    _looked_through(client, done)


def _clear(client: DataPlaneClient) -> None:
    for partition in client.stats().partitions:
        client.clear_samples(None, partition.partition)


def _looked_through(client: DataPlaneClient, done: dataplane.CheckpointInfo) -> None:
    """What was restored is there, and can be read, or is of no use to its reader."""
    for name, count in done.partitions.items():
        meta = client.list_samples(name)
        if meta.size != count:
            raise FindingError(f"{meta.size} of {count} samples are there")
        if meta.size and meta.fields:
            client.get_batch(meta)


def _patched(feed: Feed, content: bytes) -> bytes:
    """As often as the input says: so many bytes from there on are others, or some were put in."""
    changed = bytearray(content)
    for _ in range(feed.number(4)):
        at, put_in, patch = int.from_bytes(feed.take(2), "little") % (len(changed) + 1), feed.number(4), feed.piece()
        changed[at : at + (0 if put_in == 3 else len(patch))] = patch
    return bytes(changed)


def checkpoint_seeds() -> list[bytes]:
    inner = _inner()
    live, spec = inner.index(b'"live":4') + 7, inner.index(b'"dtype":"int64"') + 9
    in_manifest = [(live, b"5"), (spec, b"int32"), (inner.index(b'"first":') + 8, b"1"), (live, b"4,")]
    in_file = [(0, b"\xff"), (8, b"{"), (400, b"\xff" * 8), (600, b"\x01" * 16)]
    seeds = [bytes([1]) + at.to_bytes(2, "little") + b"\0" + piece(patch) for at, patch in in_manifest]
    seeds += [bytes([0, 1]) + at.to_bytes(2, "little") + b"\0" + piece(patch) for at, patch in in_file]
    return [b"", *seeds]


TARGETS = [
    Target(name="manifests", run=manifests, seeds=manifest_seeds, examples=300),
    Target(name="checkpoints", run=checkpoints, seeds=checkpoint_seeds, examples=60),
]
