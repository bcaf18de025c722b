import itertools

import pytest
import torch
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from hf_carryover import CarryoverCache, CarryoverCandidateGenerator
from tests.enumeration import Tree, distance, law_of_target
from tests.fakes import (
    KINDS,
    VOCAB,
    ScriptedDrafter,
    letters_tokenizer,
    make_drafter,
    make_target,
    plain,
    prompt,
    visible,
)


class Spy:
    """Replaces the generator's class in the seam by one that keeps itself and calls back after every draft."""

    def __init__(self, monkeypatch, after_draft=lambda *_: None):
        self.generators = []
        spy = self

        class Watched(CarryoverCandidateGenerator):
            def get_candidates(self, input_ids, **kwargs):
                if not spy.generators or spy.generators[-1] is not self:
                    spy.generators.append(self)
                result = super().get_candidates(input_ids, **kwargs)
                if kwargs["model_outputs"] is not None:
                    after_draft(self, input_ids, result, kwargs)
                return result

        monkeypatch.setattr("hf_carryover.decoding.CarryoverCandidateGenerator", Watched)


def scripted(kind, target, ids, counts, **overrides):
    drafter = make_drafter(kind, cls=ScriptedDrafter, **overrides)
    drafter.follow(plain(target, input_ids=ids), counts)
    return drafter


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("carry", [False, True], ids=["carry-off", "carry-on"])
def test_memory_equals_memory_rebuilt_from_committed_text(kind, carry, monkeypatch):
    """Whatever was drafted and rejected between: z-lab/dflash#15."""
    target, ids = make_target(), prompt()
    drafter = scripted(kind, target, ids, [0, 2, 1, 4, 3, 0, 0, 5])
    drafter.carry_enabled = carry
    num_checked = []

    def compare(generator, input_ids, result, kwargs):
        if result[0].shape[1] == input_ids.shape[1]:
            return
        features = features_of(target, drafter, input_ids[:, :-1])
        afresh = CarryoverCache()
        afresh.commit(features.shape[1])
        positions = torch.arange(features.shape[1] + drafter.config.block_size)[None]
        block = torch.zeros(1, drafter.config.block_size, 32)
        super(ScriptedDrafter, drafter).forward(block, features, positions, cache=afresh)
        assert generator.cache.num_committed == input_ids.shape[1] - 1
        for layer in range(2):
            for ours, theirs in zip(visible(generator.cache, layer), visible(afresh, layer), strict=True):
                torch.testing.assert_close(ours[:, :, : generator.cache.num_committed], theirs, rtol=1e-4, atol=1e-5)
        num_checked.append(1)

    Spy(monkeypatch, compare)
    plain(target, input_ids=ids, assistant_model=drafter)

    assert len(num_checked) >= 8


