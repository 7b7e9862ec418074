"""The driver's side of policy workers: training steps, calls that pass metas instead of tensors, the
fields that each stage reads, and the workers' results combined."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from dataplane import (
    BatchedDataDict,
    DataPlaneConfig,
    KVBatchMeta,
    build_data_plane_client,
    read_columns,
    shard_meta_for_dp,
    write_columns,
)
from dataplane.core.durations import as_timeout
from dataplane.core.schema import (
    ADVANTAGES,
    ELEM_COUNTS_PER_GB,
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
from dataplane.data.meta import list_of_names, name_of, require_meta
from workers.groups.ray_worker_group import RayWorkerGroup
from workers.groups.started_group import MultiWorkerFuture
from workers.placement.sharding import DATA_PARALLEL_AXIS
from workers.training.stages import (
    IS_REPLICA_LEADER,
    PREV_LP_TASK,
    REF_LP_TASK,
    TRAIN_TASK,
    Stage,
    check_number,
    check_settings,
    enabled,
    packing_arguments,
    setting,
)

SETUP_TIMEOUT_S = 120.0
ABORT_TIMEOUT_S = 120.0
"""Timeout for workers to drop a train step, including the calls that they still run."""
_COMPUTED_PAD_SEQLEN = "global_forward_pad_minted"
"""Key of `extra_info`: the pad length that this policy computed. If the current one differs, a caller set it."""
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
"""Columns that `prepare_step` declares. Rollouts and stages can add others."""
FORWARD_FIELDS = frozenset(
    {
        INPUT_IDS,
        INPUT_LENGTHS,
        TOKEN_MASK,
        SAMPLE_MASK,
        "attention_mask",
        "position_ids",
        "token_type_ids",
        "response_mask",
        "loss_mask",
    }
)
"""Columns that a forward pass for log-probs reads by default, if the meta has them."""
ROUTED_EXPERTS = "routed_experts"
"""Column that a forward pass with the policy's weights also reads if cfg's "router_replay" is
enabled."""


class Timer(Protocol):
    """A timer such as `nemo_rl.utils.timer.Timer`: `time` returns a context manager that measures
    one part of a call. The labels are those of NeMo-RL."""

    def time(self, label: str) -> AbstractContextManager[Any]: ...


class Timed:
    """Measure the parts of one call, if there is a timer, each under "PREFIX/PART". submit: the
    name of the part in which the calls are sent."""

    def __init__(self, timer: Timer | None, prefix: str, submit: str = "submit_futures") -> None:
        self._timer = timer
        self._prefix = prefix
        self.submit = submit

    def __call__(self, stage: str) -> AbstractContextManager[Any]:
        return nullcontext() if self._timer is None else self._timer.time(f"{self._prefix}/{stage}")


class TQPolicy:
    """The driver's handle of the policy workers. It sends them metas; the workers exchange samples with the data plane.

    worker_group: workers with `TQWorkerMixin`, whose `sharding_annotations` have an axis "data_parallel" (without it,
    they are one data-parallel rank). dp_cfg: the data plane. With an address, the policy attaches to it; without one,
    it starts a service in this process, which ends with `close`. cfg: a mapping or an object with the settings
    train_global_batch_size, train_micro_batch_size, logprob_batch_size (each is optional), the settings of
    micro-batches (see `workers.training.stages`), and router_replay (whether it is "enabled", see
    `get_logprobs_from_meta`). tq_partition_id: the partition of each step's samples.
    ValueError if a batch size of `cfg` is not an integer of at least 1, or if its micro-batches are possible for no
    stage.

    The constructor blocks until every worker is attached. If a worker fails, the method raises its error at once.
    Methods return the results of replica leaders only. A `timer` measures splitting the samples, sending the calls and
    waiting for the results. Not thread-safe: one call at a time.
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
            raise ValueError(
                "worker_group has no sharding_annotations, which TQPolicy needs to split samples along named axes; "
                "pass them to RayWorkerGroup"
            )
        check_settings(cfg)
        self.worker_group = worker_group
        self.sharding_annotations = worker_group.sharding_annotations
        self.cfg = cfg
        self.tq_partition_id = name_of("tq_partition_id", tq_partition_id)
        self._written: dict[str, list[str]] = {}  # by partition: fields written since `prepare_step`
        self._step_open = False  # whether workers have, or may have, an open train step
        self._step_failed: str | None = None  # the method that failed in the open step, which can then only be aborted
        config = DataPlaneConfig.of(dp_cfg).with_environment()
        self.dp_client = build_data_plane_client(config, bootstrap=config.address is None)
        try:
            self._call_all("setup_data_plane", timeout_s=SETUP_TIMEOUT_S, cfg=self.dp_client.config)
        except BaseException:
            self.dp_client.close()
            raise

    def close(self) -> None:
        """Close the driver's client, and the service if this policy started it. Workers keep running. Idempotent."""
        self.dp_client.close()

    def shutdown(self, cleanup_method: str | None = "close_data_plane", timeout: float | None = 30.0) -> bool:
        """End the workers, then call `close`. Return whether every cleanup and every kill succeeded. Idempotent.

        Every worker first runs `cleanup_method`, which by default detaches it from the data plane. After at most
        `timeout` seconds for its running calls and the cleanup, it is killed. An open train step is lost.
        """
        timeout = as_timeout("timeout", timeout)
        self._step_open = False
        self._step_failed = None
        try:
            return self.worker_group.shutdown(cleanup_method, timeout)
        finally:
            self.close()

    def __enter__(self) -> TQPolicy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- a step -------------------------------------------------------------------------------------------------

    def prepare_step(self, num_samples: int, group_size: int | None = None) -> None:
        """Register the step's partition, with its columns, `num_samples`, and tasks "prev_lp", "ref_lp" and "train".

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

    def prepare_val_partition(self, num_samples: int, *, partition_id: str = "val") -> None:
        """Register a partition for a validation batch of `num_samples`: the step's columns, one task with the name of
        the partition, no groups. `finish_step` clears its samples, too."""
        self._written.pop(name_of("partition_id", partition_id), None)
        self.dp_client.register_partition(partition_id, list(STEP_FIELDS), num_samples, [partition_id])

    def discard_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """Clear exactly these samples. Unknown ids are ignored."""
        self.dp_client.clear_samples(list_of_names("sample_ids", sample_ids), partition_id)

    def finish_step(self, meta: KVBatchMeta) -> None:
        """Clear the step's samples, but not newer samples with the same ids. The counterpart of `prepare_step`."""
        self.dp_client.clear_samples(require_meta(meta), meta.partition_id)
        self._written.pop(meta.partition_id, None)

    def _stamp_pad_seqlen(self, meta: KVBatchMeta) -> None:
        """Write the length that all data-parallel ranks pad to into `meta.extra_info`: the longest sample, rounded up
        to `pad_to_multiple` and to dynamic batching's `sequence_length_round`.

        A length that this method wrote earlier is recomputed, because filtering or joining metas copies the length of
        other samples. A length that a caller wrote stays.
        """
        info = require_meta(meta).extra_info
        computed = info.get(_COMPUTED_PAD_SEQLEN)
        set_by_caller = info.get(GLOBAL_FORWARD_PAD_SEQLEN, computed) != computed
        if set_by_caller or not meta.sequence_lengths:
            return
        multiple = int(info.get(PAD_TO_MULTIPLE, 1))
        dynamic = enabled(self.cfg, "dynamic_batching")
        if dynamic is not None:
            multiple = math.lcm(multiple, int(setting(dynamic, "sequence_length_round") or 1))
        info[GLOBAL_FORWARD_PAD_SEQLEN] = info[_COMPUTED_PAD_SEQLEN] = round_up(max(meta.sequence_lengths), multiple)

    # --- columns for the driver ---------------------------------------------------------------------------------

    def read_from_dataplane(
        self,
        meta: KVBatchMeta,
        *,
        select_fields: Sequence[str],
        pad_value_dict: Mapping[str, Any] | None = None,
    ) -> BatchedDataDict[Any]:
        """Return columns of the samples. Per-token columns are padded to the same length as in the workers."""
        self._stamp_pad_seqlen(meta)
        return read_columns(
            self.dp_client,
            meta,
            select_fields,
            pad_value_dict=pad_value_dict,
            pad_to_seqlen=int(meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN, 0)),
        )

    def write_to_dataplane(self, meta: KVBatchMeta, fields: Mapping[str, Any]) -> None:
        """Store columns that the driver computed, for existing samples. `train_from_meta` reads them from now on."""
        write_columns(self.dp_client, require_meta(meta), fields)
        self._record_written(meta, fields)

    # --- work on metas ------------------------------------------------------------------------------------------

    def get_logprobs_from_meta(
        self,
        meta: KVBatchMeta,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
        *,
        fields: Sequence[str] | None = None,
    ) -> None:
        """Compute the policy's log-probs of the samples on the workers, which write them back as "prev_logprobs".

        The workers read `fields`. The default is those fields of the meta that are in `FORWARD_FIELDS`, and
        "routed_experts" if cfg's router_replay is enabled. For a model with image inputs, `fields` must name their
        columns. ValueError if no field is left.
        """
        replays_routing = enabled(self.cfg, "router_replay") is not None
        defaults = {*FORWARD_FIELDS, ROUTED_EXPERTS} if replays_routing else FORWARD_FIELDS
        fields = forward_fields(meta, fields, defaults)
        timed = Timed(timer, "get_logprobs")
        self._compute_logprobs(
            meta, fields, "get_logprobs_presharded", PREV_LP_TASK, PREV_LOGPROBS, micro_batch_size, timed
        )

    def get_reference_policy_logprobs_from_meta(
        self,
        meta: KVBatchMeta,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
        *,
        fields: Sequence[str] | None = None,
    ) -> None:
        """Like `get_logprobs_from_meta`, for the reference policy and "reference_policy_logprobs". It replays routed
        experts only if `fields` names them."""
        fields = forward_fields(meta, fields, FORWARD_FIELDS)
        method = "get_reference_policy_logprobs_presharded"
        timed = Timed(timer, "get_reference_policy_logprobs")
        self._compute_logprobs(meta, fields, method, REF_LP_TASK, REFERENCE_POLICY_LOGPROBS, micro_batch_size, timed)

    def run_from_meta(
        self,
        method: str,
        meta: KVBatchMeta,
        *,
        fields: Sequence[str] | None = None,
        writes: Sequence[str] = (),
        stage: Stage = "logprob",
        task_name: str | None = None,
        batch_size: int | None = None,
        timer: Timer | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a method of the workers by name, with the samples: for critics, teachers and other work besides
        log-probs and the policy's train step.

        Each worker's `method(meta=..., **kwargs)` gets the meta of its data-parallel rank: its part of each global
        batch of `batch_size` samples (None: one batch of all), in micro-batches with the budget of `stage` if cfg
        configures them. The method fetches with `_fetch(meta)` and stores results with `_write_back_result_field`.

        fields: the fields to fetch, by default the meta's. writes: columns that the method writes back, which
        `train_from_meta` reads from then on. task_name: the task of the metas, by default that of `meta`. Return the
        results of the replica leaders, in data-parallel order. AttributeError if the workers lack the method.
        """
        to_fetch = replace(meta, fields=require_fields(meta) if fields is None else field_names("fields", fields))
        written = field_names("writes", writes)
        if task_name is not None:
            to_fetch = replace(to_fetch, task_name=task_name)
        timed = Timed(timer, method)
        batch_size = self._number_of_samples("batch_size", batch_size, default=None)
        results = self._call(method, timed, self._split(to_fetch, stage, batch_size, timed), **kwargs)
        self._record_written(meta, written)
        return results

    def train_from_meta(
        self,
        meta: KVBatchMeta,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
        train_fields: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Train on the samples on all workers, in global batches of `gbs` (default: cfg's, otherwise all samples). The
        workers also get `mbs`, the samples of a micro-batch (default: cfg's), and `eval_mode`.

        The workers read `train_fields`, by default the fields of the meta and those written through this policy since
        `prepare_step`. Return the workers' results, combined by `aggregate_train_results`. RuntimeError while a train
        step is open.
        """
        if self._step_open:
            raise RuntimeError("a train step is open: call finish_train_step() or abort_train_step() first")
        gbs, mbs = self._batch_sizes(gbs, mbs)
        timed = Timed(timer, "policy_training", submit="submit_training_futures")
        common = {
            "loss_fn": loss_fn,
            "eval_mode": eval_mode,
            "gbs": gbs,
            "mbs": mbs,
        }
        metas = self._split(self._training_meta(meta, train_fields), "train", gbs, timed)
        return aggregate_train_results(self._call("train_presharded", timed, metas, **common))

    # --- a train step in parts ----------------------------------------------------------------------------------

    def begin_train_step(self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
        """Open a train step on every worker. `train_microbatches_from_meta` adds samples as they become ready. Then
        `finish_train_step` makes the optimizer step, or `abort_train_step` drops the step. gbs: samples of the step.

        RuntimeError if a step is open. If a worker fails, all workers abort, and no step is open.
        """
        if self._step_open:
            raise RuntimeError("a train step is already open: call finish_train_step() or abort_train_step() first")
        gbs, mbs = self._batch_sizes(gbs, mbs)
        try:
            self._call("begin_train_step_presharded", loss_fn=loss_fn, gbs=gbs, mbs=mbs)
        except Exception as error:
            # Other workers may have opened the step.
            try:
                self.abort_train_step()
            except Exception as second:
                error.add_note(f"Additionally, the abort of the train step failed: {second}")
            raise
        except BaseException:  # such as KeyboardInterrupt: the caller aborts the step later
            self._step_open = True
            self._step_failed = "begin_train_step"
            raise
        self._step_open = True

    def train_microbatches_from_meta(
        self, meta: KVBatchMeta, timer: Timer | None = None, train_fields: Sequence[str] | None = None
    ) -> None:
        """Add samples to the open step: each data-parallel rank fetches its part and accumulates gradients.

        The workers read the same fields as for `train_from_meta`. RuntimeError without an open step. ValueError for a
        meta that cannot be split; the step stays usable. After the failure of a worker, the step can only be aborted,
        because other workers may have added their parts.
        """
        self._require_step()
        timed = Timed(timer, "policy_training", submit="submit_microbatch_futures")
        metas = self._split(self._training_meta(meta, train_fields), "train", batch_size=None, timed=timed)
        with self._step_fails_on_error("train_microbatches_from_meta"):
            self._call("train_microbatch_presharded", timed, metas)

    def finish_train_step(self) -> dict[str, Any]:
        """Make the optimizer step of the open step. Return the same as `train_from_meta`. RuntimeError if no step is
        open, or if one of its calls has failed.

        If a worker fails, others may have made their optimizer step: abort the step, and load the same weights on all.
        """
        self._require_step()
        with self._step_fails_on_error("finish_train_step"):
            results = self._call("finish_train_step_presharded")
        self._step_open = False
        return aggregate_train_results(results)

    def abort_train_step(self) -> None:
        """Drop the open step, if any, on every worker, without an optimizer step. The workers can then begin a step.

        A step that another `TQPolicy` left open on these workers is dropped, too. Wait up to `ABORT_TIMEOUT_S` for
        running calls, then raise TimeoutError; the caller can retry.
        """
        self._call_all("abort_train_step_presharded", timeout_s=ABORT_TIMEOUT_S)
        self._step_open = False
        self._step_failed = None

    def _require_step(self) -> None:
        """RuntimeError unless a step is open in which nothing has failed."""
        if not self._step_open:
            raise RuntimeError("no train step is open: call begin_train_step(loss_fn) first")
        if self._step_failed is not None:
            raise RuntimeError(f"{self._step_failed} failed in this train step; drop the step with abort_train_step()")

    @contextmanager
    def _step_fails_on_error(self, method: str) -> Iterator[None]:
        """A context in which any exception makes the open step fail: it can then only be aborted."""
        try:
            yield
        except BaseException:
            self._step_failed = method
            raise

    # --- calls --------------------------------------------------------------------------------------------------

    def _compute_logprobs(
        self,
        meta: KVBatchMeta,
        fields: list[str],
        method: str,
        task: str,
        column: str,
        micro_batch_size: int | None,
        timed: Timed,
    ) -> None:
        """Call `method` of the workers, which computes log-probs from `fields` and writes them back as `column`. task:
        the task of the metas."""
        micro_batch_size = self._number_of_samples("micro_batch_size", micro_batch_size, "logprob_batch_size")
        metas = self._split(replace(meta, fields=fields, task_name=task), "logprob", batch_size=None, timed=timed)
        self._call(method, timed, metas, micro_batch_size=micro_batch_size)
        self._record_written(meta, [column])

    def _training_meta(self, meta: KVBatchMeta, given: Sequence[str] | None) -> KVBatchMeta:
        """Return `meta` for the task "train", with the given fields, by default its own and all written since
        `prepare_step`."""
        if given is not None:
            fields = field_names("train_fields", given)
        else:
            fields = list(dict.fromkeys([*require_fields(meta), *self._written.get(meta.partition_id, [])]))
        return replace(meta, fields=fields, task_name=TRAIN_TASK)

    def _split(self, meta: KVBatchMeta, stage: Stage, batch_size: int | None, timed: Timed) -> list[KVBatchMeta]:
        """Return one meta per data-parallel rank: its part of each global batch of `batch_size` samples (None: one
        batch of all). All get the same pad length, and micro-batches if `cfg` configures them."""
        with timed("shard_meta"):
            self._stamp_pad_seqlen(meta)
            has_axis = DATA_PARALLEL_AXIS in self.sharding_annotations.names
            dp_world = self.sharding_annotations.get_axis_size(DATA_PARALLEL_AXIS) if has_axis else 1
            arguments = packing_arguments(self.cfg, stage)
            metas, _ = shard_meta_for_dp(meta, dp_world=dp_world, batch_size=batch_size, **arguments)
            if batch_size is not None:
                counts = [batch_size // dp_world] * (meta.size // batch_size)  # a rank's samples of each global batch
                for meta in metas:  # those with micro-batches have their counts already
                    meta.extra_info.setdefault(ELEM_COUNTS_PER_GB, list(counts))
            return metas

    def _call(
        self, method: str, timed: Timed | None = None, metas: Sequence[KVBatchMeta] | None = None, **common: Any
    ) -> list[Any]:
        """Call `method` on every worker with `common` and the meta of its data-parallel rank (`metas` has one per rank;
        None: without a meta). Return the results of the replica leaders, in data-parallel order."""
        timed = timed or Timed(None, prefix="")  # measures nothing
        names = self.sharding_annotations.names
        sharded_axes = [name for name in names if name == DATA_PARALLEL_AXIS]
        other_axes = [name for name in names if name != DATA_PARALLEL_AXIS]
        split: dict[str, Any] = {}
        if metas is not None:
            # Without the axis, all workers are one data-parallel rank and get the same meta.
            split["meta"] = list(metas) if sharded_axes else metas[0]
        with timed(timed.submit):
            futures = self.worker_group.run_all_workers_sharded_data(
                method,
                in_sharded_axes=sharded_axes,
                replicate_on_axes=other_axes,
                output_is_replicated=other_axes,
                common_kwargs=common,
                **split,
            )
        with timed("wait"):
            return self.worker_group.get_all_worker_results(futures)

    def _call_all(self, method: str, *, timeout_s: float, **common: Any) -> None:
        """Call `method` on every worker and wait for all calls. TimeoutError after `timeout_s`."""
        futures = self.worker_group.run_all_workers_single_data(method, **common)
        MultiWorkerFuture(futures).get_results(self.worker_group, timeout_s=timeout_s)

    def _batch_sizes(self, gbs: int | None, mbs: int | None) -> tuple[int | None, int | None]:
        """Return the samples of a global batch and of a micro-batch: the given values, by default cfg's."""
        gbs = self._number_of_samples("gbs", gbs, "train_global_batch_size")
        return gbs, self._number_of_samples("mbs", mbs, "train_micro_batch_size")

    def _number_of_samples(self, argument: str, value: int | None, default: str | None) -> int | None:
        """Return the value of an argument, or for None that of cfg's setting `default`, which may be None, too.
        ValueError, which names the argument or the setting, unless it is 1 or more."""
        name = argument
        if value is None and default is not None:
            name = f"cfg's {default}"
            value = setting(self.cfg, default)
        check_number(name, value)
        return value

    def _record_written(self, meta: KVBatchMeta, fields: Sequence[str] | Mapping[str, Any]) -> None:
        """Record that these fields were written, so that `train_from_meta` reads them by default."""
        written = self._written.setdefault(meta.partition_id, [])
        written.extend(name for name in fields if name not in written)


def forward_fields(meta: KVBatchMeta, given: Sequence[str] | None, known: Collection[str]) -> list[str]:
    """Return the fields that a forward pass reads: `given`, or by default the meta's fields in
    `known`. ValueError if no field is left."""
    if given is not None:
        require_meta(meta)
        return field_names("fields", given)
    fields = require_fields(meta)
    to_read = [name for name in fields if name in known]
    if not to_read:
        raise ValueError(
            f"none of this meta's fields ({', '.join(fields)}) is a default field of a forward pass "
            f"({', '.join(sorted(known))}): pass the fields to read, fields=[...]"
        )
    return to_read


def require_fields(meta: KVBatchMeta) -> list[str]:
    """Return the fields that the meta names. ValueError if it names none."""
    fields = require_meta(meta).fields
    if not fields:
        raise ValueError("this meta names no fields for the workers to read: use meta.with_fields([...])")
    return list(fields)


def field_names(argument: str, given: Sequence[str]) -> list[str]:
    """Return the field names in `given` without duplicates. TypeError, naming `argument`, for other
    values."""
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    if not is_list or not all(isinstance(name, str) and name for name in given):
        raise TypeError(f"{argument}={given!r}: pass a list of field names")
    return list(dict.fromkeys(given))


def aggregate_train_results(results: Sequence[Any]) -> dict[str, Any]:
    """Merge the results of the replica leaders, in data-parallel order, into one mapping.

    The values of "all_mb_metrics" (name -> values per micro-batch or step) are concatenated in that
    order. All other entries are the first leader's: workers reduce global values over data-parallel
    ranks. "loss" defaults to "global_loss". TypeError unless each result is a mapping.
    """
    for result in results:
        if not isinstance(result, Mapping):
            raise TypeError(f"a worker's train() must return a mapping of results, got {type(result).__name__}")
    merged = {name: value for name, value in results[0].items() if name != IS_REPLICA_LEADER}
    if "global_loss" in merged:
        merged.setdefault("loss", merged["global_loss"])
    if any("all_mb_metrics" in result for result in results):
        joined: dict[str, list[Any]] = {}
        for result in results:
            for name, values in result.get("all_mb_metrics", {}).items():
                joined.setdefault(name, []).extend(values)
        merged["all_mb_metrics"] = joined
    return merged
