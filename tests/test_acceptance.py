import pytest
import torch

from hf_carryover.acceptance import DraftStats, Round, split_at_acceptance


@pytest.mark.parametrize("num_rejected", range(5))
def test_accepted_and_rejected_rows_joined_are_exactly_the_verified_rows(num_rejected):
    rows = torch.randn(1, 5, 3)

    accepted, rejected = split_at_acceptance(rows, num_rejected)

    assert rejected.shape[1] == num_rejected
    assert torch.equal(torch.cat([accepted, rejected], dim=1), rows)


@pytest.mark.parametrize("num_rejected", [-1, 6])
def test_no_more_rows_can_be_rejected_than_there_are(num_rejected):
    with pytest.raises(ValueError, match=f"`num_rejected` must be in 0..5, the rows there are, got {num_rejected}"):
        split_at_acceptance(torch.randn(1, 5, 3), num_rejected)


def test_stats_count_tokens_with_and_without_the_targets_own():
    drafts = torch.tensor([7, 8, 9])
    stats = DraftStats([Round(drafts, num_carried=0, num_accepted=3), Round(drafts, num_carried=2, num_accepted=0)])

    assert stats.num_tokens == 5
    assert stats.accepted_length == 2.5
    assert stats.accepted_drafts == 1.5
    assert stats.histogram == [1, 0, 0, 1]
    assert stats.carried_rows == 2
    assert stats.rounds[0].drafted_ids == [7, 8, 9]


def test_stats_without_rounds_are_zero():
    stats = DraftStats()

    assert (stats.accepted_length, stats.accepted_drafts, stats.num_tokens, stats.carried_rows) == (0.0, 0.0, 0, 0)
    assert stats.histogram == [0]
    assert stats.seconds == {"recycle": 0, "draft": 0}