def features_of(target, drafter, ids):
    hidden = target(ids, output_hidden_states=True).hidden_states
    return torch.cat([hidden[i + 1] for i in drafter.config.target_layer_ids], dim=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_carried_rows_are_the_marked_features_of_the_rejected_drafts_at_their_own_positions(kind, monkeypatch):
    """Block positions, too: ikawrakow/ik_llama.cpp#2296."""
    target, ids = make_target(), prompt()
    drafter = scripted(kind, target, ids, [0, 2, 1, 3, 4, 0])
    previous, num_checked = {}, []

    def compare(generator, input_ids, result, kwargs):
        call, num_carried = drafter.calls[-1], generator.cache.num_carried
        if previous:
            verified, num_accepted = previous["candidates"], kwargs["n_last_matches"]
            assert num_carried == verified.shape[1] - previous["length"] - num_accepted
            expected = features_of(target, drafter, verified)[:, verified.shape[1] - num_carried :]
            torch.testing.assert_close(
                call["context_hidden_states"][:, -num_carried:] if num_carried else expected,
                expected + drafter.carry_embedding if num_carried else expected,
                rtol=1e-4,
                atol=1e-5,
            )
        anchor = input_ids.shape[1] - 1
        rows = list(range(anchor - call["context_hidden_states"].shape[1] + num_carried, anchor))
        block = list(range(anchor, anchor + drafter.config.block_size))
        assert call["position_ids"][0].tolist() == rows + list(range(anchor, anchor + num_carried)) + block
        num_checked.append(num_carried)
        previous.update(candidates=result[0], length=input_ids.shape[1])
        if result[0].shape[1] == input_ids.shape[1]:
            previous.clear()

    Spy(monkeypatch, compare)
    plain(target, input_ids=ids, max_new_tokens=16, assistant_model=drafter)

    assert sum(count > 0 for count in num_checked) >= 4


def test_the_worked_example_of_one_round(monkeypatch):
    """T = 5 (anchor at 4, memory 0..3), K = 3, n = 1: verified 4..7, committed 4..5, new anchor 6, carried 6..7."""
    target, ids = make_target(), prompt(4)
    drafter = scripted("dflash", target, ids, [1], block_size=4)
    Spy(monkeypatch)

    plain(target, input_ids=ids, max_new_tokens=5, assistant_model=drafter)
    first, second = drafter.calls

    assert first["position_ids"][0].tolist() == [0, 1, 2, 3, *range(4, 8)]
    assert second["position_ids"][0].tolist() == [4, 5, 6, 7, *range(6, 10)]
    assert (first["num_carried"], second["num_carried"]) == (0, 2)


def test_rows_carried_in_one_round_are_gone_in_the_next(monkeypatch):
    """vllm-project/vllm#42971."""
    target, ids = make_target(), prompt()
    drafter = scripted("dflash", target, ids, [1, 0, 4, 4, 2, 0])
    seen = []

    def record(generator, input_ids, result, kwargs):
        cache = generator.cache
        seen.append((cache.num_committed, cache.num_carried, cache.layers[0].keys.shape[2]))

    Spy(monkeypatch, record)
    plain(target, input_ids=ids, assistant_model=drafter)

    assert [carried for _, carried, _ in seen[:6]] == [0, 3, 4, 0, 0, 2]
    assert all(rows == committed + carried + 5 for committed, carried, rows in seen[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_carry_off_equals_carry_on_when_nothing_was_rejected(kind, monkeypatch):
    target, ids = make_target(), prompt()
    hidden = {}
    for carry in (False, True):
        drafter = scripted(kind, target, ids, [9])
        drafter.carry_enabled = carry
        hidden[carry] = []
        drafter.register_forward_hook(lambda *args, out=hidden[carry]: out.append(args[2].last_hidden_state))
        plain(target, input_ids=ids, assistant_model=drafter)

    assert len(hidden[True]) >= 6
    assert all(torch.equal(on, off) for on, off in zip(hidden[True], hidden[False], strict=True))


def test_carried_rows_change_the_next_draft():
    target, ids = make_target(), prompt()
    drafts = {}
    for carry in (False, True):
        drafter = make_drafter()
        drafter.carry_enabled = carry
        plain(target, input_ids=ids, assistant_model=drafter)
        drafts[carry] = [r.drafted_ids for r in drafter.last_stats.rounds]

    assert drafts[True][0] == drafts[False][0]
    assert drafts[True][1] != drafts[False][1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_vocab", [None, 20], ids=["all-tokens", "draft-vocabulary"])
def test_greedy_drafts_are_the_best_tokens_from_left_to_right(kind, draft_vocab, monkeypatch):
    """lightseekorg/tokenspeed#829; vllm-project/vllm-ascend#16166."""
    target, ids = make_target(), prompt()
    drafter = make_drafter(kind, draft_vocab_size=draft_vocab)
    if draft_vocab:
        drafter.draft_vocab_ids.copy_(torch.arange(1, 60, 3))
    hidden, num_checked = [], []
    drafter.register_forward_hook(lambda *args: hidden.append(args[2].last_hidden_state))

    def compare(generator, input_ids, result, kwargs):
        if result[0].shape[1] == input_ids.shape[1]:
            return
        first = 0 if drafter.config.sample_from_anchor else 1
        previous, state = input_ids[:, -1], None
        for draft, slot in zip(result[0][0, input_ids.shape[1] :], hidden[-1][0, first:], strict=False):
            logits = target.lm_head(slot[None])
            if drafter.markov_head is not None:
                bias, state = drafter.markov_head(previous, slot[None], state)
                logits = (logits if draft_vocab is None else logits[:, drafter.draft_vocab_ids]) + bias
            elif draft_vocab is not None:
                logits = logits[:, drafter.draft_vocab_ids]
            best = logits.argmax(-1)
            assert draft == (best if draft_vocab is None else drafter.draft_vocab_ids[best])
            previous = draft[None]
        num_checked.append(1)

    Spy(monkeypatch, compare)
    plain(target, input_ids=ids, assistant_model=drafter)

    assert len(num_checked) >= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_handed_over_are_those_the_drafts_were_drawn_from(kind, dtype, monkeypatch):
    """In fp32, after every processor, for each draft given the drafts before it (vllm-project/vllm-ascend#14368,
    1CatAI/1Cat-vLLM#183, z-lab/dflash#77)."""
    target, ids = make_target().to(dtype), prompt()
    drafter, drawn, shapes = make_drafter(kind).to(dtype), [], []
    multinomial = torch.multinomial

    def recording(probabilities, *args, **kwargs):
        drawn.append(probabilities)
        return multinomial(probabilities, *args, **kwargs)

    def compare(generator, input_ids, result, kwargs):
        num_drafts = result[0].shape[1] - input_ids.shape[1]
        if num_drafts:
            handed = result[1].softmax(-1)[0]
            torch.testing.assert_close(handed, torch.cat(drawn[-num_drafts:]), rtol=0, atol=0)
            assert result[1].dtype == torch.float32
            assert dtype == torch.bfloat16 or ((handed > 0).sum(-1) == 7).all()  # bf16 has ties
            shapes.append(tuple(result[1].shape))
        drawn.clear()

    monkeypatch.setattr(torch, "multinomial", recording)
    Spy(monkeypatch, compare)
    options = {"do_sample": True, "top_k": 7, "temperature": 0.7, "repetition_penalty": 1.3}
    plain(target, input_ids=ids, assistant_model=drafter, **options)

    assert (1, drafter.config.num_drafts, VOCAB) in shapes


def test_drafts_end_where_no_token_of_the_draft_vocabulary_is_allowed():
    """Rounds without a draft: huggingface/transformers#31301."""
    target, ids = make_target(), prompt()
    drafter = make_drafter(draft_vocab_size=4)
    drafter.draft_vocab_ids.copy_(torch.tensor([1, 2, 3, 4]))
    length = ids.shape[1]

    def only_some(text, scores):
        allowed = torch.tensor([1, 2, 3, 4, 9] if text.shape[1] < length + 3 else [30, 31])
        return torch.full_like(scores, -torch.inf).index_copy(1, allowed, scores[:, allowed])

    torch.manual_seed(0)
    out = plain(
        target,
        input_ids=ids,
        assistant_model=drafter,
        do_sample=True,
        logits_processor=LogitsProcessorList([only_some]),
    )

    assert set(out[0, length + 3 :].tolist()) <= {30, 31}
    assert max(len(r.drafts) for r in drafter.last_stats.rounds) <= 2
    assert drafter.last_stats.rounds[-2].drafted_ids == []


@pytest.mark.parametrize("length", [1, 2, 4, 99])
def test_draft_length_caps_the_drafts_of_a_round(length):
    target, ids = make_target(), prompt()
    drafter = scripted("dflash", target, ids, [9])
    drafter.draft_length = length

    out = plain(target, input_ids=ids, assistant_model=drafter)

    assert torch.equal(out, plain(target, input_ids=ids))
    assert max(len(r.drafts) for r in drafter.last_stats.rounds) == min(length, 4)


@pytest.mark.parametrize("length", [0, -1, 2.0, True, "all"])
def test_a_draft_length_that_is_none_is_refused(length):
    drafter = make_drafter()
    drafter.draft_length = length

    with pytest.raises(ValueError, match=r"`drafter.draft_length` must be None .* or an integer from 1 on, got"):
        plain(make_target(), input_ids=prompt(), assistant_model=drafter)


@pytest.mark.parametrize("new_tokens", range(1, 12))
def test_no_draft_reaches_beyond_the_length_limit(new_tokens):
    """huggingface/transformers#46993, #47195 and #28555."""
    target, ids = make_target(), prompt()
    drafter = scripted("dflash", target, ids, [9])

    out = plain(target, input_ids=ids, assistant_model=drafter, max_new_tokens=new_tokens)

    assert out.shape[1] == ids.shape[1] + new_tokens
    kept, budget = [r.num_accepted + 1 for r in drafter.last_stats.rounds], new_tokens - 1
    assert sum(kept) == budget
    for r, tokens in zip(drafter.last_stats.rounds, kept, strict=True):
        assert len(r.drafts) == min(4, budget - 1)
        budget -= tokens
    assert drafter.num_passes == sum(len(r.drafts) > 0 for r in drafter.last_stats.rounds)


@pytest.mark.parametrize(("counts", "length"), [([9], 5.0), ([0], 1.0)], ids=["oracle", "always-wrong"])
def test_accepted_length_of_known_drafters(counts, length):
    """The target's own token counts once: 1 when all is wrong, K + 1 when all is right.

    sgl-project/sglang#23530 and #33518.
    """
    target, ids = make_target(), prompt()
    drafter = scripted("dflash", target, ids, counts)

    plain(target, input_ids=ids, assistant_model=drafter, max_new_tokens=41)

    stats = drafter.last_stats
    assert stats.accepted_length == length
    assert stats.accepted_drafts == length - 1
    assert sum(stats.histogram) == len(stats.rounds)
    assert stats.seconds["draft"] > stats.seconds["recycle"] > 0


class StopAt(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == 1


def no_token_twice(input_ids, scores):
    """A user's own processor: a pure function of the ids."""
    return scores.index_fill(1, input_ids[0, -1:], -torch.inf)


# Options of generate (some need more than the three tokens there are), and what is special about the drafter.
LAWS = {
    "bare": ({"top_k": 0}, {}),
    "top-k": ({"top_k": 2, "temperature": 0.7}, {}),
    "top-p": ({"top_k": 0, "top_p": 0.7}, {}),
    "min-p": ({"top_k": 0, "min_p": 0.6}, {}),
    "typical-p": ({"top_k": 0, "typical_p": 0.6}, {}),
    "penalty": ({"top_k": 0, "repetition_penalty": 1.5, "temperature": 1.3}, {}),
    "no-repeat-ngram": ({"top_k": 0, "no_repeat_ngram_size": 2}, {}),
    "bad-words": ({"top_k": 0, "bad_words_ids": [[0, 1], [2, 2]]}, {}),
    "forced-end": ({"top_k": 0, "forced_eos_token_id": 1, "suppress_tokens": [0]}, {}),
    "least-length": ({"top_k": 0, "eos_token_id": 1, "min_new_tokens": 2}, {}),
    "least-whole-length": ({"top_k": 0, "eos_token_id": [1, 7], "min_length": 7}, {}),
    "custom-processor": ({"top_k": 0, "processors": [no_token_twice]}, {}),
    "end-of-text": ({"top_k": 0, "eos_token_id": 1}, {}),
    "custom-stop": ({"top_k": 0, "criteria": [StopAt()]}, {}),
    "stop-string": ({"top_k": 0, "stop_strings": ["bc"], "tokenizer": letters_tokenizer()}, {}),
    "draft-vocabulary": ({"top_k": 0}, {"draft_vocab_size": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "law"),
    [
        *((kind, "top-k") for kind in KINDS),
        ("markov-gated", "bare"),
        ("dflash", "top-p"),
        ("markov-rnn", "min-p"),
        ("markov-vanilla", "typical-p"),
        ("dflash", "penalty"),
        ("markov-rnn", "penalty"),
        ("markov-gated", "no-repeat-ngram"),
        ("dflash", "bad-words"),
        ("markov-vanilla", "forced-end"),
        ("dflash", "least-length"),
        ("markov-rnn", "least-whole-length"),
        ("markov-gated", "custom-processor"),
        ("dflash", "end-of-text"),
        ("markov-vanilla", "custom-stop"),
        ("dflash", "stop-string"),
        ("markov-vanilla", "draft-vocabulary"),
    ],
)
def test_sampled_text_follows_the_targets_law(kind, law, monkeypatch):
    """All outcomes of two rounds on three tokens, the second with carried rows (arXiv 2211.17192, Algorithm 1).

    A rule that looked at a drafted stop token would give it the square of its probability; accepting by other rules
    than the resampling's gives another law (huggingface/transformers#32867, #33534, #28166 and #28508;
    ml-explore/mlx-swift-lm#459; z-lab/dflash#74). Each option counts (youssofal/MTPLX#248).
    """
    options, special = LAWS[law]
    target = make_target(vocab_size=3, num_hidden_layers=3, initializer_range=0.1)
    size = 2 + (kind == "dflash")
    small = {
        "vocab_size": 3,
        "mask_token_id": 2,
        "block_size": size,
        "target_layer_ids": [0],
        "initializer_range": 0.1,
    }
    drafter = make_drafter(kind, **small, **special)
    if special:
        drafter.draft_vocab_ids.copy_(torch.tensor([0, 2]))
    ids, carried = torch.tensor([[0, 1, 1, 2]]), []
    passed_on = dict(options)
    criteria = StoppingCriteriaList(passed_on.pop("criteria", []))
    processors = LogitsProcessorList(passed_on.pop("processors", []))

    def sample():
        out = plain(
            target,
            input_ids=ids,
            assistant_model=drafter,
            do_sample=True,
            max_new_tokens=4,
            stopping_criteria=criteria,
            logits_processor=processors,
            **passed_on,
        )
        carried.append(drafter.last_stats.carried_rows)
        return tuple(out[0, 4:].tolist())

    found = Tree(monkeypatch).run(sample)
    expected = law_of_target(target, ids, 4, **options)

    assert distance(found, expected) < 1e-6
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-6)
    assert max(carried) > 0
    assert len(carried) > 20


def test_same_seed_same_text_and_another_seed_another_text():
    """vllm-project/vllm#6038."""
    target, drafter = make_target(), make_drafter()
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(plain(target, input_ids=prompt(), assistant_model=drafter, do_sample=True).tolist())

    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("temperature", [1e-8, 1e-6, 1e-5, 1e-3])
def test_a_tiny_temperature_equals_greedy(temperature):
    """NVIDIA-NeMo/Automodel#3627."""
    target, drafter = make_target(), make_drafter("markov-gated")

    cold = plain(target, input_ids=prompt(), assistant_model=drafter, do_sample=True, temperature=temperature)

    assert torch.equal(cold, plain(target, input_ids=prompt()))


def test_a_drafter_of_nan_weights_drafts_nothing_when_sampling_and_changes_no_text():
    """SafeAILab/EAGLE#162."""
    target, drafter = make_target(), make_drafter()
    torch.nn.init.constant_(drafter.norm.weight, torch.nan)

    greedy = plain(target, input_ids=prompt(), assistant_model=drafter)
    plain(target, input_ids=prompt(), assistant_model=drafter, do_sample=True)

    assert torch.equal(greedy, plain(target, input_ids=prompt()))
    assert drafter.last_stats.accepted_length == 1.0


def test_state_lives_and_dies_with_a_call():
    target, drafter = make_target(), make_drafter()
    first = plain(target, input_ids=prompt(), assistant_model=drafter)
    drafts = [r.drafted_ids for r in drafter.last_stats.rounds]
    plain(target, input_ids=prompt(20, seed=5), assistant_model=drafter)

    again = plain(target, input_ids=prompt(), assistant_model=drafter)

    assert torch.equal(first, again)
    assert [r.drafted_ids for r in drafter.last_stats.rounds] == drafts


def test_the_generator_needs_no_seam():
    """It also serves Transformers' loop directly, as any candidate generator does."""
    target, ids = make_target(), prompt()
    drafter = scripted("dflash", target, ids, [2])
    config, _ = target._prepare_generation_config(None, do_sample=False, max_length=30)
    generator = CarryoverCandidateGenerator(
        drafter, target, generation_config=config, logits_processor=LogitsProcessorList()
    )
    text, cache, outputs, num_matches = ids, None, None, 0
    stop = StoppingCriteriaList([MaxLengthCriteria(30)])
    for step in itertools.count():
        kwargs = {"position_ids": torch.arange(text.shape[1])[None], "attention_mask": None}
        candidates, _ = generator.get_candidates(
            text, model_kwargs=kwargs, model_outputs=outputs, is_first_iteration=step == 0, n_last_matches=num_matches
        )
        start = 0 if cache is None else cache.get_seq_length()
        outputs = target(candidates[:, start:], cache=cache, use_cache=True, **generator.model_kwargs_overrides)
        cache, num_drafts = outputs.cache, candidates.shape[1] - text.shape[1]
        best = outputs.logits[:, -num_drafts - 1 :].argmax(-1)
        num_matches = int((candidates[:, text.shape[1] :] == best[:, :-1]).cumprod(-1).sum())
        text = torch.cat([text, best[:, : num_matches + 1]], dim=1)
        generator.update_candidate_strategy(text, None, num_matches)
        cache.crop(num_matches - num_drafts)
        if stop(text, None).all():
            break

    assert torch.equal(text[:, :30], plain(target, input_ids=ids, max_new_tokens=23))
    assert drafter.last_stats.histogram[2] >= 5
