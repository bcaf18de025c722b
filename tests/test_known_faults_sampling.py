"""What other software got wrong about sampling with a draft, and the corners of the library's own acceptance rule."""

import sys
from pathlib import Path

import pytest
import torch
from transformers.generation.utils import _speculative_sampling

from tests.fakes import KINDS, VOCAB, make_drafter, make_target, plain, prompt

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from exactness import random_drafter

LARGEST_DRAW = 1 - 2**-24


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_runs_where_no_processor_is_active(kind):
    """huggingface/transformers#48281."""
    target, ids = make_target(), prompt()
    drafter = make_drafter(kind, block_size=4)
    torch.manual_seed(0)

    text = plain(target, input_ids=ids, assistant_model=drafter, do_sample=True, top_k=0, top_p=1.0, temperature=1.0)

    assert text.shape == (1, ids.shape[1] + 40)
    assert torch.equal(text[:, : ids.shape[1]], ids)


@pytest.mark.parametrize("vocab_size", [2, 7, 50_000])
def test_drafts_drawn_from_the_targets_own_law_are_all_accepted(vocab_size, monkeypatch):
    """Bit-equal logits have the ratio 1, above every draw: what is left of ``p - q``, 0/0, is never drawn from."""
    monkeypatch.setattr(torch, "rand_like", lambda ratio: torch.full_like(ratio, LARGEST_DRAW))
    for seed in range(20):
        torch.manual_seed(seed)
        logits = 10 * torch.randn(1, 5, vocab_size)
        drafts = torch.multinomial(logits[0, :4].softmax(-1), 1).T

        tokens, num_accepted = _speculative_sampling(drafts, logits[:, :4], 4, logits)

        assert num_accepted == 4
        assert torch.equal(tokens[:, :4], drafts)


@pytest.mark.parametrize("vocab_size", [2, VOCAB])
def test_an_oracle_that_samples_is_accepted_whole_at_the_largest_draw(vocab_size, monkeypatch):
    monkeypatch.setattr(torch, "rand_like", lambda ratio: torch.full_like(ratio, LARGEST_DRAW))
    target = make_target(vocab_size=vocab_size)
    drafter = make_drafter(vocab_size=vocab_size, mask_token_id=vocab_size - 1)
    # Target and drafter share their head: one law for every row of both.
    law = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0))
    target.lm_head.register_forward_hook(lambda module, args, output: law.expand_as(output).clone())
    torch.manual_seed(0)

    plain(target, input_ids=prompt() % vocab_size, assistant_model=drafter, do_sample=True, top_k=0, max_new_tokens=41)

    assert drafter.last_stats.accepted_length == 5.0


def test_the_corner_that_remains_needs_laws_that_agree_to_the_last_bit_but_one():
    """The library's rule divides 0 by 0 where ``q`` exceeds ``p`` by rounding and ``p`` exceeds ``q`` nowhere.

    The chance of that is at most what ``q`` exceeds ``p`` by, summed: a few times 2**-24 a draft, only where the two
    laws agree to rounding. Both sums are 1 to rounding, so that nothing larger can hide.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        p = 8 * torch.randn(VOCAB, generator=generator)
        q = p + 10 ** -torch.randint(1, 9, (1,), generator=generator) * torch.randn(VOCAB, generator=generator)
        p, q = p.softmax(-1), q.softmax(-1)

        surplus = (q - p).clamp(min=0).sum()

        assert (p > q).any() or surplus <= 4 * 2**-24


@pytest.mark.slow
def test_sampled_text_on_smollm2_has_the_distribution_of_plain_generation(smollm2, monkeypatch):
    """Two samples at fixed seeds, compared place by place; the drafter proposes what is frequent at each place."""
    target, tokenizer = smollm2
    ids = tokenizer("My favourite colour is", return_tensors="pt").input_ids
    options = {"do_sample": True, "max_new_tokens": 4, "min_new_tokens": 4, "top_k": 20, "temperature": 1.2}
    torch.manual_seed(0)
    theirs = plain(target, input_ids=ids, num_return_sequences=300, **options)[:, ids.shape[1] :]
    frequent = torch.stack([theirs[:, place].bincount(minlength=target.config.vocab_size) for place in (1, 2)])
    drafter = random_drafter(target, sample_from_anchor=False)
    logits = (frequent + 0.001).log()[None]
    monkeypatch.setattr(drafter, "slot_logits", lambda hidden, head: logits[:, : hidden.shape[1]])
    ours, accepted = [], 0

    for seed in range(40):
        torch.manual_seed(seed)
        text = plain(target, input_ids=ids, assistant_model=drafter, **options)
        ours.append(text[0, ids.shape[1] :])
        accepted += drafter.last_stats.rounds[0].num_accepted

    assert 10 < accepted < 70
    for place in range(4):
        assert chance_of_one_law(torch.stack(ours)[:, place], theirs[:, place]) > 1e-3
    # The comparison tells places apart.
    assert chance_of_one_law(theirs[:, 1], theirs[:, 3]) < 1e-3


def chance_of_one_law(one, other, num_bins=9):
    """The chance that two samples of one law differ more (chi-square over the most frequent tokens, and the rest)."""
    tokens = torch.cat([one, other]).bincount().topk(num_bins).indices
    counts = torch.stack([(sample[:, None] == tokens).sum(0) for sample in (one, other)]).double()
    counts = torch.cat([counts, torch.tensor([[len(one)], [len(other)]]) - counts.sum(1, keepdim=True)], dim=1)
    expected = counts.sum(0) * counts.sum(1, keepdim=True) / counts.sum()
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    return torch.special.gammaincc(torch.tensor(num_bins / 2, dtype=torch.double), statistic / 2).item()
