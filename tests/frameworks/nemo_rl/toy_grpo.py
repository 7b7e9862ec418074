"""Trains a toy model with NeMo-RL's own unmodified classes on CPUs, once with each queue, and compares to the last bit:

    git --git-dir=NEMO_RL.git archive HEAD | tar x -C /tmp/nemo-rl
    python -m tests.frameworks.nemo_rl.toy_grpo /tmp/nemo-rl

`original` and `adapter` are the queues of `run.py`, and the environment is the same. A training has two parts, with the
same `TQPolicy` and its four workers (two data-parallel replicas of two tensor-parallel siblings):

- synchronous, as `grpo_train_sync`: `SyncRolloutActor` writes the rollouts, `TQPolicy` has log-probabilities and the
  training step done, and the driver reads columns and message logs and writes advantages.
- asynchronous, as `SingleController`: `TQReplayBuffer` and `InOrderSampler`, which run one step ahead of the split
  training step, and a checkpoint of the buffer that is loaded again.

Losses, gradient norms, log-probabilities, advantages, message logs and final weights are to be equal, every sample is
to be trained once by each sibling, and no sample may be left. The exit status is 1 where that is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from tests.frameworks.nemo_rl.run import NEMO_RL
from tests.frameworks.suites import end, environment

ROOT = Path(__file__).resolve().parents[3]
MODULE = "tests.frameworks.nemo_rl.toy_grpo"
STEPS = 4
"""Of each part."""
LIMIT_S = 900.0
REPLICAS, SIBLINGS = 2, 2
MICROBATCH = 4
SYNCHRONOUS, ASYNCHRONOUS = "train", "rollouts"
"""The partitions."""
COMPARED = ("loss", "grad_norm", "log-probabilities", "advantages", "messages", "weights")

DATA_PLANE = {
    "enabled": True,
    "impl": "transfer_queue",
    "backend": "simple",
    "storage_capacity": 1024,
    "num_storage_units": 1,
    "claim_meta_poll_interval_s": 0.05,
}


# --- the training, in a process of its own


def train(models: Path) -> dict[str, Any]:
    """What the training came to. models: a directory for the configuration of the model, which NeMo-RL looks at."""
    import ray
    import torch
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
    from nemo_rl.data_plane import build_data_plane_client
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES, RayVirtualCluster
    from nemo_rl.models.policy.tq_policy import TQPolicy

    from tests.frameworks.nemo_rl import toy

    torch.set_num_threads(1)
    ray.init(address="local", num_cpus=16, include_dashboard=False)
    worker = "tests.frameworks.nemo_rl.toy.Worker"
    ACTOR_ENVIRONMENT_REGISTRY[worker] = PY_EXECUTABLES.SYSTEM
    (models / "config.json").write_text('{"model_type": "gpt2"}')
    policy = TQPolicy(
        RayVirtualCluster([REPLICAS * SIBLINGS], use_gpus=False),
        {
            "model_name": str(models),
            "dtensor_cfg": {"enabled": True, "tensor_parallel_size": SIBLINGS, "context_parallel_size": 1},
            "train_global_batch_size": toy.PROMPTS * toy.GROUP,
            "train_micro_batch_size": MICROBATCH,
            "dynamic_batching": {"enabled": False},
            "sequence_packing": {"enabled": False},
        },
        toy.Tokenizer(),
        worker_extension_cls_fqn=worker,
        dp_cfg=DATA_PLANE,
        tq_partition_id=SYNCHRONOUS,
    )
    loss = ClippedPGLossFn(ClippedPGLossConfig())
    sums = toy.Sums.remote()
    found: dict[str, Any] = {name: [] for name in (*COMPARED, "ids", "ms")}
    train_synchronously(policy, sums, loss, found)
    client = build_data_plane_client(DATA_PLANE, bootstrap=False)
    asyncio.run(train_asynchronously(policy, client, sums, loss, found))
    found["weights"] = weights_of(policy)
    found["trained"] = ray.get(policy.worker_group.run_all_workers_single_data("trained"))
    found["left"] = [partition for partition in (SYNCHRONOUS, ASYNCHRONOUS) if has_samples(client, partition)]
    found["client"] = type(policy.dp_client).__module__
    client.close()
    policy.shutdown()
    del policy  # it shuts down again when it is collected, which has to be before Ray is
    return found


def weights_of(policy: Any) -> Any:
    import ray

    return ray.get([worker.weights.remote() for worker in policy.worker_group.workers[:SIBLINGS]])


def has_samples(client: Any, partition: str) -> bool:
    """NeMo-RL's interface has no listing; dropping all warns where there is nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client.clear_samples(None, partition)
    return not any("found nothing" in str(warning.message) for warning in caught)


