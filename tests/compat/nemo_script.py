"""What NeMo-RL does with its data plane, in one process: the driver's client puts, claims, fans out and clears, the
worker's one reads by id and writes back. `tests.compat.runner` runs it."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

FIELDS = ["input_ids", "token_mask", "sample_mask", "total_reward", "prev_logprobs", "text"]
POLLING = True


def known(meta: Any) -> list[Any]:
    return [
        meta.partition_id,
        meta.task_name,
        meta.sample_ids,
        meta.fields,
        meta.sequence_lengths,
        meta.tags,
        meta.size,
        meta.extra_info,
    ]


def rows(*lengths: int) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.arange(length) for length in lengths], layout=torch.jagged)


def batch(*lengths: int) -> TensorDict:
    count = len(lengths)
    fields = {
        "input_ids": rows(*lengths),
        "token_mask": torch.ones(count, 4),
        "sample_mask": torch.ones(count),
        "text": NonTensorStack(*[f"text {length}" for length in lengths]),
    }
    return TensorDict(fields, batch_size=[count])


def refused(kind: type[Exception], call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except kind:
        return kind.__name__
    return "nothing"


def run(build: Any) -> dict[str, Any]:
    cfg = {"enabled": True, "impl": "transfer_queue", "backend": "simple", "claim_meta_poll_interval_s": 0.1}
    cfg["dataplane"] = {"capacity_bytes": 64 << 20}
    off = {"off": refused(ValueError, build, {**cfg, "enabled": False}), "none": refused(ValueError, build, None)}
    unknown = refused(ValueError, build, {**cfg, "impl": "other"})
    driver = build(cfg, bootstrap=True)
    try:
        worker = build(cfg, bootstrap=False)
        return {"refused": [off, unknown], **step(driver, worker)}
    finally:
        driver.close()
        driver.close()


def step(driver: Any, worker: Any) -> dict[str, Any]:
    saw: dict[str, Any] = {}
    driver.register_partition("train", FIELDS, 6, ["train", "logprob"], grpo_group_size=2)
    tags = [{"input_lengths": length, "std": 0.5} for length in (3, 1, 2)]
    saw["put"] = known(driver.put_samples(["a", "b", "c"], "train", batch(3, 1, 2), tags))
    saw["put nothing"] = known(driver.put_samples([], "train"))
    saw["tags only"] = known(driver.put_samples(["a"], "train", tags=[{"weight_version": 1}]))
    saw["too many"] = known(worker.claim_meta("train", "logprob", ["input_ids"], 4, blocking=False))
    saw["too many, waiting"] = refused(
        TimeoutError, worker.claim_meta, "train", "logprob", ["input_ids"], 4, timeout_s=0.3
    )
    meta = worker.claim_meta("train", "logprob", ["input_ids", "sample_mask"], 2, dp_rank=0)
    saw["claimed"] = known(meta)
    saw["data"] = worker.get_data(meta)
    saw["fewer fields"] = worker.get_data(meta, ["sample_mask"])
    saw["by id"] = worker.get_samples(["c", "a"], "train", ["input_ids", "token_mask", "text"])
    saw["one twice"] = worker.get_samples(["c", "a", "c"], "train", ["input_ids", "sample_mask", "text"])
    saw["of one length"] = worker.get_samples(["b"], "train", ["input_ids"])
    saw["nothing by id"] = worker.get_samples([], "train", ["input_ids"])
    saw["not produced"] = known(driver.claim_meta("train", "train", ["prev_logprobs"], 2, blocking=False))
    back = TensorDict({"prev_logprobs": torch.nested.as_nested_tensor([torch.ones(3), torch.ones(1)])}, batch_size=[2])
    worker.put_samples(meta.sample_ids, "train", back)
    saw["written back"] = known(driver.claim_meta("train", "train", ["prev_logprobs"], 2, timeout_s=5.0))
    saw["consumed"] = [driver.check_consumption_status("train", tasks) for tasks in (["logprob"], ["train", "logprob"])]
    saw["the rest"] = known(worker.claim_meta("train", "logprob", ["input_ids"], 1))
    saw["consumed now"] = [driver.check_consumption_status("train", tasks) for tasks in (["logprob"], ["train"])]
    saw["kept"] = checkpointed(driver)
    driver.clear_samples(["a", "unknown"], "train")
    saw["cleared"] = refused(ValueError, worker.get_samples, ["a"], "train", ["input_ids"])
    saw["without fields"] = refused(ValueError, worker.get_data, type(meta)("train", None, ["b"]))
    driver.clear_samples(None, "train")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        driver.clear_samples(None, "train")
    saw["warned"] = [entry.category.__name__ for entry in said if issubclass(entry.category, RuntimeWarning)]
    saw["next step"] = known(driver.put_samples(["a", "b"], "train", batch(2, 4), [{"input_lengths": 2}, {}]))
    saw["claimed anew"] = known(worker.claim_meta("train", "logprob", ["input_ids"], 2))
    saw["unregistered"] = known(driver.put_samples(["x"], "staging", batch(1)))
    saw["unregistered, claimed"] = known(driver.claim_meta("staging", "anyone", ["text"], 1))
    return saw


def checkpointed(driver: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "data plane"
        driver.save_checkpoint(place, metadata={"step": 3})
        driver.put_samples(["late"], "train", batch(1))
        told = driver.load_checkpoint(place)
        return [told, refused(ValueError, driver.get_samples, ["late"], "train", ["input_ids"])]
