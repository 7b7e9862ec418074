"""Trains with an unmodified verl on CPUs, once with each queue, and compares what it logs:

    python train.py                                   # one worker, GRPO
    python train.py --workers 2 --critic --validate   # two FSDP2 workers, PPO with a critic
    python train.py --mode colocate_async --set trainer.save_freq=2
    python train.py --mode separate_async --apart 1 --parts 2
    python train.py --filter --fail-every 5           # DAPO's filter, groups that fail and are replaced
    python train.py --images                          # a vision model, an image in each prompt

`original` is the package TransferQueue, `adapter` is `dataplane.compat.transfer_queue` by its switch. Nothing of verl
is edited, and no function of it that touches the queue is replaced: `verl_cpu` registers a platform, a rollout that
samples from the trained model, engines and seeds in verl's own registries. In `sync` mode every number that does not
depend on clocks must be the same to the last bit. The asynchronous modes and the filter depend on timing: there the
number of steps and of samples must be the same. In every mode, no sample may be trained twice.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
UNCOMPARED = re.compile(r"^(timing_|perf/)|/(mfu|time)|memory|throughput")
"""Metrics that depend on clocks and on the load of the machine, not on the training."""
LIMIT_S = 1800.0
"""Time limit of a training. Most of its minutes are imports and the start of Ray."""
NOT_STARTED = "The current node timed out during startup"
"""Ray's message if the machine is too busy to start it in time."""


def overrides(queue: str, options: argparse.Namespace) -> list[str]:
    """Return the settings of verl's configuration."""
    work = options.work
    data, model = options.data, "actor_rollout_ref.model"
    actor, rollout, ref = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
    exact = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
    sampler = "OrderedReplayBuffer" if options.mode == "sync" else "OrderedReplayBufferAsync"
    settings = [
        # data
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet",
        f"data.train_batch_size={options.prompts}",
        f"data.max_prompt_length={64 if options.images else 32}",
        "data.max_response_length=12",
        "data.shuffle=false",
        "data.dataloader_num_workers=0",
        # models
        f"{model}.path={data}/model",
        f"{model}.external_lib=verl_cpu.uids",
        f"{model}.use_remove_padding=false",
        f"{model}.enable_gradient_checkpointing=false",
        f"+{model}.override_config.attn_implementation=eager",
        f"{actor}.strategy={options.strategy}",
        f"{actor}.ppo_mini_batch_size={options.prompts // options.parts}",
        f"{actor}.ppo_micro_batch_size_per_gpu=2",
        f"{actor}.use_torch_compile=false",
        f"{actor}.use_kl_loss=true",
        f"{actor}.optim.lr=1e-3",
        f"{actor}.fsdp_config.use_torch_compile=false",
        f"+{actor}.fsdp_config.mixed_precision={exact}",
        f"{ref}.log_prob_micro_batch_size_per_gpu=2",
        f"{ref}.fsdp_config.use_torch_compile=false",
        f"+{ref}.fsdp_config.mixed_precision={exact}",
        f"{ref}.fsdp_config.model_dtype=fp32",
        # rollout
        f"{rollout}.name=transformers",
        f"{rollout}.n=2",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.dtype=float32",
        f"{rollout}.load_format=auto",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=2",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.agent.default_agent_loop=seeded",
        f"{rollout}.agent.agent_loop_config_path={HERE}/agent.yaml",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={HERE}/verl_cpu/reward.py",
        # the trainer
        f"algorithm.adv_estimator={'gae' if options.critic else 'grpo'}",
        "trainer.device=cpu",
        f"trainer.v1.trainer_mode={options.mode}",
        f"trainer.v1.sampler.custom_sampler.path={HERE}/verl_cpu/sampler.py",
        f"trainer.v1.sampler.custom_sampler.name={sampler}",
        f"trainer.n_gpus_per_node={options.workers}",
        f"trainer.total_training_steps={options.steps}",
        "trainer.total_epochs=100",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={work}/checkpoints",
        "trainer.resume_mode=disable",
        f"trainer.val_before_train={str(options.validate).lower()}",
        f"trainer.test_freq={options.steps if options.validate else -1}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"hydra.run.dir={work}/hydra",
    ]
    if not options.cluster:
        settings += [
            "ray_kwargs.ray_init.num_cpus=16",
            f"+ray_kwargs.ray_init.num_gpus={options.workers + options.apart}",
            f"+ray_kwargs.ray_init._temp_dir={work}/ray",
            "+ray_kwargs.ray_init.include_dashboard=false",
            f"+ray_kwargs.ray_init.object_store_memory={256 << 20}",
        ]
    else:
        settings.append(f"+ray_kwargs.ray_init.address={options.cluster}")
    if options.critic:
        settings += [
            f"critic.model.path={data}/model",
            "critic.model.use_remove_padding=false",
            "critic.model.enable_gradient_checkpointing=false",
            "+critic.model.override_config.attn_implementation=eager",
            f"critic.strategy={options.strategy}",
            f"critic.ppo_mini_batch_size={options.prompts // options.parts}",
            "critic.ppo_micro_batch_size_per_gpu=2",
            "critic.optim.lr=1e-3",
            "critic.fsdp.use_torch_compile=false",
            f"+critic.fsdp.mixed_precision={exact}",
        ]
    if options.filter:
        # verl requires that a trainer that replaces groups fetches one prompt at a time.
        buffer = "trainer.v1.sampler.sampler_kwargs"
        settings += [
            "data.gen_batch_size=1",
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.metric=reward",
            "trainer.v1.sampler.sync_refill_failed_groups=true",
            f"+{buffer}.filter_groups_metric=reward",
            f"+{buffer}.sync_refill_failed_groups=true",
            f"+{buffer}.train_batch_size={options.prompts}",
            f"+{buffer}.gen_batch_size=1",
            f"+{buffer}.max_inflight_gen_batches=2",
        ]
    if options.dump:
        settings += [
            f"trainer.rollout_data_dir={work}/{queue}-rollouts",
            f"trainer.validation_data_dir={work}/{queue}-validation",
        ]
    if options.skip:
        # The first step's rollouts are written to files, and all later steps read these.
        settings += [
            "skip.rollout_tq.enable=true",
            f"skip.rollout_tq.dump_dir={work}/{queue}-skip",
            f"skip.rollout_tq.steps={list(range(1, options.steps + 1))}".replace(" ", ""),
            "skip.rollout_tq.action=repeat",
        ]
    if options.mode == "separate_async":
        settings += [
            f"{rollout}.nnodes=1",
            f"{rollout}.n_gpus_per_node={options.apart}",
            f"{rollout}.checkpoint_engine.backend=ray_actor",
            f"{rollout}.checkpoint_engine.custom_backend_module=verl_cpu.weights",
            f"trainer.v1.separate_async.parameter_sync_step={options.parts}",
        ]
    return settings + options.set