def train_synchronously(policy: Any, sums: Any, loss: Any, found: dict[str, Any]) -> None:
    """As `grpo_train_sync` of NeMo-RL uses the queue."""
    from types import SimpleNamespace

    import ray
    from nemo_rl.data.llm_message_utils import MESSAGE_LOG_BULK_FIELDS, decompose_message_log
    from nemo_rl.experience.sync_rollout_actor import SyncRolloutActor

    from tests.frameworks.nemo_rl import toy

    config = SimpleNamespace(
        env={},
        policy={
            "generation": None,
            "max_total_sequence_length": toy.MAX_TOKENS,
            "make_sequence_length_divisible_by": 4,
        },
        grpo=SimpleNamespace(max_rollout_turns=toy.TURNS, deduplicate_multimodal_data=False),
    )
    generation = toy.Generation(policy.worker_group.workers[:SIBLINGS], seed=1)
    rollouts = SyncRolloutActor.remote(generation, toy.Tokenizer(), {"sums": sums}, config, DATA_PLANE)
    padding = {"input_ids": toy.PAD}
    for step in range(STEPS):
        began = time.perf_counter()
        policy.prepare_step(toy.PROMPTS * toy.GROUP, group_size=toy.GROUP)
        written = rollouts.rollout_to_tq.remote(
            toy.prompts(step), partition_id=SYNCHRONOUS, group_size=toy.GROUP, first_iter=True
        )
        meta, carried, _, _ = ray.get(written)
        policy.get_logprobs_from_meta(meta)
        policy.get_reference_policy_logprobs_from_meta(meta)
        columns = ["generation_logprobs", "token_mask", "prev_logprobs", "reference_policy_logprobs"]
        data = policy.read_from_dataplane(meta, select_fields=columns, pad_value_dict=padding)
        mask = data["token_mask"] * carried["loss_multiplier"][:, None]
        advantages = advantages_of(carried["prompt_ids_for_adv"], carried["total_reward"], mask)
        policy.write_to_dataplane(meta, {"advantages": advantages, "sample_mask": carried["loss_multiplier"]})
        result = policy.train_from_meta(meta, loss)
        fields = ["input_ids", "generation_logprobs", "content", "extra_env_info", *MESSAGE_LOG_BULK_FIELDS]
        read = policy.read_from_dataplane(meta, select_fields=fields, pad_value_dict=padding)
        policy.finish_step(meta)
        found["ms"].append(1000 * (time.perf_counter() - began))
        lengths = decompose_message_log(read["message_log"])["turn_lengths"]
        if not lengths.equal(read["turn_lengths"][:, : lengths.shape[1]]):  # NeMo-RL pads every column
            raise AssertionError(f"the message logs have turns of {lengths}, written were {read['turn_lengths']}")
        record(found, meta, result, data, advantages)
        found["messages"].append([plain(read["message_log"]), list(read["content"]), list(read["extra_env_info"])])


async def train_asynchronously(policy: Any, client: Any, sums: Any, loss: Any, found: dict[str, Any]) -> None:
    """As `SingleControllerActor` of NeMo-RL uses the queue: the rollouts of the next step are committed while a step is
    trained in a thread. They use the weights from before it, so that what comes out does not depend on time."""
    from nemo_rl.algorithms.async_utils.replay_buffer import TQReplayBuffer
    from nemo_rl.algorithms.async_utils.staleness_sampler import InOrderSampler

    from tests.frameworks.nemo_rl import toy

    buffer = TQReplayBuffer(client, ASYNCHRONOUS, pad_value_dict={"token_ids": toy.PAD})
    sampler = InOrderSampler(buffer, max_lookahead_versions=1)
    rollouts = toy.Rollouts.remote(sums, seed=2)

    async def produce(version: int, weights: Any) -> None:
        target = await sampler.admit(trainer_version_fn=lambda: version)
        groups = [f"{target}-{place}" for place in range(toy.PROMPTS)]
        for group in groups:
            buffer.reserve(weight_version=version, target_step=target, group_id=group)
        records = await rollouts.groups.remote(target, weights)
        for group, made in zip(groups, records, strict=True):
            await buffer.commit(group, made, version, version)

    await produce(0, weights_of(policy))
    for version in range(STEPS):
        began = time.perf_counter()
        trained = train_step(policy, client, sampler, version, loss, found)
        if version + 1 < STEPS:
            await asyncio.gather(produce(version, weights_of(policy)), trained)
            await restore(buffer, toy.PROMPTS, toy.GROUP)
        else:
            await trained
        if evicted := await sampler.evict(current_train_weight=version + 1):
            raise AssertionError(f"{evicted} groups were left untrained")
        found["ms"].append(1000 * (time.perf_counter() - began))


