"""The data plane mixin for policy workers, which fetches a rank's shard by meta and writes results back.

Mix `TQWorkerMixin` into a worker class whose `train`, `get_logprobs` and `get_reference_policy_logprobs` take batches.
It adds `*_presharded` methods that take a `KVBatchMeta` instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from dataplane import (
    BatchedDataDict,
    ContextParallel,
    DataPlaneClient,
    DataPlaneConfig,
    KVBatchMeta,
    StreamingDataLoader,
    build_data_plane_client,
    materialize,
    shard_meta_for_dp,
    write_columns,
)
from dataplane.core.durations import as_timeout
from dataplane.core.schema import (
    ELEM_COUNTS_PER_GB,
    GLOBAL_FORWARD_PAD_SEQLEN,
    INPUT_IDS,
    MICRO_BATCH_INDICES,
    MICRO_BATCH_LENGTHS,
    PREV_LOGPROBS,
    REFERENCE_POLICY_LOGPROBS,
    TOKEN_ALIGNED_FIELDS,
    Layout,
)
from dataplane.data.columns import require_fields
from dataplane.data.object_codec import describe_tensor, plain_tensor
from dataplane.data.row_parts import Inner, Tokens
from dataplane.errors import InvalidRequestError
from dataplane.training.data_loader import Form, MicroBatch, Take
from workers.placement.sharding import DATA_PARALLEL_AXIS, REPLICATED_AXES, NamedSharding
from workers.training.replica_group import FETCH_TIMEOUT_S, POLICIES, FetchPolicy, RankFetch, ReplicaGroup
from workers.training.stages import IS_REPLICA_LEADER, Stage, packing_arguments, rows_per_batch, stage_of

TOKEN_ID_FIELDS = (INPUT_IDS, "prompts", "responses", "prompt_ids_for_adv")
"""Columns of token ids, by their names in NeMo-RL and verl. They are padded with the tokenizer's pad id."""
_META = "\0meta"
"""Name of the column that transports the meta of a streamed micro-batch."""
Preprocess = Callable[[Any, BatchedDataDict[Any]], BatchedDataDict[Any]]