@dataclass(frozen=True)
class Training:
    """A command that trains, and its log file. Its other files have the same stem."""

    command: list[str]
    environment: dict[str, str]
    log: Path


def training(queue: str, options: argparse.Namespace, name: str = "", **more: str) -> Training:
    """Return a training with that queue. name: stem of its files (default: the queue). more: environment variables."""
    work, name = options.work, name or queue
    log = work / f"{name}.log"
    kinds = ("", "weights.", "sampled.", "calls.")
    files = metrics, digests, sampled, calls = [work / f"{name}.{kind}jsonl" for kind in kinds]
    for file in files:
        file.unlink(missing_ok=True)
    environment = dict(os.environ) | {
        "PYTHONPATH": str(HERE),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "VERL_CPU_DIGESTS": str(digests),  # one line per update of the rollout's weights
        "VERL_CPU_SAMPLED": str(sampled),  # one line per batch
        "VERL_CPU_FAIL_EVERY": str(options.fail_every),
        "VERL_CPU_CALLS": str(calls) if options.calls else "",  # one line per call of the queue
        "RAY_raylet_start_wait_time_s": "180",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        **more,
    }
    environment.pop("TQ_REPLACE", None)
    switch = ["-m", "dataplane.compat.transfer_queue"] if queue == "adapter" else []
    command = [sys.executable, *switch, "-m", "verl.trainer.main_ppo", *overrides(queue, options)]
    print(f"{name}: training, a few minutes; its log is {log}", flush=True)
    return Training(command, environment, log)