async def train_step(policy: Any, client: Any, sampler: Any, version: int, loss: Any, found: dict[str, Any]) -> None:
    """One split training step, in two parts of half the groups each."""
    from nemo_rl.algorithms.single_controller_utils.utils import fields_for_put, squeeze_trailing_unit_dim, tensor_field

    from tests.frameworks.nemo_rl import toy

    await asyncio.to_thread(policy.begin_train_step, loss)
    half = toy.PROMPTS // 2
    for part in range(2):
        meta, groups = await sampler.select(
            current_train_weight=version, min_prompt_groups=half, max_prompt_groups=half
        )
        if groups != half:
            raise AssertionError(f"step {version} has {groups} groups for part {part}, expected {half}")
        await asyncio.to_thread(policy.get_logprobs_from_meta, meta)
        await asyncio.to_thread(policy.get_reference_policy_logprobs_from_meta, meta)
        columns = ["prompt_ids_for_adv", "total_reward", "token_mask", "sample_mask"]
        columns += ["generation_logprobs", "prev_logprobs", "reference_policy_logprobs"]
        data = client.get_samples(sample_ids=meta.sample_ids, partition_id=ASYNCHRONOUS, select_fields=columns)
        read = {name: squeeze_trailing_unit_dim(tensor_field(data, name)) for name in columns}
        mask = read["token_mask"] * read["sample_mask"][:, None]
        advantages = advantages_of(read["prompt_ids_for_adv"], read["total_reward"], mask)
        client.put_samples(
            sample_ids=meta.sample_ids,
            partition_id=ASYNCHRONOUS,
            fields=fields_for_put(meta, {"advantages": advantages}),
        )
        await asyncio.to_thread(policy.train_microbatches_from_meta, meta)
        client.clear_samples(sample_ids=list(meta.sample_ids), partition_id=ASYNCHRONOUS)
        record(found, meta, {}, read, advantages)
    result = await asyncio.to_thread(policy.finish_train_step)
    found["loss"].append(result["loss"])
    found["grad_norm"].append(result["grad_norm"])


async def restore(buffer: Any, groups: int, group_size: int) -> None:
    """Save what the buffer holds, drop it from the queue, and load it again."""
    state = await buffer.state_dict(saved_capacity=groups)
    await buffer.remove(list(range(buffer.size())), remove_in_dp=True)
    restored = await buffer.load_state_dict(
        state, max_groups=groups, expected_partition_id=ASYNCHRONOUS, expected_group_size=group_size
    )
    if restored != groups:
        raise AssertionError(f"{restored} groups came back, expected {groups}")


def advantages_of(prompt_ids: Any, rewards: Any, mask: Any) -> Any:
    from types import SimpleNamespace

    from nemo_rl.algorithms.advantage_estimator import GRPOAdvantageEstimator

    estimator = GRPOAdvantageEstimator(SimpleNamespace(use_leave_one_out_baseline=True, normalize_rewards=True), None)
    return estimator.compute_advantage(prompt_ids=prompt_ids, rewards=rewards, mask=mask)


def record(found: dict[str, Any], meta: Any, result: dict[str, Any], data: Any, advantages: Any) -> None:
    for name in ("loss", "grad_norm"):
        if name in result:
            found[name].append(result[name])
    found["log-probabilities"].append({name: data[name] for name in data if name.endswith("logprobs")})
    found["advantages"].append(advantages.clone())
    found["ids"] += meta.sample_ids


