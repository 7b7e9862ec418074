"""The parts of the example that need no Ray: problems, tokens, generation, losses, report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dataplane import KVBatchMeta
from examples.arithmetic import worker
from examples.arithmetic.config import JobConfig
from examples.arithmetic.data import PROBLEMS, Problem, load_problems, reward, split, sums, write_problems
from examples.arithmetic.loss import GRPOLoss, SupervisedLoss, group_advantages, token_logprobs
from examples.arithmetic.model import ModelConfig, Transformer, build
from examples.arithmetic.report import Reporter, Result, StepRow, plot
from examples.arithmetic.rollout import Sampler, rollout_columns, text_columns
from examples.arithmetic.sampling import generate
from examples.arithmetic.task import Task
from examples.arithmetic.tokenizer import END, PAD, CharTokenizer
from workers import TQWorkerMixin

CONFIG = ModelConfig(vocabulary=9, context=14, width=32, layers=2, heads=4)
PROMPTS = [[3, 4, 5, 6], [7], [2, 8, 3], [5, 5, 5, 5, 5, 5]]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build(CONFIG, seed=2)


def test_the_shipped_problems_are_what_the_script_makes(tmp_path: Path) -> None:
    write_problems(tmp_path / "again.jsonl", sums(count=6000, below=100, seed=0))
    assert (tmp_path / "again.jsonl").read_bytes() == PROBLEMS.read_bytes()


def test_the_shipped_problems_are_right() -> None:
    for problem in load_problems(PROBLEMS):
        left, right = problem.prompt.removesuffix("=").split("+")
        assert int(left) + int(right) == int(problem.answer)


@pytest.mark.parametrize("line", ["[]", "7+5=", '{"prompt": "7+5="}', '{"prompt": "7+5=", "answer": 12}', "null"])
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"own\.jsonl, line 3"):
        load_problems(path)


def test_no_prompt_is_on_both_sides_of_a_split() -> None:
    problems = [Problem(f"{number % 50}=", str(number % 50)) for number in range(80)]
    train, held_out = split(problems, held_out=20, seed=1)
    assert len(train) == 30
    assert len(held_out) == 20
    assert not {problem.prompt for problem in train} & {problem.prompt for problem in held_out}
    assert split(problems, held_out=20, seed=1) == (train, held_out)
    assert split(problems, held_out=20, seed=2) != (train, held_out)
    with pytest.raises(ValueError, match="50 different prompts"):
        split(problems, held_out=30, seed=1)


def test_tokens_become_text_again() -> None:
    tokenizer = CharTokenizer.of(["12+3=", "15"])
    assert tokenizer.size == 2 + len("+1235=")
    assert tokenizer.decode([*tokenizer.encode("15"), END, *tokenizer.encode("3"), PAD]) == "15"


def test_padding_in_a_response_is_not_rewarded() -> None:
    tokenizer = CharTokenizer.of(["15"])
    one, five = tokenizer.encode("15")
    assert reward(Problem("7+8=", "15"), tokenizer.decode([one, five, END])) == 1.0
    assert reward(Problem("7+8=", "15"), tokenizer.decode([one, PAD, five, END])) == 0.0


def _greedy_without_cache(model: Transformer, prompt: list[int], max_new_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        if tokens[-1] == END:
            break
    return tokens


def test_generation_with_a_cache_is_generation_without(model: Transformer) -> None:
    made = generate(model, PROMPTS, max_new_tokens=6, generator=None)
    for row, prompt in enumerate(PROMPTS):
        expected = _greedy_without_cache(model, prompt, 6)
        assert made.tokens[row, : made.lengths[row]].tolist() == expected
        assert (made.tokens[row, made.lengths[row] :] == PAD).all()


def test_logprobs_of_generation_are_those_of_a_forward_pass(model: Transformer) -> None:
    made = generate(model, PROMPTS * 20, max_new_tokens=8, generator=torch.Generator().manual_seed(0))
    assert made.lengths.unique().numel() > 5, "rows end at different places"
    assert set(made.tokens[torch.arange(80), made.lengths - 1].tolist()) > {END}, "some rows end, some are cut"
    places = torch.arange(made.tokens.shape[1])
    response = (places >= made.prompt_lengths[:, None]) & (places < made.lengths[:, None])
    expected = token_logprobs(model(made.tokens), made.tokens) * response
    torch.testing.assert_close(made.logprobs, expected, rtol=1e-4, atol=1e-5)


def test_the_same_seed_samples_the_same(model: Transformer) -> None:
    first, again, other = (
        generate(model, PROMPTS, max_new_tokens=8, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens[:, :8], other.tokens[:, :8])


def test_a_prompt_too_long_is_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match="16 tokens exceed the model's context of 14"):
        generate(model, PROMPTS, max_new_tokens=10, generator=None)


def test_advantages_compare_within_a_group() -> None:
    advantages = group_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]), group_size=4)
    torch.testing.assert_close(advantages, torch.tensor([1.0, -1.0, 1.0, -1.0, 0, 0, 0, 0]), rtol=1e-3, atol=0)


def test_columns_mark_the_response_and_its_end() -> None:
    problems = [Problem("7+8=", "15"), Problem("1+1=", "2"), Problem("10+2=", "12")]
    tokenizer = CharTokenizer.of(problem.prompt + problem.answer for problem in problems)
    columns = text_columns(problems, tokenizer)
    assert columns["input_lengths"].tolist() == [7, 6, 8]
    for row, problem in enumerate(problems):
        tokens, mask = columns["input_ids"][row], columns["token_mask"][row].bool()
        assert tokenizer.decode(tokens.tolist()) == problem.prompt + problem.answer
        assert tokens[mask].tolist() == [*tokenizer.encode(problem.answer), END]
        assert (tokens[columns["input_lengths"][row] :] == PAD).all()


def test_a_sampler_answers_in_text_and_is_judged(model: Transformer) -> None:
    tokenizer = CharTokenizer("123456+")
    sampler = Sampler(model, tokenizer, max_new_tokens=4)
    made, texts = sampler.answer([Problem("12+3", "?"), Problem("4", "?")])
    asked = [Problem("12+3", texts[0]), Problem("4", texts[1] + "1")]
    assert sampler.right(asked) == [1.0, 0.0]
    columns = rollout_columns(made, texts, [1.0, 0.0])
    assert (columns["generation_logprobs"] != 0).equal(columns["token_mask"].bool())
    assert columns["reward"].tolist() == [1.0, 0.0]


def test_a_task_fits_its_longest_problem(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    write_problems(own, [*sums(count=20, below=10, seed=0), Problem("100000+1=", "100001")])
    task = Task.of(JobConfig(data=own, held_out=5, prompts=8))
    assert task.max_new_tokens == len("100001") + 2
    assert task.model.context == len("100000+1=") + task.max_new_tokens
    with pytest.raises(ValueError, match="16 training problems are fewer than the 64 prompts"):
        Task.of(JobConfig(data=own, held_out=5))


@pytest.mark.slow
def test_the_command_refuses_bad_data_before_it_starts_anything(tmp_path: Path) -> None:
    script = PROBLEMS.parents[2] / "grpo_arithmetic.py"
    command = [sys.executable, str(script), "--data", str(tmp_path / "missing.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "missing.jsonl" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def _grpo_batch(logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "token_mask": torch.tensor([[0.0, 1, 1, 0], [0, 0, 1, 1]]),
        "advantages": torch.tensor([[2.0] * 4, [-1.0] * 4]),
        "prev_logprobs": logprobs.clone(),
        "generation_logprobs": logprobs.clone(),
        "reference_policy_logprobs": logprobs.clone(),
    }


def test_on_policy_the_loss_is_minus_the_mean_advantage_and_pushes_by_it() -> None:
    logprobs = torch.full((2, 4), -1.0)
    batch = _grpo_batch(logprobs)
    scores = logprobs.clone().requires_grad_()
    loss, metrics = GRPOLoss(clip=0.2, kl_weight=0.1)(scores, batch, 4.0)
    loss.backward()
    assert metrics == pytest.approx({"loss": -0.5, "kl": 0.0, "clipped": 0.0, "sampling_gap": 0.0})
    torch.testing.assert_close(scores.grad, -batch["advantages"] * batch["token_mask"] / 4)


def test_a_ratio_beyond_the_clip_has_no_gradient_in_the_gainful_direction() -> None:
    logprobs = torch.full((2, 4), -1.0)
    batch = _grpo_batch(logprobs)
    scores = (logprobs + 1.0).requires_grad_()  # ratio e: gained enough in row 0, still to be pushed down in row 1
    loss, metrics = GRPOLoss(clip=0.2, kl_weight=0.0)(scores, batch, 4.0)
    loss.backward()
    assert metrics["clipped"] == pytest.approx(1.0)
    assert (scores.grad[0] == 0).all()
    assert (scores.grad[1, 2:] > 0).all()


def test_the_penalty_grows_on_both_sides_of_the_reference() -> None:
    logprobs = torch.full((2, 4), -1.0)
    batch = _grpo_batch(logprobs)
    kls = [GRPOLoss()(logprobs + shift, batch, 4.0)[1]["kl"] for shift in (-0.5, 0.0, 0.5)]
    assert kls[0] > kls[1] == 0.0 < kls[2]


def test_the_supervised_loss_is_cross_entropy_of_responses() -> None:
    logits = torch.randn(2, 4, CONFIG.vocabulary, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[2, 3, 4, 0], [5, 6, 7, 8]])
    mask = torch.tensor([[0.0, 1, 1, 0], [0, 0, 1, 1]])
    loss, _ = SupervisedLoss()(token_logprobs(logits, tokens), {"token_mask": mask}, 4.0)
    picked = [(0, 0, 3), (0, 1, 4), (1, 1, 7), (1, 2, 8)]
    expected = -sum(logits.log_softmax(-1)[place] for place in picked) / 4
    torch.testing.assert_close(loss, expected)


def test_a_write_back_is_timed_and_takes_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[Any] = []
    monkeypatch.setattr(TQWorkerMixin, "_is_replica_leader", lambda _: True)
    monkeypatch.setattr(TQWorkerMixin, "_write_back", lambda *_, **options: stored.append(options))
    monkeypatch.setattr(worker.time, "perf_counter", iter([1.0, 3.0]).__next__)
    made = worker.PolicyWorker.__new__(worker.PolicyWorker)
    made._plane_s = 0.0
    result = {"logprobs": torch.zeros(1, 2)}
    options: dict[str, Any] = {"dp_aligned_seq_len": False}
    meta = KVBatchMeta("p", "train", ["a"], sequence_lengths=[2])
    made._write_back_result_field(meta, result, result_key="logprobs", tq_field="x", **options)
    assert stored == [options]
    assert made.take_plane_s() == 2.0


@pytest.mark.parametrize("wrong", [{"prompts": 3, "group_size": 3}, {"group_size": 1}])
def test_sizes_that_do_not_divide_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"divide|at least 2"):
        JobConfig(**wrong)


def _row(step: int) -> StepRow:
    return StepRow(
        step=step,
        reward=0.25,
        accuracy=0.5,
        kl=0.01,
        grad_norm=1.5,
        sampling_gap=0.0,
        tokens=1234,
        seconds=0.7,
        plane_s=0.012,
        plane_bytes=98_765,
    )


@pytest.mark.integration  # on a new machine matplotlib asks other programs for the fonts
def test_a_run_is_shown_and_drawn(tmp_path: Path) -> None:
    console = Console(record=True, width=120, force_terminal=False)
    before, after = [0.0, 1.0] * 50, [1.0] * 75 + [0.0] * 25
    result = Result.of(before, after, [_row(1), _row(2)])
    with Reporter(console) as reporter:
        reporter.stage("reinforcement learning", total=2)
        for row in result.steps:
            reporter.step(row)
    path = plot(result.steps, tmp_path / "out" / "curves.png")
    reporter.result(result, path)
    shown = console.export_text()
    assert shown.count("grad norm") == 1
    assert shown.count("98,765") == 2
    assert "50.0% ± 5.0%" in shown
    assert "25.0%" in shown
    assert "curves.png" in shown
    assert path.read_bytes().startswith(b"\x89PNG")
