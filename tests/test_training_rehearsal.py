import sys
from copy import copy
from pathlib import Path

import pytest
import torch

from hf_carryover.training.data import AnchoredTexts, Example, collate
from hf_carryover.training.masks import NO_ANCHOR, Texts
from hf_carryover.training.rehearsal import Reading, Rehearsal, recorded
from tests.fakes import MASK, make_drafter, make_target, plain, prompt

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import rejected_rows

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def texts_of(*lists):
    """Texts, padded with a token that means something."""
    longest = max(map(len, lists))
    ids = torch.full((len(lists), longest), 7)
    for row, text in zip(ids, lists, strict=True):
        row[: len(text)] = torch.tensor(text)
    return Texts(ids, torch.tensor([len(text) for text in lists]))


def random_text(length, *, seed=0):
    return prompt(length, seed=seed)[0].tolist()


def blocks(rehearsal, texts, reading, anchors, rejected=None):
    """Logits of all blocks, ``[N, M, K, V]``, without a Markov head's bias."""
    return rehearsal.slot_logits(rehearsal.draft(texts, reading, anchors, rejected))


@pytest.fixture(params=["dflash", "markov-vanilla", "sliding", "causal"])
def rehearsal(request):
    overrides = {"sliding": SLIDING, "causal": {"is_causal": True}}.get(request.param, {})
    kind = request.param if request.param.startswith("markov") else "dflash"
    return Rehearsal(make_drafter(kind, **overrides), make_target())


@torch.no_grad()
def test_a_block_sees_the_memory_before_its_anchor_and_nothing_else(rehearsal):
    texts = texts_of(random_text(20), random_text(14, seed=1))
    reading, anchors = rehearsal.read(texts), torch.tensor([[9, 10, 13], [5, 6, NO_ANCHOR]])
    before = blocks(rehearsal, texts, reading, anchors)

    changed = reading.features.clone()
    changed[0, 9:] += 1  # at the first anchor and after
    after = blocks(rehearsal, texts, Reading(changed, reading.last_hidden, reading.cache), anchors)
    last = reading.features.clone()
    last[:, 8] += 1
    nearest = blocks(rehearsal, texts, Reading(last, reading.last_hidden, reading.cache), anchors)

    assert torch.equal(after[0, 0], before[0, 0])
    assert not torch.allclose(after[0, 1], before[0, 1])  # one apart: row 9 is before its anchor
    assert torch.equal(after[1], before[1])
    assert (nearest[0, 0] - before[0, 0]).abs().amax(-1).gt(1e-4).all()  # in every slot


