"""The example's model under data and tensor parallelism computes what one process computes. Real Gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from examples.arithmetic.learner import Learner, OptimizerConfig
from examples.arithmetic.loss import GRPOLoss, token_logprobs
from examples.arithmetic.model import ModelConfig, build
from examples.arithmetic.parallel import gather_weights, local, shard

CONFIG = ModelConfig(vocabulary=13, context=12, width=32, layers=2, heads=4)
SEED = 5
ROWS = 16
SHARDED = ("qkv.weight", "qkv.bias", "out.weight", "up.weight", "up.bias", "down.weight")
MAX_NORM = 0.05  # below the gradient's norm, so that clipping is compared too


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, CONFIG.vocabulary, (ROWS, 10), generator=generator)
    lengths = torch.randint(5, 11, (ROWS, 1), generator=generator)
    places = torch.arange(10)
    noise = 0.3 * torch.randn(2, ROWS, 10, generator=generator)
    mask = ((places >= 3) & (places < lengths)).float()
    start = token_logprobs(build(CONFIG, seed=SEED)(tokens), tokens).detach()
    return {
        "input_ids": tokens,
        "token_mask": mask,
        "advantages": torch.randn(ROWS, 1, generator=generator).expand(ROWS, 10) * mask,
        "prev_logprobs": start + noise[0],
        "generation_logprobs": start,
        "reference_policy_logprobs": start + noise[1],
    }


def _rank(rank: int, dp: int, tp: int, directory: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "rendezvous"), dp * tp)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=dp * tp)
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    learner = Learner(CONFIG, mesh, seed=SEED, optimizer=OptimizerConfig(max_norm=MAX_NORM))
    rows = slice(mesh["dp"].get_local_rank() * ROWS // dp, (mesh["dp"].get_local_rank() + 1) * ROWS // dp)
    batch = {name: values[rows] for name, values in _batch().items()}
    sizes = {"batch_size": ROWS // dp, "micro_batch_size": 4}
    before = learner.logprobs(batch, micro_batch_size=4)
    steps = learner.train(batch, GRPOLoss(), **sizes)
    gradients = {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for name, parameter in learner.policy.named_parameters()
    }
    steps += learner.train(batch, GRPOLoss(), **sizes)
    held = {name: local(weight).numel() for name, weight in learner.policy.named_parameters()}
    result = {
        "logprobs": before,
        "reference": learner.logprobs(batch, micro_batch_size=ROWS, reference=True),
        "steps": steps,
        "gradients": gradients,
        "weights": learner.weights(),
        "held": held,
    }
    torch.save(result, directory / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[(1, 2), (2, 2)], ids=["tp2", "dp2xtp2"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[dict]]:
    """(tensor-parallel size, what each rank found)"""
    (dp, tp), directory = request.param, tmp_path_factory.mktemp("ranks")
    mp.spawn(_rank, args=(dp, tp, directory), nprocs=dp * tp)
    return tp, [torch.load(directory / f"rank{rank}.pt") for rank in range(dp * tp)]


def _one_process() -> dict:
    """The same two steps, by plain torch: no mesh, no sharding, one batch."""
    model, batch = build(CONFIG, seed=SEED), _batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    tokens = float(batch["token_mask"].sum())
    logprobs = token_logprobs(model(batch["input_ids"]), batch["input_ids"])
    result: dict = {"logprobs": logprobs.detach(), "steps": []}
    for step in range(2):
        optimizer.zero_grad()
        scores = token_logprobs(model(batch["input_ids"]), batch["input_ids"])
        loss, metrics = GRPOLoss()(scores, batch, tokens)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        if step == 0:
            result["gradients"] = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        for group in optimizer.param_groups:
            group["lr"] = OptimizerConfig().learning_rate * (step + 1) / OptimizerConfig().warmup_steps
        optimizer.step()
        result["steps"].append(metrics | {"grad_norm": norm, "tokens": tokens})
    result["weights"] = {name: weight.detach() for name, weight in model.named_parameters()}
    return result


@pytest.mark.slow
def test_ranks_compute_what_one_process_computes(run: tuple[int, list[dict]]) -> None:
    tp, ranks = run
    one = _one_process()
    for field in ("logprobs", "reference"):
        whole = torch.cat([result[field] for result in ranks[::tp]])
        torch.testing.assert_close(whole, one["logprobs"], rtol=1e-5, atol=1e-5)
    for result in ranks:
        for step, expected in zip(result["steps"], one["steps"], strict=True):
            assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)
        for field in ("gradients", "weights"):
            torch.testing.assert_close(result[field], one[field], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_rank_holds_its_part_of_the_weights(run: tuple[int, list[dict]]) -> None:
    tp, ranks = run
    for name, weight in ranks[0]["weights"].items():
        parts = tp if any(part in name for part in SHARDED) else 1
        assert {result["held"][name] for result in ranks} == {weight.numel() // parts}, name


@pytest.mark.slow
def test_siblings_stay_equal_bit_for_bit(run: tuple[int, list[dict]]) -> None:
    tp, ranks = run
    for rank, result in enumerate(ranks):
        leader = ranks[rank - rank % tp]
        assert result["steps"] == ranks[0]["steps"]
        assert torch.equal(result["logprobs"], leader["logprobs"])
        assert all(torch.equal(result["weights"][name], weight) for name, weight in ranks[0]["weights"].items())


def test_heads_that_cannot_be_shared_are_refused() -> None:
    class OneAxis:
        def __getitem__(self, axis: str) -> OneAxis:
            return self

        def size(self) -> int:
            return 3

    with pytest.raises(ValueError, match="4 heads cannot be split evenly over 3"):
        shard(build(CONFIG, seed=0), OneAxis())  # type: ignore[arg-type]


def test_gathered_weights_of_an_unsharded_model_are_copies() -> None:
    model = build(CONFIG, seed=0)
    weights = gather_weights(model)
    with torch.no_grad():
        model.head.weight.zero_()
    assert weights["head.weight"].abs().sum() > 0
