"""The driver's side of policy workers: steps, and calls that carry metas instead of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import ray

from dataplane import (
    BatchedDataDict,
    DataPlaneConfig,
    KVBatchMeta,
    build_data_plane_client,
    read_columns,
    shard_meta_for_dp,
    write_columns,
)
from dataplane.schema import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    GLOBAL_FORWARD_PAD_SEQLEN,
    INPUT_IDS,
    INPUT_LENGTHS,
    PAD_TO_MULTIPLE,
    PREV_LOGPROBS,
    REFERENCE_POLICY_LOGPROBS,
    SAMPLE_MASK,
    TOKEN_MASK,
    round_up,
)
from workers.group import RayWorkerGroup
from workers.ranks import DATA_PARALLEL_AXIS

STEP_FIELDS = (
    INPUT_IDS,
    INPUT_LENGTHS,
    TOKEN_MASK,
    SAMPLE_MASK,
    GENERATION_LOGPROBS,
    PREV_LOGPROBS,
    REFERENCE_POLICY_LOGPROBS,
    ADVANTAGES,
)
"""Columns that `prepare_step` declares; rollouts and stages may add others."""
STAGE_RESULTS = frozenset({GENERATION_LOGPROBS, PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, ADVANTAGES})
"""Columns that a forward pass for log-probs never reads."""
PREV_LP_TASK, REF_LP_TASK, TRAIN_TASK = "prev_lp", "ref_lp", "train"
SETUP_TIMEOUT_S = 120.0


class TQPolicy:
    """Policy workers as a driver sees them. It hands them metas; samples go between them and the data plane.

    worker_group: workers with `TQWorkerMixin`, whose `sharding_annotations` have an axis "data_parallel" (without one
    they are one data-parallel rank). dp_cfg: the data plane; with an address it is attached to, without one a service
    is started in this process, which ends with `close`. cfg: a mapping or an object with the policy's settings; read
    are train_global_batch_size, train_micro_batch_size, logprob_batch_size (each may be missing), sequence_packing and
    dynamic_batching. tq_partition_id: the partition of each step's samples.

    Blocks until every worker is attached. Each method raises what a failing worker raised, as soon as it does.
    """

    def __init__(
        self,
        worker_group: RayWorkerGroup,
        *,
        dp_cfg: DataPlaneConfig | Mapping[str, Any],
        cfg: Any,
        tq_partition_id: str = "train",
    ) -> None:
        if worker_group.sharding_annotations is None:
            raise ValueError("TQPolicy splits samples along named axes: give the worker group sharding_annotations")
        self.worker_group = worker_group
        self.sharding_annotations = worker_group.sharding_annotations
        self.cfg = cfg
        self.tq_partition_id = tq_partition_id
        self._written: dict[str, list[str]] = {}
        config = DataPlaneConfig.of(dp_cfg).with_environment()
        self.dp_client = build_data_plane_client(config, bootstrap=config.address is None)
        try:
            attached = worker_group.run_all_workers_single_data("setup_data_plane", cfg=self.dp_client.config)
            ray.get(attached, timeout=SETUP_TIMEOUT_S)
        except BaseException:
            self.dp_client.close()
            raise

    def close(self) -> None:
        """Close the driver's client, and the service if this policy started one. Idempotent; the workers live on."""
        self.dp_client.close()

    def shutdown(self) -> bool:
        """`close`, then end the workers; whether all went well."""
        self.close()
        return self.worker_group.shutdown()

    def __enter__(self) -> TQPolicy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- a step -------------------------------------------------------------------------------------------------

    def prepare_step(self, num_samples: int, group_size: int | None = None) -> None:
        """Register the step's partition: its columns, `num_samples` to come, the tasks "prev_lp", "ref_lp" and "train".

        group_size: responses per prompt, for claims of whole groups.
        """
        self._written.pop(self.tq_partition_id, None)
        self.dp_client.register_partition(
            self.tq_partition_id,
            list(STEP_FIELDS),
            num_samples,
            [PREV_LP_TASK, REF_LP_TASK, TRAIN_TASK],
            grpo_group_size=group_size,
        )

    def discard_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """Clear these samples and no others; ids that are not there are ignored."""
        self.dp_client.clear_samples(list(sample_ids), partition_id)

    def finish_step(self, meta: KVBatchMeta) -> None:
        """Clear the step's samples, and never others of the same ids: the counterpart of `prepare_step`."""
        self.dp_client.clear_samples(meta, meta.partition_id)
        self._written.pop(meta.partition_id, None)

    def _stamp_pad_seqlen(self, meta: KVBatchMeta) -> None:
        """Write into `meta.extra_info` the length that all data-parallel ranks pad to, unless it is there already: the
        longest sample, rounded up to `pad_to_multiple` and to dynamic batching's `sequence_length_round`."""
        if not meta.sequence_lengths or GLOBAL_FORWARD_PAD_SEQLEN in meta.extra_info:
            return
        multiple = int(meta.extra_info.get(PAD_TO_MULTIPLE, 1))
        dynamic = self._packing("dynamic_batching")
        if dynamic is not None:
            multiple = math.lcm(multiple, int(dynamic.get("sequence_length_round", 1)))
        meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = round_up(max(meta.sequence_lengths), multiple)

    # --- columns for the driver ---------------------------------------------------------------------------------

    def read_from_dataplane(
        self,
        meta: KVBatchMeta,
        *,
        select_fields: Sequence[str],
        pad_value_dict: Mapping[str, Any] | None = None,
    ) -> BatchedDataDict[Any]:
        """Columns of the samples, per-token ones padded to the length that the workers pad to."""
        self._stamp_pad_seqlen(meta)
        return read_columns(
            self.dp_client,
            meta,
            list(select_fields),
            pad_value_dict=pad_value_dict,
            pad_to_seqlen=int(meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN, 0)),
        )

    def write_to_dataplane(self, meta: KVBatchMeta, fields: Mapping[str, Any]) -> None:
        """Store columns that the driver computed, for samples that live; `train_from_meta` reads them from now on."""
        write_columns(self.dp_client, meta, fields)
        self._note_written(meta, fields)

    # --- work on metas ------------------------------------------------------------------------------------------

    def get_logprobs_from_meta(self, meta: KVBatchMeta, micro_batch_size: int | None = None) -> None:
        """Have the workers compute the policy's log-probs of the samples and write them back as "prev_logprobs"."""
        self._logprobs(meta, "get_logprobs_presharded", PREV_LP_TASK, PREV_LOGPROBS, micro_batch_size)

    def get_reference_policy_logprobs_from_meta(self, meta: KVBatchMeta, micro_batch_size: int | None = None) -> None:
        """The same for the reference policy, as "reference_policy_logprobs"."""
        method = "get_reference_policy_logprobs_presharded"
        self._logprobs(meta, method, REF_LP_TASK, REFERENCE_POLICY_LOGPROBS, micro_batch_size)

    def train_from_meta(
        self,
        meta: KVBatchMeta,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Have the workers train on the samples, in global batches of `gbs` (default: cfg's, else all of them).

        They read the fields of the meta and those written through this policy since `prepare_step`. Returns what
        `aggregate_train_results` makes of the workers' results.
        """
        gbs = gbs or self._setting("train_global_batch_size")
        fields = list(dict.fromkeys([*_fields_of(meta), *self._written.get(meta.partition_id, [])]))
        results = self._dispatch(
            "train_presharded",
            replace(meta, fields=fields, task_name=TRAIN_TASK),
            batch_size=gbs,
            loss_fn=loss_fn,
            eval_mode=eval_mode,
            gbs=gbs,
            mbs=mbs or self._setting("train_micro_batch_size"),
        )
        return aggregate_train_results(results)

    def _logprobs(self, meta: KVBatchMeta, method: str, task: str, column: str, micro_batch_size: int | None) -> None:
        fields = [name for name in _fields_of(meta) if name not in STAGE_RESULTS]
        self._dispatch(
            method,
            replace(meta, fields=fields, task_name=task),
            batch_size=None,
            micro_batch_size=micro_batch_size or self._setting("logprob_batch_size"),
        )
        self._note_written(meta, [column])

    def _dispatch(self, method: str, meta: KVBatchMeta, *, batch_size: int | None, **common: Any) -> list[Any]:
        """Call `method` on every worker with its data-parallel rank's part of `meta`; the replica leaders' results."""
        self._stamp_pad_seqlen(meta)
        names = self.sharding_annotations.names
        others = [name for name in names if name != DATA_PARALLEL_AXIS]
        split = DATA_PARALLEL_AXIS in names
        metas, _ = shard_meta_for_dp(
            meta,
            dp_world=self.sharding_annotations.get_axis_size(DATA_PARALLEL_AXIS) if split else 1,
            batch_size=batch_size,
            sequence_packing_args=self._packing("sequence_packing"),
            dynamic_batching_args=self._packing("dynamic_batching"),
        )
        futures = self.worker_group.run_all_workers_sharded_data(
            method,
            meta=metas if split else metas[0],
            in_sharded_axes=[DATA_PARALLEL_AXIS] if split else [],
            replicate_on_axes=others,
            output_is_replicated=others,
            common_kwargs=common,
        )
        return self.worker_group.get_all_worker_results(futures)

    def _note_written(self, meta: KVBatchMeta, fields: Sequence[str] | Mapping[str, Any]) -> None:
        written = self._written.setdefault(meta.partition_id, [])
        written.extend(name for name in fields if name not in written)

    def _setting(self, name: str) -> Any:
        """A setting of the policy, None where it has none."""
        return self.cfg.get(name) if isinstance(self.cfg, Mapping) else getattr(self.cfg, name, None)

    def _packing(self, name: str) -> Mapping[str, Any] | None:
        """The settings of a kind of packing, None unless it is enabled."""
        settings = self._setting(name)
        return settings if isinstance(settings, Mapping) and settings.get("enabled") else None


def aggregate_train_results(results: Sequence[Any]) -> dict[str, Any]:
    """One mapping from those of the replica leaders, in data-parallel order.

    "all_mb_metrics" (name -> values per micro-batch or step) are joined, leader after leader. All else is the first
    leader's: workers reduce over data-parallel ranks what is one value for all. A "global_loss" is "loss" too.
    TypeError unless each result is a mapping.
    """
    for result in results:
        if not isinstance(result, Mapping):
            raise TypeError(f"a worker's train() must return a mapping of results, got {type(result).__name__}")
    merged = dict(results[0])
    if "global_loss" in merged:
        merged.setdefault("loss", merged["global_loss"])
    if any("all_mb_metrics" in result for result in results):
        joined: dict[str, list[Any]] = {}
        for result in results:
            for name, values in result.get("all_mb_metrics", {}).items():
                joined.setdefault(name, []).extend(values)
        merged["all_mb_metrics"] = joined
    return merged


def _fields_of(meta: KVBatchMeta) -> list[str]:
    if not meta.fields:
        raise ValueError("this meta does not say which fields the workers are to read: use meta.with_fields([...])")
    return list(meta.fields)