def plain(logs: Any) -> list[Any]:
    return [
        [{**turn, "token_ids": turn["token_ids"].clone()} if "token_ids" in turn else turn for turn in log]
        for log in logs
    ]


# --- both trainings


def run(queue: str, checkout: Path, work: Path) -> dict[str, Any] | None:
    """What a training with this queue came to; None if it failed. Its output is in `work`."""
    import torch

    result = work / f"{queue}.pt"
    start = ("-m", "dataplane.compat.nemo_rl") if queue == "adapter" else ()
    with (
        tempfile.TemporaryDirectory(prefix="toy-", dir="/tmp", ignore_cleanup_errors=True) as short,
        (work / f"{queue}.log").open("w") as log,
    ):
        variables = environment(NEMO_RL, checkout, Path(short))
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), variables["PYTHONPATH"]])
        process = subprocess.Popen(
            [sys.executable, *start, "-m", MODULE, str(checkout), "--result", str(result)],
            cwd=ROOT,
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"{queue}: not finished after {LIMIT_S:.0f} s", file=sys.stderr)
        finally:
            if process.poll() is None:
                process.terminate()
            end(process, short)
    return torch.load(result, weights_only=False) if result.exists() else None


def problems(queue: str, found: dict[str, Any]) -> list[str]:
    """What is wrong with one training."""
    said = []
    if found["client"].startswith("dataplane.") != (queue == "adapter"):
        said.append(f"the client was of {found['client']}")
    if not found["ids"]:
        said.append("nothing was trained")
    expected = Counter(found["ids"] * SIBLINGS)
    trained = Counter(name for ids in found["trained"] for name in ids)
    if trained != expected:
        wrong = [name for name in expected | trained if trained[name] != expected[name]]
        said.append(f"{len(wrong)} samples were not trained once, e.g. {wrong[0]}")
    said += [f"partition {partition} has samples left" for partition in found["left"]]
    return said


def differing(first: Any, second: Any) -> bool:
    """Whether two results differ, in any bit of a tensor."""
    import numpy as np
    import torch

    if type(first) is not type(second):
        return True
    if isinstance(first, torch.Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            return True
        return not torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (first, second)))
    if isinstance(first, dict):
        return first.keys() != second.keys() or any(differing(first[name], second[name]) for name in first)
    if isinstance(first, list):
        return len(first) != len(second) or any(map(differing, first, second))
    if isinstance(first, np.ndarray):
        return differing(first.tolist(), second.tolist())
    return bool(first != second)


def table(results: dict[str, dict[str, Any]], equal: bool) -> str:
    lines = [f"{'queue':10}{'steps':>7}{'ms per step':>13}{'asynchronous':>14}{'samples':>9}{'left':>6}  equal"]
    for queue, found in results.items():
        times = [median(part) for part in (found["ms"][:STEPS], found["ms"][STEPS:])]
        row = f"{queue:10}{len(found['ms']):7}{times[0]:13.0f}{times[1]:14.0f}{len(set(found['ids'])):9}"
        lines.append(f"{row}{len(found['left']):6}  {'yes' if equal else 'no'}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a clone or an export of NeMo-RL")
    parser.add_argument("--work", type=Path, help="where results and logs go; by default a new directory in /tmp")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        import torch

        with tempfile.TemporaryDirectory() as models:
            torch.save(train(Path(models)), options.result)
        return 0
    checkout = options.checkout.resolve()
    if not (checkout / "nemo_rl").is_dir():
        print(f"{checkout} has no directory nemo_rl: expected a clone or an export of it", file=sys.stderr)
        return 2
    work = (options.work or Path(tempfile.mkdtemp(prefix="nemo_rl-toy-", dir="/tmp"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    results = {}
    for queue in NEMO_RL.queues:
        found = run(queue, checkout, work)
        if found is None:
            print(f"the training with {queue} failed, see {work / queue}.log")
            return 1
        results[queue] = found
        print(f"{queue}: done", file=sys.stderr, flush=True)
    original, adapter = results.values()
    said = [f"{queue}: {problem}" for queue, found in results.items() for problem in problems(queue, found)]
    unequal = [name for name in COMPARED if differing(original[name], adapter[name])]
    said += [f"not equal: {name}" for name in unequal]
    print(table(results, not unequal))
    print(*said, f"results and logs: {work}", sep="\n")
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
