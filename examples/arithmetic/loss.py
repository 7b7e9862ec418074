"""Functions of logits: log-probabilities and the two losses, for one process or many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Metrics = dict[str, float]


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return [N, S] log-probabilities of `tokens` [N, S], each under `logits` [N, S, V] of the previous token; the
    first is 0."""
    scores = -F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return F.pad(scores, (1, 0))


def group_advantages(rewards: Tensor, *, group_size: int) -> Tensor:
    """Return [N] advantages of [N] rewards, centered and scaled within each group. The samples of a prompt are
    consecutive.

    If all rewards of a group are equal, they do not show which response is better: its advantages are 0.
    """
    groups = rewards.view(-1, group_size)
    spread = groups.std(dim=1, keepdim=True, correction=0)
    return ((groups - groups.mean(dim=1, keepdim=True)) / (spread + 1e-4)).flatten()


@dataclass(frozen=True)
class SupervisedLoss:
    """Cross-entropy of the response tokens."""

    def __call__(self, logprobs: Tensor, batch: Mapping[str, Tensor], tokens: float) -> tuple[Tensor, Metrics]:
        """See `GRPOLoss`; reads `token_mask`."""
        loss = -(logprobs * batch["token_mask"]).sum() / tokens
        return loss, {"loss": float(loss.detach())}


@dataclass(frozen=True, kw_only=True)
class GRPOLoss:
    """Clipped policy gradient plus a penalty on the divergence from the reference policy, per response token.

    clip: how far the probability ratio may move before its gradient is clipped. kl_weight: of the penalty, whose
    estimator exp(d) - d - 1 with d = log(reference / policy) is never negative (Schulman's "k3").
    """

    clip: float = 0.2
    kl_weight: float = 0.02

    def __call__(self, logprobs: Tensor, batch: Mapping[str, Tensor], tokens: float) -> tuple[Tensor, Metrics]:
        """Return the contribution of these rows to the loss, and its metrics. Both are summed over all parts.

        logprobs: [N, S], of the trained model. batch: `token_mask`, `advantages`, `prev_logprobs`,
        `reference_policy_logprobs`, `generation_logprobs`, each [N, S]. tokens: response tokens in all parts
        together. Metrics: loss; kl; clipped, the share of ratios beyond the clip; sampling_gap, the distance of the
        log-probabilities at sampling from the recomputed ones (it grows if rollouts and training use different
        weights).
        """
        mask = batch["token_mask"]
        advantages = batch["advantages"]
        ratio = torch.exp((logprobs - batch["prev_logprobs"]) * mask)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        behind = (batch["reference_policy_logprobs"] - logprobs) * mask
        kl = torch.exp(behind) - behind - 1
        loss = ((self.kl_weight * kl - gain) * mask).sum() / tokens
        gap = (batch["prev_logprobs"] - batch["generation_logprobs"]).abs()
        shares = {"kl": kl.detach(), "clipped": (ratio != clipped).float(), "sampling_gap": gap}
        means = {name: float((share * mask).sum() / tokens) for name, share in shares.items()}
        return loss, {"loss": float(loss.detach()), **means}