def train(queue: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one training. Return the metrics of its steps."""
    begun, begin = training(queue, options), time.monotonic()
    why = run(begun)
    if why and NOT_STARTED in begun.log.read_text():
        print(f"{queue}: Ray did not start in time; trying again", flush=True)
        why = run(begun)
    if why:
        raise SystemExit(
            f"verl with the queue {queue!r} {why}; the end of {begun.log}:\n{begun.log.read_text()[-2000:]}"
        )
    print(f"{queue}: done after {time.monotonic() - begin:.0f} s", flush=True)
    return read(queue, options.work)


def start(begun: Training) -> subprocess.Popen[bytes]:
    """Start the training. Return its process."""
    with begun.log.open("w") as output:
        return subprocess.Popen(
            begun.command, env=begun.environment, cwd=begun.log.parent, stdout=output, stderr=subprocess.STDOUT
        )


def run(begun: Training) -> str:
    """Run a training to its end. Return what went wrong, or ""."""
    with start(begun) as process:
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"was not done after {LIMIT_S:.0f} s"
    return f"ended with exit code {code}" if code else ""


def read(queue: str, work: Path) -> list[dict[str, Any]]:
    """Return a run's metrics, with the checksums of the weights that its rollouts got at each step."""
    lines = (work / f"{queue}.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    for line in (work / f"{queue}.weights.jsonl").read_text().splitlines():
        digest = json.loads(line)
        for record in records:
            if record["step"] == digest["step"]:
                record["data"][f"weights/{digest['replica']}"] = digest["sha256"]
    return records


def show_seconds(queue: str, records: list[dict[str, Any]]) -> None:
    """Print verl's own timings of each step."""
    for record in records:
        timed = {name.removeprefix("timing_s/"): value for name, value in record["data"].items() if "timing_s/" in name}
        if timed:
            print(f"{queue}, step {record['step']}: {', '.join(f'{name} {s:.2f} s' for name, s in timed.items())}")


def show_calls(queue: str, work: Path) -> None:
    """Print the median, the number and the maximum of the times of each call of the queue."""
    calls: dict[str, list[float]] = defaultdict(list)
    for line in (work / f"{queue}.calls.jsonl").read_text().splitlines():
        call = json.loads(line)
        calls[call["call"]].append(call["ms"])
    for name, times in sorted(calls.items()):
        print(
            f"{queue}: {name:14} median {median(times):7.2f} ms of {len(times)} calls, the slowest {max(times):.0f} ms"
        )


def compare(runs: dict[str, list[dict[str, Any]]], show: bool) -> bool:
    """Whether both runs logged the same metrics, except `UNCOMPARED`. Print the number of metrics that differ."""
    (left, first), (right, second) = runs.items()
    if len(first) != len(second):
        print(f"{left} logged {len(first)} times, {right} {len(second)} times")
        return False
    same, differing = set(), set()
    for one, other in zip(first, second, strict=True):
        for name in sorted(one["data"].keys() | other["data"].keys()):
            if UNCOMPARED.search(name):
                continue
            values = [repr(step["data"].get(name)) for step in (one, other)]
            (same if values[0] == values[1] else differing).add(name)
            if show and values[0] != values[1]:
                print(f"step {one['step']}: {name} is {values[0]} with {left}, {values[1]} with {right}")
    alike = len(same - differing)
    print(f"{alike} metrics are the same to the last bit in all {len(first)} steps, {len(differing)} differ")
    return not differing and bool(same)


Batches = list[tuple[str, int, list[str]]]
"""Partition, step and keys of each batch."""


def sampled(name: str, work: Path) -> Batches:
    """Return the batches that a run has trained on so far."""
    file = work / f"{name}.sampled.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(batch["partition"], batch["step"], batch["keys"]) for batch in map(json.loads, lines)]


def check(queue: str, batches: Batches) -> None:
    """Fail if a sample is in two batches."""
    seen: set[tuple[str, str]] = set()
    for partition, step, keys in batches:
        twice = [key for key in keys if (partition, key) in seen]
        if twice or len(set(keys)) < len(keys):
            raise SystemExit(f"{queue}, step {step}: samples occur twice, such as {(twice or keys)[:3]} of {partition}")
        seen |= {(partition, key) for key in keys}
    print(f"{queue}: {len(seen)} samples in {len(batches)} batches, none twice")


def dumped(queue: str, work: Path) -> dict[str, bytes]:
    """Return the files of generations that a run wrote, by name."""
    folders = [work / f"{queue}-{kind}" for kind in ("rollouts", "validation")]
    return {
        str(file.relative_to(work)).removeprefix(queue): file.read_bytes()
        for folder in folders
        for file in sorted(folder.glob("*"))
    }


def agree(options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> bool:
    """Whether both runs trained alike. In sync mode without the filter, samples, metrics and dumped files must be
    equal; otherwise the number of samples in each step."""
    exact = options.mode == "sync" and not options.filter
    batches = {queue: sampled(queue, options.work) for queue in runs}
    for queue, each in batches.items():
        check(queue, each)
    if len(runs) < 2:
        return True
    alike = compare(runs, exact)
    left, right = batches.values()
    if exact:
        files = {queue: dumped(queue, options.work) for queue in runs}
        (first, second) = files.values()
        different = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
        print(f"{len(first)} dumped files, {len(different)} of them different {different[:3]}")
        if bool(first) != options.dump or different:
            return False
        if left != right:
            print("the batches have different samples")
        return alike and left == right
    counts = [[(partition, step, len(keys)) for partition, step, keys in each] for each in (left, right)]
    if counts[0] != counts[1]:
        print(f"numbers of samples (partition, step, samples): {counts[0]} and {counts[1]}")
    return counts[0] == counts[1]


def arguments(description: str, *, queues: str = "original,adapter", **more: Any) -> argparse.Namespace:
    """Parse the command line. queues: the default of --queues. more: required options of the caller, by name, each with
    its choices."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    for name, choices in more.items():
        add(f"--{name}", choices=choices, required=True)
    add("--queues", default=queues, help="original, adapter or both, with a comma (default: %(default)s)")
    add("--mode", default="sync", choices=["sync", "colocate_async", "separate_async"], help="verl's trainer")
    add("--workers", type=int, default=1)
    add("--apart", type=int, default=0, help="logical GPUs that only sample (separate_async)")
    add("--parts", type=int, default=1, help="mini-batches per step")
    add("--steps", type=int, default=3)
    add("--prompts", type=int, default=4, help="prompts per step, with two responses each")
    add("--critic", action="store_true", help="PPO with a critic (default: GRPO)")
    add("--validate", action="store_true")
    add("--filter", action="store_true", help="DAPO's filter of groups; failed groups are replaced, too")
    add("--fail-every", type=int, default=0, help="every Nth prompt fails; 0: none")
    add("--calls", action="store_true", help="print the times of the calls of the queue")
    add("--dump", action="store_true", help="write generations to files, and compare the files")
    add("--skip", action="store_true", help="train all steps on the rollouts of the first one, read from files")
    add("--images", action="store_true", help="a tiny Qwen2-VL, with an image in each prompt")
    add("--strategy", default="fsdp2", choices=["fsdp", "fsdp2"])
    add("--work", type=Path, help="directory of model, logs and checkpoints (default: a new temporary one)")
    add("--set", action="append", default=[], help="a further setting of verl's configuration")
    parser.set_defaults(cluster="")  # the address of a running Ray cluster, or "" to start one
    options = parser.parse_args()
    options.work = (options.work or Path(tempfile.mkdtemp(prefix="verl-"))).resolve()
    options.data = options.work / ("data-images" if options.images else "data")
    if not options.data.exists():
        images = ["--images"] if options.images else []
        subprocess.run([sys.executable, HERE / "prepare.py", options.data, *images], check=True)
    return options


def main() -> None:
    options = arguments(str(__doc__))
    runs = {queue: train(queue, options) for queue in options.queues.split(",")}
    for queue, records in runs.items():
        show_seconds(queue, records)
        if options.calls:
            show_calls(queue, options.work)
    if not agree(options, runs):
        raise SystemExit("the two queues did not train alike")


if __name__ == "__main__":
    main()
