"""How wrong is a block? Losses a slot, and the weights that say which slots matter; all pure functions.

Every loss maps logits ``[..., K, V]`` to one value a slot, ``[..., K]``; `BlockLosses` weighs and adds them.
With a draft vocabulary V is its size, labels are indices into it, and the target's probabilities sum to less than 1.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

IGNORED = -100


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Minus log-probability of the recorded token (DFlash, arXiv 2602.06036); 0 where the label ``[..., K]`` is -100.

    The plainest of the losses: it sees one sample of the target's distribution, where `total_variation` and
    `distillation` see all of it.
    """
    flat = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return flat.view(labels.shape)


def total_variation(logits: Tensor, target_probs: Tensor) -> Tensor:
    """L1 distance of drafter and target, ``sum |p_draft - p_target|`` in 0..2 (DSpark, arXiv 2607.05147).

    ``1 - L1 / 2`` is the probability that speculative sampling accepts the draft (arXiv 2211.17192, Corollary 3.6;
    their q is our drafter), so unlike `cross_entropy` and `distillation` it measures acceptance itself. What the
    target gives to tokens outside a draft vocabulary counts in full.
    """
    target_probs = target_probs.detach()
    outside = (1 - target_probs.sum(-1)).clamp(min=0)
    return (logits.float().softmax(-1) - target_probs).abs().sum(-1) + outside


def distillation(logits: Tensor, target_probs: Tensor) -> Tensor:
    """Cross-entropy against the target's probabilities (Hinton et al., arXiv 1503.02531): KL up to a constant.

    `cross_entropy` with every token as label, weighted by how likely the target finds it.
    """
    return -(target_probs.detach() * logits.float().log_softmax(-1)).sum(-1)


def confidence(confidence_logits: Tensor, l1: Tensor) -> Tensor:
    """BCE of the confidence head ``[..., K]`` against the acceptance probability ``1 - L1 / 2`` (DSpark).

    It judges the drafts that the other losses shape; its label takes no gradient.
    """
    return F.binary_cross_entropy_with_logits(
        confidence_logits.float(), 1 - l1.detach().clamp(0, 2) / 2, reduction="none"
    )


def position_decay(num_drafts: int, gamma: float) -> Tensor:
    """Weights ``exp(-(k - 1) / gamma)`` of drafts k = 1..K, ``[K]`` (DFlash): early drafts gate the later ones."""
    return torch.exp(-torch.arange(num_drafts) / gamma)


def dpace_weights(logits: Tensor, labels: Tensor, *, floor: float = 0.5) -> Tensor:
    """Weights of D-PACE (arXiv 2605.18810), ``[..., K]``, detached: what a slot is worth to the accepted length.

    ``s_k = (1 - a) q_k + a`` with q_k the drafter's probability of the recorded token and ``a`` our ``floor``,
    ``P_k = s_1 .. s_k``, and the weight of slot k is the sum of P_j over j >= k. Where `position_decay` guesses how
    fast acceptance falls, this asks the drafter. Nothing is accepted at or after a label of -100.
    """
    with torch.no_grad():
        known = labels != IGNORED
        chosen = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0].exp()
        reached = (((1 - floor) * chosen + floor) * known).cumprod(-1)
        return reached.flip(-1).cumsum(-1).flip(-1)


def expected_length(logits: Tensor, labels: Tensor) -> Tensor:
    """Cheap estimate of the accepted length, ``1 + sum_k prod_{j <= k} p_j``, one a block ``[...]``.

    p_j is 1 where the drafter's top token is the recorded one, else 0, as greedy drafting accepts.
    """
    right = (logits.argmax(-1) == labels) & (labels != IGNORED)
    return 1 + right.long().cumprod(-1).sum(-1).float()