@torch.no_grad()
def test_blocks_and_padding_do_not_see_each_other(rehearsal):
    short = random_text(14, seed=1)
    alone, together = texts_of(short), texts_of(random_text(20), short)
    anchors = torch.tensor([[5, 6, 11]])

    apart = [blocks(rehearsal, alone, rehearsal.read(alone), anchors[:, i : i + 1])[0, 0] for i in range(3)]
    padded = blocks(rehearsal, together, rehearsal.read(together), torch.cat([torch.tensor([[4, 9, 12]]), anchors]))

    torch.testing.assert_close(padded[1], torch.stack(apart), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_block_can_carry_its_anchors_own_row(rehearsal):
    texts = texts_of(random_text(20), random_text(14, seed=1))
    reading, anchors = rehearsal.read(texts), torch.tensor([[9, 10, NO_ANCHOR], [5, 6, 11]])
    rehearsal.drafter.carry_embedding.normal_()

    own = rehearsal.own_rows(reading, anchors)
    before = blocks(rehearsal, texts, reading, anchors, own)
    changed = reading.features.clone()
    changed[0, 10] += 1
    moved = Reading(changed, reading.last_hidden, reading.cache)
    after = blocks(rehearsal, texts, moved, anchors, rehearsal.own_rows(moved, anchors))

    assert own.positions[..., 0].tolist() == [[9, 10, 0], [5, 6, 11]]
    assert own.is_rejected[..., 0].tolist() == [[True, True, False], [True, True, True]]
    assert torch.equal(own.features[1, 2, 0], reading.features[1, 11])
    assert torch.equal(after[0, 0], before[0, 0])  # row 10 is neither before nor at its anchor
    assert not torch.allclose(after[0, 1], before[0, 1])
    assert not torch.allclose(before[0, 1], blocks(rehearsal, texts, reading, anchors)[0, 1])


@torch.no_grad()
@pytest.mark.parametrize("right", [True, False])
def test_what_a_rejected_row_says_is_the_targets_next_token_after_the_wrong_one(rehearsal, right):
    text, anchors = random_text(24), torch.tensor([[9]])
    draft = rehearsal.propose(
        texts_of(text), anchors, rehearsal.draft(texts_of(text), rehearsal.read(texts_of(text)), anchors)
    )
    wrong = draft[0, 0, 0].item()
    text[10] = (wrong + 1) % MASK  # so it is rejected, and the next round stands there
    said = rehearsal.target(torch.tensor([[*text[:10], wrong]])).logits[0, -1].argmax().item()
    text[11] = said if right else (said + 1) % MASK

    found = rejected_rows.rehearse(rehearsal, texts_of(text), anchors)

    assert found["known"][0, 0, 0]
    assert found["row"][0, 0, 0] == right
    assert not rehearsal.target.get_decoder()._forward_hooks


@torch.no_grad()
def test_a_second_draft_sees_its_own_rejected_rows_and_no_others(rehearsal):
    texts = texts_of(random_text(24))
    reading, anchors = rehearsal.read(texts), torch.tensor([[9, 10, 15]])
    drafts = rehearsal.propose(texts, anchors, rehearsal.draft(texts, reading, anchors))
    drafts[0, 1, :2] = texts.input_ids[0, 11:13]  # two drafts of the second branch are right
    drafts[0, 1, 2] = (texts.input_ids[0, 13] + 1) % MASK
    num_accepted = rehearsal.accept(texts, anchors, drafts)
    rejected = rehearsal.verify(texts, reading, anchors, drafts, num_accepted)
    following = rehearsal.next_anchors(texts, anchors, num_accepted)
    before = blocks(rehearsal, texts, reading, following, rejected)

    def with_change(branch, row):
        features = rejected.features.clone()
        features[0, branch, row] += 1
        return blocks(rehearsal, texts, reading, following, rejected._replace(features=features))

    assert num_accepted[0, 1] == 2
    assert following[0, 1] == 13
    rejected_row, accepted_row = with_change(1, 2), with_change(1, 1)
    assert not torch.allclose(rejected_row[0, 1], before[0, 1])
    assert torch.equal(rejected_row[0, [0, 2]], before[0, [0, 2]])
    assert torch.equal(accepted_row, before)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mistral", "gpt2"])
def test_a_branch_is_scored_as_the_target_scores_it_alone(kind):
    rehearsal = Rehearsal(make_drafter(), make_target(kind))
    texts = texts_of(random_text(20), random_text(14, seed=1))
    reading, anchors = rehearsal.read(texts), torch.tensor([[9, 10, 15], [5, 6, 11]])
    drafts = torch.randint(0, MASK, (2, 3, 4), generator=torch.Generator().manual_seed(0))

    rejected = rehearsal.verify(texts, reading, anchors, drafts, rehearsal.accept(texts, anchors, drafts))

    assert reading.cache.get_seq_length() == 20
    for text in range(2):
        for branch, anchor in enumerate(anchors[text].tolist()):
            ids = torch.cat([texts.input_ids[text, : anchor + 1], drafts[text, branch]])[None]
            states = rehearsal.target(input_ids=ids, output_hidden_states=True).hidden_states
            rows = torch.cat([states[i + 1] for i in (0, 2)], dim=-1)[0, anchor + 1 :]
            torch.testing.assert_close(rejected.features[text, branch], rows, rtol=1e-3, atol=1e-4)
            assert rejected.positions[text, branch].tolist() == list(range(anchor + 1, anchor + 5))


class Recorder:
    """Watches a carry-off run: drafts a second time in every round, carry on, the way decoding does."""

    def __init__(self, drafter, target):
        self.drafter, self.second = drafter, []
        self.hooks = [
            drafter.register_forward_pre_hook(self.draft_again, with_kwargs=True),
            target.register_forward_hook(self.keep),
        ]

    def keep(self, target, args, output):
        self.states = output.hidden_states

    def draft_again(self, drafter, args, kwargs):
        layers = [i + 1 for i in drafter.config.target_layer_ids]
        rows = torch.cat([self.states[i] for i in layers], dim=-1)
        accepted, positions = kwargs["context_hidden_states"], kwargs["position_ids"]
        num_accepted, num_slots = accepted.shape[1], kwargs["noise_embeds"].shape[1]
        rejected = rows[:, num_accepted:]
        anchor = positions[:, num_accepted : num_accepted + 1]
        cache = copy(kwargs["cache"])
        cache.layers = [copy(layer) for layer in cache.layers]
        self.second.append(
            drafter.forward(
                noise_embeds=kwargs["noise_embeds"],
                context_hidden_states=torch.cat([accepted, drafter.mark_rejected(rejected)], dim=1),
                position_ids=torch.cat(
                    [positions[:, :num_accepted], anchor + torch.arange(rejected.shape[1]), positions[:, -num_slots:]],
                    dim=1,
                ),
                cache=cache,
                num_carried=rejected.shape[1],
            ).last_hidden_state[0]
        )


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dflash", "markov-vanilla", "markov-gated", "markov-rnn"])
@pytest.mark.parametrize("overrides", [{}, SLIDING, {"draft_vocab_size": 50}], ids=["full", "sliding", "subset"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_training_equals_decoding(kind, overrides, architecture):
    target, drafter = make_target(architecture), make_drafter(kind, **overrides)
    ids, config = prompt(6), drafter.config
    drafter.carry_enabled = False
    recorder = Recorder(drafter, target)

    text = plain(target, input_ids=ids, attention_mask=torch.ones_like(ids), assistant_model=drafter)
    for hook in recorder.hooks:
        hook.remove()

    rounds = [r for r in drafter.last_stats.rounds if len(r.drafts) == config.num_drafts]
    anchors = torch.tensor([[6 + sum(r.num_accepted + 1 for r in rounds[:i]) for i in range(len(rounds))]])
    texts, rehearsal = texts_of(text[0].tolist()), Rehearsal(drafter, target)
    reading = rehearsal.read(texts)
    drafts = rehearsal.propose(texts, anchors, rehearsal.draft(texts, reading, anchors))
    num_accepted = rehearsal.accept(texts, anchors, drafts)
    rejected = rehearsal.verify(texts, reading, anchors, drafts, num_accepted)
    following = rehearsal.next_anchors(texts, anchors, num_accepted)
    hidden = rehearsal.draft(texts, reading, following, rejected)

    assert drafts[0].tolist() == [r.drafted_ids for r in rounds]
    assert num_accepted[0].tolist() == [r.num_accepted for r in rounds]
    assert following[0, :-1].tolist() == anchors[0, 1:].tolist()
    assert rejected.is_rejected.sum(-1)[0].tolist() == [config.num_drafts - r.num_accepted for r in rounds]
    first = 0 if config.sample_from_anchor else 1
    decoded = torch.stack(recorder.second[1 : len(rounds)])[:, first : first + config.num_drafts]
    torch.testing.assert_close(hidden[0, :-1], decoded, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_teacher_forcing_equals_walking_where_the_drafts_are_right():
    for kind in ("markov-vanilla", "markov-gated", "markov-rnn"):
        rehearsal = Rehearsal(make_drafter(kind, draft_vocab_size=50), make_target())
        texts = texts_of(random_text(20))
        reading, anchors = rehearsal.read(texts), torch.tensor([[8]])
        hidden = rehearsal.draft(texts, reading, anchors)
        drafts = rehearsal.propose(texts, anchors, hidden)
        texts.input_ids[0, 9 : 9 + drafts.shape[2]] = drafts[0, 0]

        logits, confidences = rehearsal.teacher_forced(texts, anchors, hidden)

        assert confidences is None
        assert rehearsal.drafter.token_ids(logits.argmax(-1)).tolist() == drafts.tolist()


def test_a_slot_is_labelled_with_the_token_it_predicts():
    # https://github.com/vllm-project/speculators/issues/865 and SpecForge#471: labels and gates one position off.
    texts = texts_of(list(range(40)))

    labels = recorded(texts, torch.tensor([[10, 37, NO_ANCHOR]]), 4, first=1)

    assert labels[0].tolist() == [[11, 12, 13, 14], [38, 39, -1, -1], [-1] * 4]


def test_an_anchor_whose_round_reaches_the_end_has_no_next_one():
    rehearsal, texts = Rehearsal(make_drafter(), make_target()), texts_of(list(range(20)))

    following = rehearsal.next_anchors(texts, torch.tensor([[14, 15, 16, NO_ANCHOR]]), torch.tensor([[3, 3, 3, 0]]))

    assert following[0].tolist() == [18, NO_ANCHOR, NO_ANCHOR, NO_ANCHOR]


def test_attention_mass_is_what_falls_on_rejected_rows(rehearsal, monkeypatch):
    """Keys are the text's rows, the rejected ones, the blocks; the one at place i gets a share in proportion to i."""
    for layer in rehearsal.drafter.layers:
        attend = layer.self_attn.forward

        def uneven(block, memory, attend=attend, **kwargs):
            output, shown = attend(block, memory, **kwargs)
            shares = torch.arange(1.0, 1 + shown.shape[-1]) if shown is not None else torch.ones(1)
            return output, (shares / shares.sum()).expand(1, 4, block.shape[1], -1)

        monkeypatch.setattr(layer.self_attn, "forward", uneven)
    texts = texts_of(random_text(24))
    reading, anchors = rehearsal.read(texts), torch.tensor([[9, 12]])
    drafts = (texts.input_ids[:, 10:14][:, None].expand(-1, 2, -1) + 1) % MASK
    num_accepted = rehearsal.accept(texts, anchors, drafts)
    rejected = rehearsal.verify(texts, reading, anchors, drafts, num_accepted)
    following = rehearsal.next_anchors(texts, anchors, num_accepted)

    mass = rehearsal.attention_mass(texts, reading, following, rejected)
    none = rehearsal.attention_mass(
        texts, reading, following, rejected._replace(is_rejected=torch.zeros_like(rejected.is_rejected))
    )

    text, branches, blocks = 24, rejected.is_rejected.numel(), 2 * rehearsal.drafter.config.block_size
    on_rejected = sum(range(text + 1, text + branches + 1)) / sum(range(1, text + branches + blocks + 1))
    assert mass == pytest.approx(on_rejected)
    assert none == 0
    assert rehearsal.drafter.config._attn_implementation == "sdpa"


def test_anchors_lie_in_the_answer_with_a_token_after_them():
    example = Example(list(range(5)), list(range(5, 14)))

    items = [AnchoredTexts([example], num_anchors=n, seed=0)[0] for n in (3, 20)]

    assert items[1]["anchors"].tolist() == [*range(5, 13), *[NO_ANCHOR] * 12]
    assert set(items[0]["anchors"].tolist()) < set(range(5, 13))
    assert collate(items[:1])["ends"].tolist() == [14]


def test_the_size_of_features_is_not_the_first_tokens(monkeypatch):
    """Many models have a first token whose features are hundreds of times larger (SmolLM2: rms 4,000 beside 6)."""
    features = torch.ones(2, 9, 96) * torch.tensor([2.0, 3.0, 5.0]).repeat_interleave(32)
    features[:, 0] *= 1000
    monkeypatch.setattr(Rehearsal, "read", lambda *_: Reading(features, features, None))
    texts = Texts(torch.zeros(2, 9, dtype=torch.long), torch.tensor([9, 7]))

    found = Rehearsal(make_drafter(target_layer_ids=[0, 1, 2]), make_target()).layer_rms(texts)

    assert found.tolist() == [2.0] * 32 + [3.0] * 32 + [5.0] * 32