class PolicyWorker(Protocol):
    """The host class that `TQWorkerMixin` is mixed into: the three methods that the `*_presharded` methods call.

    Each takes a batch of this rank's samples with padded per-token columns `[N, S]`. The log-prob methods return
    mappings with a per-token tensor `[N, S]` under "logprobs" and "reference_logprobs".
    """

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> Any: ...

    def get_logprobs(self, *, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> Any: ...

    def get_reference_policy_logprobs(
        self, *, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> Any: ...


class SplitStepWorker(Protocol):
    """The additional methods of a host whose driver splits train steps into parts: `begin_train_step`, one
    `train_microbatch` per part, then `finish_train_step` or `abort_train_step`.

    The host keeps the state of the open step. At most one is open; a second `begin_train_step` raises.
    `train_microbatch` accumulates gradients and counts of a batch of this rank's samples, without a reduction over
    data-parallel ranks. `finish_train_step` reduces, divides by the counts of the whole step, steps the optimizer and
    returns the same as `train`. `abort_train_step` drops the accumulated values without an optimizer step; it has no
    effect without an open step.
    """

    def begin_train_step(self, *, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None: ...

    def train_microbatch(self, *, data: BatchedDataDict[Any]) -> None: ...

    def finish_train_step(self) -> Any: ...

    def abort_train_step(self) -> None: ...


SPLIT_STEP = ("begin_train_step", "train_microbatch", "finish_train_step", "abort_train_step")


class _Hosted(PolicyWorker, SplitStepWorker, Protocol):
    """The type of `self` in the entrypoints: the mixin together with its host."""

    def _fetch(self, meta: KVBatchMeta) -> BatchedDataDict[Any]: ...

    def _with_micro_batches(self, meta: KVBatchMeta, stage: Stage) -> KVBatchMeta: ...

    def _is_replica_leader(self) -> bool: ...

    def _attach_or_repack_pack_metadata(
        self, data: BatchedDataDict[Any], meta: KVBatchMeta
    ) -> BatchedDataDict[Any]: ...

    def _write_back_result_field(self, meta: KVBatchMeta, result: Any, *, result_key: str, tq_field: str) -> None: ...


class SharedStream:
    """A stream's `Replicas`. Each micro-batch is one `ReplicaGroup.fetch`, made when a rank
    requests the next one.

    leads: whether this rank claims. digest: 16 bytes, equal for equal arguments of the streams.
    replicas: its timeout covers the leader's wait for a micro-batch.
    """

    def __init__(self, replicas: ReplicaGroup, *, leads: bool, digest: bytes) -> None:
        self._replicas = replicas
        self._leads = leads
        self._digest = digest

    @property
    def leads(self) -> bool:
        return self._leads

    @property
    def device(self) -> torch.device | None:
        return self._replicas.gpu

    def share(self, take: Take, form: Form) -> MicroBatch | None:
        """Return the next micro-batch on every rank, or None at the end of the stream. The leader
        calls `take`; every rank calls `form` on the columns. See
        `dataplane.training.data_loader.Replicas`.

        This makes collective calls: use the same thread and the same order as for all others on the
        replica group. Raises the errors of `ReplicaGroup.fetch`.
        """

        def read() -> Mapping[str, Any]:
            """Return the columns of the next micro-batch with its meta; nothing at the end. Runs on
            the leader."""
            micro_batch = take()
            return {} if micro_batch is None else {**micro_batch.data, _META: micro_batch.meta}

        def finish(columns: BatchedDataDict[Any]) -> MicroBatch | None:
            """Make the micro-batch from the columns that the leader has read. Runs on every
            rank."""
            meta = columns.pop(_META, None)
            return None if meta is None else MicroBatch(form(columns, meta), meta)

        rank_fetch = RankFetch(leads=lambda: self._leads, digest=lambda: self._digest, read=read)
        return self._replicas.fetch(rank_fetch, "leader_broadcast", finish)


def _cut_at_pad_length(tokens: Tokens | None, pad_length: int, meta: KVBatchMeta) -> Tokens | None:
    """Return the token ranges of a batch: a context-parallel rank cuts rows that are padded to
    `pad_length` (0: not padded). InvalidRequestError if the pad length that the driver has set does
    not fit."""
    if not isinstance(tokens, ContextParallel) or tokens.pad_to or not pad_length:
        return tokens
    try:
        cut = replace(tokens, pad_to=pad_length)
        cut.ranges(np.array(meta.sequence_lengths or [], np.int64))
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"{GLOBAL_FORWARD_PAD_SEQLEN}={pad_length}, which the driver has set in the meta, cannot "
            f"be the pad_to of {tokens}: {error}. Let the driver set a larger one or round it up "
            "(pad_to_multiple), or pass a pad_to, or dp_aligned_seq_len=False"
        ) from error
    return cut


def _meta_digest(meta: KVBatchMeta, form: str) -> bytes:
    """Return a digest of 16 bytes, equal for metas with the same samples (generations included) and
    fields, and for an equal `form`: layout and pad length of the batch."""
    digest = hashlib.blake2b(digest_size=16)
    # Each text is preceded by its length, and "" separates fields from samples: different lists
    # give different bytes.
    for text in (meta.partition_id, form, *(meta.fields or ()), "", *meta.sample_ids):
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    for array in meta.handles or ():
        digest.update(array.tobytes())
    return digest.digest()


class TQWorkerMixin:
    """Per-rank fetch and write-back through the data plane.

    The host must override `_local_coords`, and `_get_replica_group` if it has siblings. It can set `cfg` (the settings
    of `workers.training.stages`), `tokenizer` (see `_pad_value_dict`) and `fetch_timeout_s`.

    The batches that its methods get contain the micro-batches of packing or dynamic batching, if enabled. Iterate over
    them with `data.get_batch(number)` (a global batch) and its `make_microbatch_iterator_for_packable_sequences` or
    `make_microbatch_iterator_with_dynamic_shapes`.
    """

    _dp_client: DataPlaneClient | None = None  # from `setup_data_plane` to `close_data_plane`
    _replicas: ReplicaGroup | None = None  # of the host's last process group, see `_current_replica_group`
    fetch_timeout_s: float | None = FETCH_TIMEOUT_S
    """Timeout of a fetch through siblings. A host that raises its client's `reconnect_s` must raise this, too."""

    # --- the data plane -----------------------------------------------------------------------------------------

    def setup_data_plane(self, cfg: DataPlaneConfig | Mapping[str, Any]) -> None:
        """Attach to the running service that `cfg` names. The driver calls this once; later calls have no effect.

        It never starts a service: ValueError without an address, `ServiceUnavailableError` without a response.
        """
        if self._dp_client is None:
            self._dp_client = build_data_plane_client(cfg, bootstrap=False)

    def close_data_plane(self) -> None:
        """Close this worker's client. Idempotent."""
        client, self._dp_client = self._dp_client, None
        if client is not None:
            client.close()

    def _require_dp_client(self) -> DataPlaneClient:
        """Return the client. RuntimeError before `setup_data_plane` and after `close_data_plane`."""
        if self._dp_client is None:
            raise RuntimeError(
                f"{type(self).__name__} has no data plane client: the driver must call setup_data_plane(cfg) on every "
                "worker before the first *_presharded call"
            )
        return self._dp_client

    # --- the host's place in the parallel layout ----------------------------------------------------------------

    def _get_replica_group(self) -> Any | None:
        """Return the process group of this rank's siblings: the ranks along the replicated axes with the same
        data-parallel rank. None without siblings (TP = CP = PP = 1). A host with siblings must override this."""
        return None

    def _local_coords(self) -> dict[str, int]:
        """Return this rank's position on each axis (`workers.REPLICATED_AXES`, "data_parallel"). A missing axis means 0
        (`stream` with `dp_world` requires "data_parallel").

        A host must override this. A default would make every rank a leader, and all ranks would write the same rows.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must override _local_coords() and return its position on each parallel axis, e.g. "
            "{'data_parallel': 0, 'tensor_parallel': 1}; without it every rank would write back as a leader"
        )

    def _is_replica_leader(self) -> bool:
        """Whether this rank is at 0 on every replicated axis. Only such a rank fetches for siblings and writes back."""
        return NamedSharding.is_axis_zero(self._local_coords(), REPLICATED_AXES)

    def _pad_value_dict(self) -> dict[str, Any]:
        """Return the pad value of each per-token field. Fields without an entry are padded with 0.

        By default, fields of token ids (`TOKEN_ID_FIELDS`) get the `pad_token_id` of the host's `tokenizer`, if set. An
        override in the host replaces the whole mapping.
        """
        pad_id = getattr(getattr(self, "tokenizer", None), "pad_token_id", None)
        return {} if pad_id is None else dict.fromkeys(TOKEN_ID_FIELDS, pad_id)

    def _forward_pad_seqlen(self, meta: KVBatchMeta) -> int:
        """Return the length that every data-parallel rank pads to, from `meta.extra_info`. Return 0 (pad to this rank's
        longest row) if the driver set none."""
        return int(meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN, 0))

    # --- fetch --------------------------------------------------------------------------------------------------

    def _fetch(
        self,
        meta: KVBatchMeta,
        *,
        layout: Layout = "padded",
        fetch_policy: FetchPolicy = "auto",
        preprocess: Preprocess | None = None,
        dp_aligned_seq_len: bool = True,
        tokens: Tokens | None = None,
        inner: Inner | None = None,
    ) -> BatchedDataDict[Any]:
        """Fetch the fields of `meta` for this rank's samples. All siblings get the same batch, or
        each its own part.

        layout: "padded" returns per-token columns `[N, S, ...]`, "jagged" returns nested ones. S is
        the pad length that the driver set, the same on all data-parallel ranks; with
        `dp_aligned_seq_len=False` it is this rank's longest row. Jagged columns that are not
        per-token, such as images, are padded to their own longest row (see `materialize`).
        fetch_policy: with "auto" the leader fetches and broadcasts to its siblings, if any.
        "leader_broadcast" does the same, but raises ValueError if `_get_replica_group` returns None
        (the rank of a group of one fetches). With "independent" every rank fetches. preprocess:
        `(worker, batch) -> batch`, called on every rank with the batch before it is returned.

        tokens, inner: the part of the rows that this rank needs, as in `DataPlaneClient.get_batch`.
        Each rank then reads for itself, as with "independent" (ValueError for "leader_broadcast").
        A `ContextParallel` without `pad_to` cuts rows that count as padded to S, if the driver has
        set it; other ranges are padded to this rank's longest part.

        After a broadcast, the tensors are on the device of the group's backend (NCCL, HCCL or XCCL:
        the accelerator; Gloo: the CPU), otherwise on the CPU. Blocks for the data plane, and for
        siblings up to `fetch_timeout_s`. If one rank of a replica group fails, all raise (see
        `ReplicaGroup.fetch`). Raises the errors of `DataPlaneClient.get_batch`.
        """
        if fetch_policy not in POLICIES:
            raise ValueError(f"fetch_policy must be one of {', '.join(POLICIES)}, got {fetch_policy!r}")
        row_parts = tokens is not None or inner is not None
        if fetch_policy == "leader_broadcast" and row_parts:
            raise ValueError(
                "fetch_policy='leader_broadcast' sends whole rows, but tokens= or inner= asks for a part: use 'auto'"
            )
        if fetch_policy == "leader_broadcast" and self._get_replica_group() is None:
            raise ValueError("fetch_policy='leader_broadcast' needs a replica group; _get_replica_group() gave None")
        policy: FetchPolicy = "independent" if row_parts else fetch_policy
        replicas = self._current_replica_group()

        def pad_length() -> int:
            """Return the length to pad to; 0: this rank's longest row."""
            return self._forward_pad_seqlen(meta) if dp_aligned_seq_len and layout == "padded" else 0

        def prepared(batch: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
            return batch if preprocess is None else preprocess(self, batch)

        if replicas is None or policy == "independent":
            if replicas is not None:
                replicas.agree(self._is_replica_leader, policy)
            batch = self._require_dp_client().get_batch(
                meta,
                layout=layout,
                pad_value_dict=self._pad_value_dict(),
                pad_to_seqlen=pad_length() if tokens is None else 0,
                tokens=_cut_at_pad_length(tokens, pad_length(), meta),
                inner=inner,
            )
            return prepared(batch)

        # These run within `ReplicaGroup.fetch`, which raises their errors on all siblings.
        def read() -> Mapping[str, Any]:
            """Return the jagged columns of the leader; each rank pads for itself."""
            return self._require_dp_client().get_batch(meta, layout="jagged", device=replicas.gpu)

        def finish(columns: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
            batch = materialize(
                columns,
                layout,
                pad_value_dict=self._pad_value_dict(),
                pad_to_seqlen=pad_length(),
                sequence_lengths=meta.sequence_lengths,
            )
            return prepared(batch)

        rank_fetch = RankFetch(
            leads=self._is_replica_leader,
            digest=lambda: _meta_digest(meta, f"{layout} {pad_length()}"),
            read=read,
        )
        return replicas.fetch(rank_fetch, policy, finish)

    def _current_replica_group(self) -> ReplicaGroup | None:
        """Return the `ReplicaGroup` of the host's current process group, or None without siblings. It is kept in
        `_replicas` and made again when the host has a new process group."""
        process_group = self._get_replica_group()
        if process_group is None:
            return None
        if self._replicas is None or self._replicas.process_group is not process_group:
            self._replicas = ReplicaGroup(process_group, timeout_s=self.fetch_timeout_s)
        self._replicas.timeout_s = self.fetch_timeout_s  # the host may have changed it
        return self._replicas if self._replicas.size > 1 else None

    def stream(
        self,
        partition_id: str,
        task_name: str,
        fields: Sequence[str],
        *,
        timeout_s: float | None = 60.0,
        **options: Any,
    ) -> StreamingDataLoader:
        """Stream micro-batches (data, meta) for this rank as they become ready. All siblings get the same: the leader
        claims and reads ahead, and broadcasts each when the ranks request it. See `StreamingDataLoader` for `options`.

        Pad values default to `_pad_value_dict`. With `dp_world`, `dp_rank` defaults to this rank's position on
        "data_parallel" (ValueError if `_local_coords` lacks it). Siblings must stream with the same arguments, and
        iterate and close in step.
        """
        timeout_s = as_timeout("timeout_s", timeout_s)
        dp_world = options.get("dp_world")
        if dp_world is not None and "dp_rank" not in options:
            coords = self._local_coords()
            if dp_world > 1 and DATA_PARALLEL_AXIS not in coords:
                raise ValueError(
                    f"{type(self).__name__}._local_coords() returned no {DATA_PARALLEL_AXIS!r}, so all ranks would "
                    f"stream the same share of dp_world={dp_world}: return this rank's position, or pass dp_rank"
                )
            options["dp_rank"] = coords.get(DATA_PARALLEL_AXIS, 0)
        options.setdefault("pad_value_dict", self._pad_value_dict())
        shared = None
        replicas = self._current_replica_group()
        if replicas is not None:
            fetch_timeout_s = as_timeout("fetch_timeout_s", self.fetch_timeout_s)
            # Siblings with other arguments get another digest, so the first fetch raises on all.
            arguments = repr((partition_id, task_name, list(fields), timeout_s, sorted(options.items())))
            shared = SharedStream(
                ReplicaGroup(replicas.process_group, timeout_s=timeout_s + fetch_timeout_s),  # claim and fetch
                leads=self._is_replica_leader(),
                digest=hashlib.blake2b(arguments.encode(), digest_size=16).digest(),
            )
        client = self._require_dp_client()
        return StreamingDataLoader(
            client, partition_id, task_name, fields, timeout_s=timeout_s, replicas=shared, **options
        )

    # --- packing ------------------------------------------------------------------------------------------------

    def _with_micro_batches(self, meta: KVBatchMeta, stage: Stage) -> KVBatchMeta:
        """Return `meta` with micro-batches in its `extra_info`, and its samples in the order of the micro-batches. The
        driver's are used if present. Otherwise they are computed with the stage's budget, if `self.cfg` configures
        them; else `meta` is returned unchanged.

        This precedes the fetch, so that results are written back to the right samples. A meta without lengths is
        returned unchanged for the stage "train", which writes nothing back: `_apply_packing_prep` reorders its batch
        after the fetch. For other stages it raises ValueError. ValueError also for a sample over the budget.
        """
        info = meta.extra_info
        if MICRO_BATCH_INDICES in info or MICRO_BATCH_LENGTHS in info:
            return meta
        arguments = packing_arguments(getattr(self, "cfg", None), stage)
        if not arguments or (stage == "train" and meta.sequence_lengths is None):
            return meta
        rows = rows_per_batch(info.get(ELEM_COUNTS_PER_GB))
        metas, _ = shard_meta_for_dp(meta, dp_world=1, batch_size=rows, **arguments)  # one shard: only reordered
        return metas[0]

    def _apply_packing_prep(self, data: BatchedDataDict[Any], *, stage: Stage = "train") -> BatchedDataDict[Any]:
        """Split `data` into the micro-batches that `self.cfg` configures, with the stage's budget, by its column of
        lengths. The rows of each global batch (`elem_counts_per_gb`, else one batch) are in the order of the
        micro-batches. Return `data` unchanged without such settings.

        KeyError without the column of lengths ("input_lengths" unless the settings name another).
        """
        arguments = packing_arguments(getattr(self, "cfg", None), stage)
        if not arguments:
            return data
        options: dict[str, Any] = {"batch_size": rows_per_batch(data.elem_counts_per_gb), **arguments}
        sharded = data.shard_by_batch_size(1, **options)
        assert isinstance(sharded, tuple)  # with micro-batches: (shards, their order)
        return sharded[0][0]  # the only shard

    def _attach_or_repack_pack_metadata(self, data: BatchedDataDict[Any], meta: KVBatchMeta) -> BatchedDataDict[Any]:
        """Attach the micro-batches in `meta.extra_info` to `data`. Without any, apply `_apply_packing_prep` for the
        stage of the meta's task.

        The driver's micro-batches are not recomputed: the driver balanced all data-parallel ranks together. A rank that
        packs again can get another number of micro-batches than the others and deadlock. ValueError for indices without
        lengths or lengths without indices.
        """
        info = meta.extra_info
        if ELEM_COUNTS_PER_GB in info:
            data.elem_counts_per_gb = info[ELEM_COUNTS_PER_GB]
        if MICRO_BATCH_INDICES not in info and MICRO_BATCH_LENGTHS not in info:
            return self._apply_packing_prep(data, stage=stage_of(meta.task_name))
        for key in (MICRO_BATCH_INDICES, MICRO_BATCH_LENGTHS):
            if key not in info:
                raise ValueError(f"meta.extra_info lacks {key!r}: packing metadata needs both indices and lengths")
        data.micro_batch_indices = info[MICRO_BATCH_INDICES]
        data.micro_batch_lengths = info[MICRO_BATCH_LENGTHS]
        return data

    # --- write-back ---------------------------------------------------------------------------------------------

    def _write_back(
        self, meta: KVBatchMeta, fields: dict[str, torch.Tensor], *, dp_aligned_seq_len: bool = True
    ) -> None:
        """Store new columns of the meta's samples on the leader, whole rows. On other ranks, do
        nothing: ranks that have parts of the rows gather them on the leader before this.

        Per-token tensors `[N, S, ...]` are cut to the samples' lengths and stored as jagged. These
        are all tensors whose S is that of the batch, and those with a name in
        `schema.TOKEN_ALIGNED_FIELDS`. A `FieldSpec("dense")` of the partition takes precedence.
        dp_aligned_seq_len: as in the `_fetch` of the batch. TypeError for values other than
        tensors. ValueError for another number of rows or rows narrower than their sample; it names
        the field and its shape. `StaleSampleError` (a KeyError) if a sample was cleared since the
        meta was made; then no column is stored.
        """
        if self._is_replica_leader():
            pad_length = self._forward_pad_seqlen(meta) if dp_aligned_seq_len else 0
            _store_rows(self._require_dp_client(), meta, fields, pad_length)

    def _write_back_result_field(
        self, meta: KVBatchMeta, result: Any, *, result_key: str, tq_field: str, dp_aligned_seq_len: bool = True
    ) -> None:
        """Store `result[result_key]` of a worker method as column `tq_field`, as `_write_back`
        does.

        Raises the errors of `_write_back`. TypeError if `result` is not a mapping or the value is
        not a tensor. KeyError if it lacks `result_key`. ValueError for log-probs without a token
        dimension. Each error names the key, the type and the shapes.
        """
        if self._is_replica_leader():
            fields = _result_field(meta, result, result_key, tq_field)
            self._write_back(meta, fields, dp_aligned_seq_len=dp_aligned_seq_len)

    # --- entrypoints --------------------------------------------------------------------------------------------

    def train_presharded(
        self: _Hosted,
        meta: KVBatchMeta,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> Any:
        """Fetch this rank's samples and train on them. Return the result of `train`."""
        meta = self._with_micro_batches(meta, "train")
        data = self._attach_or_repack_pack_metadata(self._fetch(meta), meta)
        return self.train(data, loss_fn=loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs)

    def get_logprobs_presharded(self: _Hosted, meta: KVBatchMeta, micro_batch_size: int | None = None) -> None:
        """Fetch, call `get_logprobs`, and write `result["logprobs"]` back as "prev_logprobs".

        Return None: the tensor is in the data plane, and this worker keeps no reference to it.
        """
        meta = self._with_micro_batches(meta, "logprob")
        data = self._attach_or_repack_pack_metadata(self._fetch(meta), meta)
        result = self.get_logprobs(data=data, micro_batch_size=micro_batch_size)
        self._write_back_result_field(meta, result, result_key="logprobs", tq_field=PREV_LOGPROBS)

    def get_reference_policy_logprobs_presharded(
        self: _Hosted, meta: KVBatchMeta, micro_batch_size: int | None = None
    ) -> None:
        """Fetch, call `get_reference_policy_logprobs`, and write `result["reference_logprobs"]` back as
        "reference_policy_logprobs"."""
        meta = self._with_micro_batches(meta, "logprob")
        data = self._attach_or_repack_pack_metadata(self._fetch(meta), meta)
        result = self.get_reference_policy_logprobs(data=data, micro_batch_size=micro_batch_size)
        self._write_back_result_field(meta, result, result_key="reference_logprobs", tq_field=REFERENCE_POLICY_LOGPROBS)

    # --- a train step in parts: the host needs the methods of `SplitStepWorker` ---------------------------------

    def begin_train_step_presharded(
        self: _Hosted, loss_fn: Any, gbs: int | None = None, mbs: int | None = None
    ) -> None:
        """Open a step with `begin_train_step`, without a fetch. TypeError if the host is not a `SplitStepWorker`."""
        missing = [name for name in SPLIT_STEP if not hasattr(self, name)]
        if missing:
            raise TypeError(
                f"{type(self).__name__} lacks {', '.join(missing)}: train steps in parts require "
                f"{', '.join(SPLIT_STEP)} (see SplitStepWorker)"
            )
        self.begin_train_step(loss_fn=loss_fn, gbs=gbs, mbs=mbs)

    def train_microbatch_presharded(self: _Hosted, meta: KVBatchMeta) -> None:
        """Fetch this rank's part of the samples and add it to the open step with `train_microbatch`.

        Return None: `finish_train_step_presharded` returns the results of the whole step.
        """
        meta = self._with_micro_batches(meta, "train")
        data = self._attach_or_repack_pack_metadata(self._fetch(meta), meta)
        self.train_microbatch(data=data)

    def finish_train_step_presharded(self: _Hosted) -> dict[str, Any]:
        """Close the open step. Return the result of `finish_train_step`, and "is_replica_leader", so that the caller
        can ignore the copies of siblings. TypeError if the result is not a mapping."""
        result = self.finish_train_step()
        if not isinstance(result, Mapping):
            raise TypeError(f"finish_train_step() must return a mapping of results, got {type(result).__name__}")
        return {**result, IS_REPLICA_LEADER: self._is_replica_leader()}

    def abort_train_step_presharded(self: _Hosted) -> None:
        """Drop the open step, if any, with `abort_train_step`. The worker can then begin another step."""
        if hasattr(self, "abort_train_step"):  # a host without it cannot have an open step
            self.abort_train_step()


def _store_rows(
    client: DataPlaneClient, meta: KVBatchMeta, fields: Mapping[str, torch.Tensor], pad_length: int
) -> None:
    """Store columns of the meta's samples. pad_length: of the batch, 0 for the longest sample;
    other padded columns of this width are per-token, too.

    TypeError for values other than ordinary tensors, ValueError for another number of rows. Errors
    of `write_columns`.
    """
    require_fields(fields)
    for name, value in fields.items():
        what = f"write-back of {name!r}"
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{what}: expected a tensor, got {type(value).__name__}")
        if value.is_meta or (not value.is_nested and plain_tensor(value) is None):
            raise TypeError(f"{what}: {describe_tensor(value)} cannot be stored")
        if value.dim() == 0 or value.size(0) != meta.size:
            nested = f"{value.size(0)} nested rows"
            got = nested if value.is_nested else f"shape {list(value.shape)}"
            raise ValueError(f"{what}: expected {meta.size} rows, one per sample of the meta, got {got}")
    width = pad_length or max(meta.sequence_lengths or [0])
    per_token = set(TOKEN_ALIGNED_FIELDS)
    for name, value in fields.items():
        if not value.is_nested and value.dim() > 1 and value.size(1) == width:  # [N, S, ...]
            per_token.add(name)
    write_columns(client, meta, fields, token_aligned_fields=per_token)


def _result_field(meta: KVBatchMeta, result: Any, result_key: str, tq_field: str) -> dict[str, torch.Tensor]:
    """Return `result[result_key]` of a worker method as the field `tq_field`.

    TypeError if `result` is not a mapping or the value is not a tensor. KeyError if it lacks
    `result_key`. ValueError for log-probs without a token dimension. Each error names the key, the
    type and the shapes.
    """
    if not isinstance(result, Mapping):
        got = type(result).__name__
        raise TypeError(f"the method must return a mapping with {result_key!r}, got {got}")
    keys = [*result.keys()]
    if result_key not in keys:
        known = ", ".join(map(str, keys)) or "nothing"
        raise KeyError(f"the result has no {result_key!r}; it has {known}")
    value = result[result_key]
    what = f"result[{result_key!r}] (for {tq_field!r})"
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what}: expected a tensor, got {type(value).__name__}")
    logprobs = tq_field in (PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS)
    if logprobs and not value.is_nested and value.dim() < 2:
        raise ValueError(f"{what}: expected a per-token tensor [{meta.size}, S], got shape {list(value.shape)}")
    return {tq_field: value}
