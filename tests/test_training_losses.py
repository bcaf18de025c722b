import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from hf_carryover.training import losses


def logits_of(*probabilities):
    return torch.tensor(probabilities).log()


def test_cross_entropy_is_minus_log_probability_and_nothing_where_ignored():
    found = losses.cross_entropy(logits_of([0.5, 0.25, 0.25], [0.1, 0.1, 0.8]), torch.tensor([0, losses.IGNORED]))

    assert found.tolist() == pytest.approx([math.log(2), 0])


def test_total_variation_is_twice_the_rejection_probability():
    drafter, target = logits_of([0.6, 0.4], [0.5, 0.5]), torch.tensor([[0.8, 0.2], [0.5, 0.5]])

    assert losses.total_variation(drafter, target).tolist() == pytest.approx([0.4, 0])


def test_what_the_target_gives_outside_a_draft_vocabulary_counts_in_full():
    assert losses.total_variation(logits_of([1.0, 1e-30]), torch.tensor([[0.7, 0.0]])).item() == pytest.approx(0.6)


def test_distillation_is_smallest_at_the_targets_own_probabilities():
    target = torch.tensor([0.7, 0.2, 0.1])

    at_target, elsewhere = (
        losses.distillation(logits_of(p), target).item() for p in ([0.7, 0.2, 0.1], [0.6, 0.3, 0.1])
    )

    assert at_target == pytest.approx(-(target * target.log()).sum().item())
    assert at_target < elsewhere


@pytest.mark.parametrize("loss", [losses.total_variation, losses.distillation])
def test_no_gradient_reaches_the_target(loss):
    # https://github.com/NVIDIA-NeMo/Automodel/issues/2810
    drafter, target = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)

    loss(drafter, target.softmax(-1)).sum().backward()

    assert drafter.grad.abs().sum() > 0
    assert target.grad is None


def test_confidence_is_judged_by_the_acceptance_probability():
    l1 = torch.tensor([0.0, 2.0, 1.0], requires_grad=True)

    found = losses.confidence(torch.zeros(3), l1)

    assert found.tolist() == pytest.approx([math.log(2)] * 3)
    assert not found.requires_grad
    assert (
        losses.confidence(torch.tensor([9.0]), l1[:1]).item() < 1e-3 < losses.confidence(torch.tensor([9.0]), l1[1:2])
    )


def test_position_decay_falls_to_one_part_in_e_after_gamma_slots():
    assert losses.position_decay(5, 4.0)[[0, 4]].tolist() == pytest.approx([1, math.exp(-1)])


def test_dpace_weights_are_those_of_the_paper():
    logits = logits_of([0.5, 0.5], [0.25, 0.75], [0.5, 0.5])
    s = [0.75, 0.625, 0.75]
    first, second, third = s[0], s[0] * s[1], s[0] * s[1] * s[2]

    whole = losses.dpace_weights(logits, torch.tensor([0, 0, 1]))
    cut = losses.dpace_weights(logits, torch.tensor([0, losses.IGNORED, 1]))

    assert whole.tolist() == pytest.approx([first + second + third, second + third, third])
    assert cut.tolist() == pytest.approx([first, 0, 0])


def test_expected_length_counts_the_right_prefix_and_the_targets_own_token():
    logits = F.one_hot(torch.tensor([[1, 2, 0], [0, 2, 1], [1, 2, 1]]), 3).float()
    labels = torch.tensor([[1, 2, 1], [1, 2, 1], [1, losses.IGNORED, losses.IGNORED]])

    assert losses.expected_length(logits, labels).tolist() == [3, 1, 2]
