"""The memory of a host whose ranks need parts of the routed experts: 2 context-parallel x 4 tensor-parallel ranks x 4
pipeline stages, one replica group of 32 ranks, as threads of one process.

`python -m benchmarks.host` prints the table of `docs/concepts/row_parts.md`. `--megabytes`: size of the rows.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataplane import ContextParallel, DataPlaneClient, KVBatchMeta, connect, serve
from dataplane.core.inner_slice import InnerSlice
from workers.training.mixin import TQWorkerMixin
from workers.training.replica_collectives import Deadline, Siblings
from workers.training.replica_fetch import ReplicaGroup

CONTEXT, TENSOR, STAGES = 2, 4, 4
RANKS = CONTEXT * TENSOR * STAGES
SAMPLES, LAYERS, TOP_K = 64, 47, 4
STAGE_LAYERS = -(-LAYERS // STAGES)
PARTITION, FIELD = "train", "routed_experts"
WAIT_S = 300.0


@dataclass(frozen=True)
class Measured:
    """asked: bytes of the results of all ranks of a step. unit: bytes that the storage unit sent. arena: bytes that
    were copied out of the mapped arena as slices. peak: growth of the process's memory."""

    asked: int
    unit: int
    arena: int
    peak: int


def measure(megabytes: int, *, remote: bool) -> dict[str, Measured]:
    """Run each step of `_Host` in a process of its own, with rows of about `megabytes`, and check its results."""
    lengths = _lengths(megabytes)
    with serve({"capacity_bytes": (megabytes * 5 // 2 + 64) << 20}) as server, connect(server.address) as client:
        client.register_partition(PARTITION, [FIELD, "replayed"], None, [])
        ids = [f"s{sample}" for sample in range(SAMPLES)]
        for sample, length in enumerate(lengths):
            client.put_samples([ids[sample]], PARTITION, {FIELD: [torch.from_numpy(experts(sample, length))]})
        counts = server._units[0]._counts
        ours, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=_serve_steps, args=(theirs, server.address, ids, lengths, remote), daemon=True)
        process.start()
        theirs.close()
        measured = {}
        try:
            for step in STEPS:
                ours.send(step)
                ours.recv()  # ready
                before = counts.read_bytes
                ours.send("go")
                asked, arena, peak = ours.recv()
                measured[step] = Measured(asked, counts.read_bytes - before, arena, peak)
        finally:
            ours.close()
            process.join(WAIT_S)
        return measured


def _lengths(megabytes: int) -> list[int]:
    mean = megabytes * 1_000_000 // (SAMPLES * LAYERS * TOP_K * 2)
    chance = np.random.default_rng(0)
    return [int(length) for length in chance.integers(mean // 2, mean * 3 // 2, SAMPLES)]


def experts(sample: int, length: int) -> Any:
    """Return the row of a sample, int16 `[length, LAYERS, TOP_K]`."""
    tokens = np.arange(length, dtype=np.int16)[:, None] * np.int16(191) + np.int16(sample)
    return (tokens + np.arange(LAYERS * TOP_K, dtype=np.int16)).reshape(length, LAYERS, TOP_K)


def place_of(rank: int) -> tuple[int, int, int]:
    """Return the context-parallel and tensor-parallel rank and the pipeline stage."""
    context, rest = divmod(rank, TENSOR * STAGES)
    return context, *divmod(rest, STAGES)


def part_of(rank: int) -> dict[str, Any]:
    """Return the arguments of `_fetch` for the part of a rank."""
    context, _, stage = place_of(rank)
    layers = slice(stage * STAGE_LAYERS, (stage + 1) * STAGE_LAYERS)  # the last stage has fewer
    return {"tokens": ContextParallel(rank=context, size=CONTEXT), "inner": {FIELD: layers}}


# --- the process of the ranks -----------------------------------------------------------------------------------


def _serve_steps(pipe: Connection, address: str, ids: list[str], lengths: list[int], remote: bool) -> None:
    """Run the steps that the pipe names, each with a client of its own: the memory that a client keeps for results
    would hide the peak of the next step."""
    host: _Host | None = None
    while True:
        try:
            step = pipe.recv()
        except EOFError:
            return
        with connect(address, force_remote=remote) as client:
            host = host or _Host(client, ids, lengths)
            host.begin(client, maps=not remote)
            pipe.send("ready")
            pipe.recv()
            pipe.send(host.run(STEPS[step]))


class _Host:
    """The ranks of a host. Each step returns the bytes of its results, which are checked after the measurement."""

    def __init__(self, client: DataPlaneClient, ids: list[str], lengths: list[int]) -> None:
        self.client = client
        self.lengths = lengths
        self.meta = KVBatchMeta(PARTITION, "train", ids, [FIELD], sequence_lengths=lengths)
        shared = _Shared(RANKS)
        self.ranks = [_Rank(number, shared) for number in range(RANKS)]
        self.threads = ThreadPoolExecutor(RANKS)
        self.batches: list[Any] = []
        self.sliced_bytes = 0
        self._count_slices()

    def begin(self, client: DataPlaneClient, *, maps: bool) -> None:
        """Prepare a step. maps: touch all pages of the arena, which the client maps, so that the peak is without
        them."""
        self.client = client
        for rank in self.ranks:
            rank._dp_client = client
        client.get_batch(self.meta, tokens=(0, 1))  # connects to the unit
        for number in range(SAMPLES if maps else 0):
            rows = client.get_samples(self.meta.slice(number, number + 1), PARTITION, [FIELD], copy=False)
            rows[FIELD].values().reshape(-1)[::512].sum()

    def run(self, step: Callable[[_Host], int]) -> tuple[int, int, int]:
        """Return the bytes of the step's results, the bytes sliced from the arena, and the peak of the memory."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is what is held now
        before, sliced = _status("VmRSS"), self.sliced_bytes
        asked = step(self)
        return asked, self.sliced_bytes - sliced, _status("VmHWM") - before

    def whole_rows(self) -> int:
        rows = self.client.get_batch(self.meta, layout="jagged")[FIELD]
        return int(rows.values().nbytes)

    def one_part(self) -> int:
        rows = self.client.get_batch(self.meta, layout="jagged", **part_of(1))[FIELD]
        return int(rows.values().nbytes)

    def fetch_parts(self) -> int:
        self.batches = self._on_all_ranks(lambda rank: rank.fetch(self.meta))
        return sum(batch[FIELD].values().nbytes for batch in self.batches)

    def write_parts_back(self) -> int:
        self._on_all_ranks(lambda rank: rank.write_back(self.meta, self.batches[rank.number]))
        return sum(self.lengths) * LAYERS * TOP_K * 2

    def check(self) -> int:
        """Compare the fetched parts, the stored rows and the bytes between ranks with what they must be."""
        parts_bytes = [batch[FIELD].values().nbytes for batch in self.batches]
        once = [nbytes if place_of(rank)[1] == 0 else 0 for rank, nbytes in enumerate(parts_bytes)]
        exchanged = [rank.exchanged for rank in self.ranks]
        assert [fetched for fetched, _ in exchanged] == [sum(parts_bytes[1:]), *parts_bytes[1:]]
        assert [written for _, written in exchanged] == [sum(once[1:]), *once[1:]], "copies are not sent"
        stored = self.client.get_samples(self.meta, PARTITION, ["replayed"], copy=False)["replayed"]
        parts = [batch[FIELD].unbind() for batch in self.batches]
        for sample, (length, row) in enumerate(zip(self.lengths, stored.unbind(), strict=True)):
            whole = torch.from_numpy(experts(sample, length))
            assert row.equal(whole), sample
            for rank in range(RANKS):
                part = part_of(rank)
                (starts,), (stops,) = part["tokens"].ranges(np.array([length]))
                tokens = torch.cat([whole[first:last] for first, last in zip(starts, stops, strict=True)])
                assert parts[rank][sample].equal(tokens[:, part["inner"][FIELD]]), (rank, sample)
        return 0

    def _on_all_ranks(self, call: Callable[[_Rank], Any]) -> list[Any]:
        return list(self.threads.map(call, self.ranks))

    def _count_slices(self) -> None:
        copy = InnerSlice.copy

        def counted(inner: InnerSlice, buffer: Any, offset: int, elements: int, target: Any) -> None:
            self.sliced_bytes += target.nbytes
            copy(inner, buffer, offset, elements, target)

        InnerSlice.copy = counted  # type: ignore[method-assign]


STEPS: dict[str, Callable[[_Host], int]] = {
    "one rank reads whole rows": _Host.whole_rows,
    "one rank reads its part": _Host.one_part,
    "32 ranks fetch their parts": _Host.fetch_parts,
    "they write them back": _Host.write_parts_back,
    "check": _Host.check,
}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise KeyError(name)


class _Rank(TQWorkerMixin):
    """A rank of the replica group, a thread. Only the leader uses the client."""

    def __init__(self, number: int, shared: _Shared) -> None:
        self.number = number
        self._fetched = 0
        self._replicas = ReplicaGroup(_Group(number), siblings=_ThreadSiblings(number, shared))

    def _local_coords(self) -> dict[str, int]:
        context, tensor, stage = place_of(self.number)
        return {"context_parallel": context, "tensor_parallel": tensor, "pipeline_parallel": stage}

    def _get_replica_group(self) -> Any:
        assert self._replicas is not None
        return self._replicas.group

    @property
    def exchanged(self) -> tuple[int, int]:
        """The bytes that this rank sent or received for the fetch, and for the write-back."""
        return self._fetched, self._payload_bytes() - self._fetched

    def _payload_bytes(self) -> int:
        assert self._replicas is not None
        return self._replicas.siblings.bytes["payload"]

    def fetch(self, meta: KVBatchMeta) -> Any:
        batch = self._fetch(meta, layout="jagged", **part_of(self.number))
        self._fetched = self._payload_bytes()
        return batch

    def write_back(self, meta: KVBatchMeta, batch: Any) -> None:
        part = part_of(self.number)
        inner = {"replayed": part["inner"][FIELD]}
        self._write_back(meta, {"replayed": batch[FIELD]}, tokens=part["tokens"], inner=inner)


class _Group:
    """Stands for a process group."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return RANKS


class _Shared:
    """What the threads exchange: a value of each rank, and tensors from one to another."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self.values: list[Any] = [None] * size
        self.sent: defaultdict[tuple[int, int], queue.Queue[Any]] = defaultdict(queue.Queue)
        self.taken: defaultdict[tuple[int, int], queue.Queue[Any]] = defaultdict(queue.Queue)


class _ThreadSiblings(Siblings):
    """The collectives of `Siblings` among threads: a receiver copies the sender's buffer into its own."""

    def __init__(self, rank: int, shared: _Shared) -> None:
        super().__init__(_Group(rank))
        self._shared = shared

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def join(self, deadline: Deadline) -> None:
        pass

    def all_gather(self, mine: bytes, deadline: Deadline) -> list[bytes]:
        self._shared.values[self.rank] = mine
        self._shared.barrier.wait()
        values = list(self._shared.values)
        self._shared.barrier.wait()
        return values

    def broadcast(self, buffer: torch.Tensor, root: int, deadline: Deadline, *, purpose: str = "control") -> None:
        if self.rank == root:
            self._shared.values[root] = buffer
        self._shared.barrier.wait()
        if self.rank != root:
            buffer.copy_(self._shared.values[root])
        self._shared.barrier.wait()

    def send(self, buffer: torch.Tensor, to: int, deadline: Deadline, *, purpose: str = "control") -> None:
        self._shared.sent[self.rank, to].put(buffer)
        self._shared.taken[self.rank, to].get(timeout=WAIT_S)
        self._count(purpose, buffer.numel())

    def receive(self, buffer: torch.Tensor, sender: int, deadline: Deadline, *, purpose: str = "control") -> None:
        buffer.copy_(self._shared.sent[sender, self.rank].get(timeout=WAIT_S))
        self._shared.taken[sender, self.rank].put(None)
        self._count(purpose, buffer.numel())


# --- the table --------------------------------------------------------------------------------------------------


def table(megabytes: int) -> Iterator[str]:
    """Yield the lines of the table of all steps, over shared memory and remote."""
    yield "| step | asked for | local: sliced out of the arena | peak | remote: sent by the unit | peak |"
    yield "|---|---|---|---|---|---|"
    local, remote = (measure(megabytes, remote=each) for each in (False, True))
    for step in itertools.islice(STEPS, len(STEPS) - 1):
        here, there = local[step], remote[step]
        yield (
            f"| {step} | {_mb(here.asked)} | {_mb(here.arena)} | {_mb(here.peak)} | {_mb(there.unit)} | "
            f"{_mb(there.peak)} |"
        )


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="the memory of a host whose ranks need parts of rows")
    parser.add_argument("--megabytes", type=int, default=1020)
    print("\n".join(table(parser.parse_args().megabytes)))
