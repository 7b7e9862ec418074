"""The transfer of different parts of rows from the leader of a replica group to its siblings, and back.

The leader holds one part at a time, besides its own: it reads a part, sends it to each rank that wants it, and drops
it. A message is its size, a description, and the columns' bytes in pieces. On the way back, all ranks know beforehand
who sends which bytes, and the leader puts them into place before it receives the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import msgspec
import torch

from workers.training.batch_codec import Header, PackedBatch, pack, unpack
from workers.training.replica_collectives import Deadline, Fault, Siblings

Columns = Callable[[], dict[str, Any]]


class _Description(msgspec.Struct, frozen=True, array_like=True):
    """The description of a part: its encoded header, and start and size of each piece of its payload; or the encoded
    fault of the leader, which could not read a part."""

    header: bytes = b""
    pieces: tuple[tuple[int, int], ...] = ()
    fault: bytes = b""


def send_parts(
    siblings: Siblings,
    wanted: Sequence[bytes],
    own: Columns,
    read: Callable[[bytes], Mapping[str, Any]],
    deadline: Deadline,
) -> Columns:
    """Read the part that each rank wants and send it, on the leader. wanted: by rank, encoded. own: returns the
    leader's columns, which are sent to the ranks that want the same. Return `own`, or a function that raises the first
    error of `read`, which all remaining ranks get instead of their parts."""
    failed: Exception | None = None
    for part in dict.fromkeys(wanted):
        ranks = [rank for rank, each in enumerate(wanted) if each == part and rank != siblings.rank]
        packed: PackedBatch | None = None
        if ranks and failed is None:
            try:
                packed = pack(own() if part == wanted[siblings.rank] else read(part))
            except Exception as error:
                failed = error
        for rank in ranks:
            _send(siblings, rank, packed, failed, deadline)
        del packed  # before the next part is read
    return own if failed is None else partial(_raise, failed)


def _send(
    siblings: Siblings, rank: int, packed: PackedBatch | None, failed: Exception | None, deadline: Deadline
) -> None:
    """Send a part, or the leader's error, to one rank."""
    if packed is None:
        assert failed is not None
        description = _Description(fault=Fault.of(failed, siblings.rank).encode())
    else:
        pieces = tuple((start, piece.numel()) for start, piece in packed.pieces if piece.numel())
        description = _Description(packed.header.encode(), pieces)
    message = msgspec.msgpack.encode(description)
    siblings.send(_tensor(len(message).to_bytes(8, "little")), rank, deadline)
    siblings.send(_tensor(message), rank, deadline)
    for _, piece in packed.pieces if packed is not None else ():
        if piece.numel():
            siblings.send(piece, rank, deadline, purpose="payload")


def receive_part(siblings: Siblings, leader: int, deadline: Deadline) -> Columns:
    """Receive the part that this rank wants. Return a function that returns its columns, on the group's device, or
    raises the leader's error."""
    device = siblings.device

    def received(size: int) -> bytes:
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        siblings.receive(buffer, leader, deadline)
        return bytes(buffer.cpu().numpy())

    size = int.from_bytes(received(8), "little")
    description = msgspec.msgpack.decode(received(size), type=_Description)
    if description.fault:
        return partial(_raise, Fault.decode(description.fault).to_error(siblings.name(leader)))
    header = Header.decode(description.header)
    flat = torch.empty(header.payload_bytes, dtype=torch.uint8, device=device)
    for start, nbytes in description.pieces:
        siblings.receive(flat[start : start + nbytes], leader, deadline, purpose="payload")
    return partial(unpack, header, flat)


class Transfer(NamedTuple):
    """Bytes that the leader needs, at least one: `piece` returns them (uint8 `[nbytes]`) on the rank `sender`, and
    `place` stores them on the leader."""

    sender: int
    nbytes: int
    piece: Callable[[], torch.Tensor]
    place: Callable[[torch.Tensor], None]


def gather_parts(
    siblings: Siblings, transfers: Sequence[Transfer], leader: int, deadline: Deadline
) -> Callable[[], None]:
    """Make the transfers, the same on all ranks, one after another. Return a function that raises the first error of
    `place` on the leader, which receives the rest nevertheless, so that no sibling waits."""
    failed: Exception | None = None
    for transfer in transfers:
        if siblings.rank == leader:
            received = None if transfer.sender == leader else _received(siblings, transfer, deadline)
            if failed is None:
                try:
                    transfer.place(transfer.piece() if received is None else received)
                except Exception as error:
                    failed = error
            del received  # before the next one is received
        elif siblings.rank == transfer.sender:
            siblings.send(transfer.piece(), leader, deadline, purpose="payload")
    return (lambda: None) if failed is None else partial(_raise, failed)


def _received(siblings: Siblings, transfer: Transfer, deadline: Deadline) -> torch.Tensor:
    buffer = torch.empty(transfer.nbytes, dtype=torch.uint8, device=siblings.device)
    siblings.receive(buffer, transfer.sender, deadline, purpose="payload")
    return buffer


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _raise(error: Exception) -> NoReturn:
    raise error
