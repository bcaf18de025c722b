"""Does any combination of options give another text than plain `generate`? Random settings, until time is up.

    python -m tests.fuzz --seconds 300 --seed 0

A case is a function of its seed. Greedy ids are compared in float64, so that near-ties do not hide faults, together
with what else `generate` returns; sampling by repeating it with one seed, and by enumerating all outcomes on a tiny
vocabulary. On a mismatch the seed and its settings are written, and the exit status is 1.
"""

import argparse
import random
import sys
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from tests.enumeration import Tree, distance, law_of_target
from tests.fakes import ScriptedDrafter, letters_tokenizer, make_drafter, make_target, plain, prompt

ARCHITECTURES = ("llama", "qwen3", "gemma3_text", "mistral", "gpt2", "gpt_neox", "phi", "olmo2")
HEADS = (None, "vanilla", "gated", "rnn")
VOCABULARIES = (61, 61, 7)
# What is refused where plain `generate` is not: static caches whose layers slide cannot be cropped.
REFUSAL = "Carryover drafting expects a cache that can be cropped, got StaticCache"


class Recorder(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.ids, self.num_ends = [], 0

    def put(self, value):
        self.ids += value.flatten().tolist()

    def end(self):
        self.num_ends += 1


def bans_last_token(ids, scores):
    return scores.index_fill(1, ids[0, -1:], -torch.inf)


def counts_odd_tokens(ids, scores):
    return scores + (ids % 2).sum() * torch.arange(scores.shape[1]) / 40


def stops_at(token, ids, scores, **kwargs):
    return ids[:, -1] == token


def stops_at_sum(divisor, ids, scores, **kwargs):
    return ids.sum(-1) % divisor == 0


@dataclass
class Case:
    """The settings of one comparison; printing it says how to repeat it."""

    seed: int
    architecture: str
    vocab_size: int
    drafter: dict[str, Any]
    weights: str
    carry: bool
    draft_length: int | None
    prompt_length: int
    options: dict[str, Any]
    stops: dict[str, Any]
    inputs: dict[str, Any] = field(default_factory=dict)
    block_seconds: float | None = None  # of a round with all drafts, a plain one taking 1: lengths are automatic


def draw(seed):
    """The case of a seed."""
    rng = random.Random(seed)
    vocab_size, head = rng.choice(VOCABULARIES), rng.choice(HEADS)
    weights = rng.choice(("random", "oracle", "mixed", "mixed", "always-wrong"))
    drafter = {
        "sample_from_anchor": rng.random() < 0.5,
        "block_size": rng.choice((2, 3, 4, 5, 8, 16)),
        "vocab_size": vocab_size,
        "mask_token_id": vocab_size - 1,
        "markov_head_type": head,
        "markov_rank": 6 if head else 0,
        "draft_vocab_size": rng.choice((None, 3, vocab_size)) if weights == "random" else None,
    }
    if rng.random() < 0.2:
        drafter |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": rng.randint(1, 12)}
    return Case(
        seed=seed,
        architecture=rng.choice(ARCHITECTURES),
        vocab_size=vocab_size,
        drafter=drafter,
        weights=weights,
        carry=rng.random() < 0.6,
        draft_length=rng.choice((None, None, 1, 2, 7)),
        prompt_length=rng.choice((1, 2, 3, 7, 8, 9, 20, 33)),
        options=draw_options(rng, vocab_size),
        stops=draw_stops(rng, vocab_size),
        inputs=draw_inputs(rng),
        block_seconds=rng.choice((None, None, 1.01, 1.5, 3.0)),
    )


def draw_options(rng, vocab_size):
    """What changes the target's choice of tokens."""

    def token():
        return rng.randrange(vocab_size)

    makers = {
        "repetition_penalty": lambda: rng.choice((0.7, 1.3, 2.0)),
        "encoder_repetition_penalty": lambda: 1.4,
        "no_repeat_ngram_size": lambda: rng.choice((2, 3)),
        "encoder_no_repeat_ngram_size": lambda: 2,
        "bad_words_ids": lambda: [[token()], [token(), token()]],
        "sequence_bias": lambda: [[[token()], 3.0], [[token(), token()], -5.0]],
        "suppress_tokens": lambda: [token(), token()],
        "begin_suppress_tokens": lambda: [token(), token()],
        "forced_bos_token_id": token,
        "forced_eos_token_id": token,
        "renormalize_logits": lambda: True,
        "remove_invalid_values": lambda: True,
        "logits_processor": lambda: rng.choice((bans_last_token, counts_odd_tokens)),
        "prefix_allowed_tokens_fn": lambda: rng.choice((2, 3)),
    }
    return {name: makers[name]() for name in rng.sample(sorted(makers), rng.choice((0, 0, 1, 1, 2, 4)))}


def draw_stops(rng, vocab_size):
    """What ends a text; tokens are those at a place of the plain text, so that stops are met."""
    length = rng.choice(
        ({"max_new_tokens": rng.randint(1, 40)}, {"max_new_tokens": 40}, {"max_new_tokens": None, "more_length": 24})
    )
    makers = {
        "eos": lambda: [rng.randrange(12) for _ in range(rng.choice((1, 2, 3)))],
        "stop_string": lambda: (rng.randrange(12), rng.choice((1, 2))),
        "criterion": lambda: rng.choice((("token", rng.randrange(12)), ("sum", rng.choice((5, 9, 13))))),
        "min_new_tokens": lambda: rng.randint(1, 20),
        "more_min_length": lambda: rng.randint(1, 20),
        "exponential_decay_length_penalty": lambda: (3, 1.3),
    }
    return length | {name: makers[name]() for name in rng.sample(sorted(makers), rng.choice((0, 1, 1, 2, 3)))}


def draw_inputs(rng):
    """How prompt, cache and results are asked for."""
    makers = {
        "padding": lambda: rng.randint(1, 5),
        "hole": lambda: True,
        "first_position": lambda: rng.randint(1, 50),
        "static_cache": lambda: True,
        "streamer": lambda: True,
        "dictionary": lambda: True,
        "eager": lambda: True,
        "embeds": lambda: True,
    }
    return {name: makers[name]() for name in rng.sample(sorted(makers), rng.choice((0, 1, 2, 3)))}


def target_of(case):
    target = make_target(case.architecture, seed=case.seed % 5, vocab_size=case.vocab_size).double()
    if "eager" in case.inputs:
        target.set_attn_implementation("eager")
    return target


def drafter_of(case):
    drafter = make_drafter(cls=ScriptedDrafter if case.weights != "random" else make_drafter.__kwdefaults__["cls"],
                           seed=case.seed % 7, **case.drafter)  # fmt: skip
    if case.drafter["draft_vocab_size"] is not None:
        chosen = torch.randperm(case.vocab_size)[: case.drafter["draft_vocab_size"]].sort().values
        drafter.draft_vocab_ids.copy_(chosen)
    drafter.carry_enabled, drafter.draft_length = case.carry, case.draft_length
    if case.block_seconds is not None:
        drafter.draft_length, drafter.timings = "auto", {0: 1.0, drafter.config.num_drafts: case.block_seconds}
    return drafter


def inputs_of(case, target):
    """Prompt, mask and positions; an oracle also needs the position of the first new token."""
    ids = prompt(case.prompt_length, seed=case.seed) % (case.vocab_size - 1)
    mask, inputs = torch.ones_like(ids), {"input_ids": ids}
    # Eager attention takes its softmax in fp32, where float64's mask is -inf: the target's own padded rows are NaN.
    if "padding" in case.inputs and "eager" not in case.inputs:
        mask[0, : min(case.inputs["padding"], ids.shape[1] - 1)] = 0
    if "hole" in case.inputs and ids.shape[1] > 4:
        mask[0, -3] = 0
    if not mask.all():
        inputs["attention_mask"] = mask
    start = case.inputs.get("first_position")
    if start is not None and case.architecture != "bloom":
        inputs["position_ids"] = (start + mask.cumsum(-1) - 1).clamp(min=0)
    if "embeds" in case.inputs and mask.all() and start is None and not needs_prompt_ids(case):
        inputs = {"inputs_embeds": target.get_input_embeddings()(ids)}
    return inputs, (start or 0) + int(mask.sum()), ids


def needs_prompt_ids(case):
    return any("encoder" in name or "ngram" in name or "penalty" in name for name in case.options)


def options_of(case, ids, truth):
    """Keyword arguments of `generate`; tokens of stops are read off the plain text."""
    options, num_prompt = dict(case.options), ids.shape[1]
    if (processor := options.pop("logits_processor", None)) is not None:
        options["logits_processor"] = LogitsProcessorList([processor])
    if (step := options.pop("prefix_allowed_tokens_fn", None)) is not None:
        options["prefix_allowed_tokens_fn"] = partial(allowed, step, case.vocab_size)
    stops = dict(case.stops)
    for name, argument in (("more_length", "max_length"), ("more_min_length", "min_length")):
        if name in stops:
            options[argument] = num_prompt + stops.pop(name)
    if truth is None:
        return options | {"max_new_tokens": stops["max_new_tokens"]}
    return options | stop_options(stops, truth)


def allowed(step, vocab_size, batch, ids):
    return [token for token in range(vocab_size) if (token + len(ids)) % step]


def stop_options(stops, truth):
    new = truth[0].tolist()

    def at(place):
        return new[place % len(new)]

    if "eos" in stops:
        stops["eos_token_id"] = [at(place) for place in stops.pop("eos")]
        stops["pad_token_id"] = stops["eos_token_id"][0]
    else:
        stops.pop("exponential_decay_length_penalty", None)  # Transformers itself needs an end of text there
    if "stop_string" in stops:
        place, length = stops.pop("stop_string")
        tokenizer = letters_tokenizer()
        stops |= {"stop_strings": [tokenizer.decode([at(place + i) for i in range(length)])], "tokenizer": tokenizer}
    if "criterion" in stops:
        kind, number = stops.pop("criterion")
        rule = partial(stops_at, at(number)) if kind == "token" else partial(stops_at_sum, number)
        stops["stopping_criteria"] = StoppingCriteriaList([rule])
    return stops


def call_options(case):
    options = {}
    if "static_cache" in case.inputs:
        options |= {"cache_implementation": "static", "disable_compile": True}
    if "dictionary" in case.inputs:
        options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        options["output_hidden_states"] = case.seed % 2 == 0
    return options


def compare(case):
    """What is wrong with a greedy call, in words; None if nothing is."""
    target, drafter = target_of(case), drafter_of(case)
    inputs, position, ids = inputs_of(case, target)
    try:
        truth = plain(target, **inputs, **options_of(case, ids, None), min_new_tokens=1)
        new = truth if "inputs_embeds" in inputs else truth[:, ids.shape[1] :]
        options = options_of(case, ids, new) | call_options(case)
        theirs = plain(target, **inputs, **options)
    except (ValueError, RuntimeError, IndexError) as error:
        return f"skipped: plain generate refuses ({error})"
    if case.weights != "random":
        counts = {"oracle": [99], "always-wrong": [0], "mixed": [case.seed % 3, 2, 0, 5, 1, 99, 3]}[case.weights]
        drafter.follow(new, counts, first_position=position)
    streamer = Recorder() if "streamer" in case.inputs else None
    try:
        ours = plain(target, **inputs, **options, assistant_model=drafter, streamer=streamer)
    except ValueError as error:
        if REFUSAL in str(error):
            return f"skipped: {error}"
        raise
    return differences(ours, theirs, streamer, drafter, num_given=0 if "inputs_embeds" in inputs else ids.shape[1])


def differences(ours, theirs, streamer, drafter, num_given):
    """The first thing that differs, in words."""
    texts = [out if isinstance(out, torch.Tensor) else out.sequences for out in (ours, theirs)]
    if not torch.equal(*texts):
        return f"the text differs: {texts[0][0].tolist()} is not {texts[1][0].tolist()}"
    if streamer is not None and (streamer.ids != texts[0][0].tolist() or streamer.num_ends != 1):
        return f"the streamer got {streamer.ids} and {streamer.num_ends} ends"
    if drafter.last_stats.num_tokens != texts[0].shape[1] - num_given - 1:
        return f"the record counts {drafter.last_stats.num_tokens} tokens for {texts[0].shape[1] - num_given - 1}"
    return None if isinstance(ours, torch.Tensor) else differences_of_dictionaries(ours, theirs)


def differences_of_dictionaries(ours, theirs):
    """The first part of the returned dictionary that differs, in words."""
    for name in ("scores", "logits"):
        if len(ours[name]) != len(theirs[name]):
            return f"{len(ours[name])} {name} for {len(theirs[name])}"
        if not all(
            torch.allclose(a, b, atol=1e-5, rtol=1e-5, equal_nan=True)
            for a, b in zip(ours[name], theirs[name], strict=True)
        ):
            return f"`{name}` differ"
    # A sliding cache that a stop ended inside a block is too long, and refuses to be used again.
    if ours.cache.get_seq_length() != theirs.cache.get_seq_length() and "update" not in vars(ours.cache):
        return f"a cache of {ours.cache.get_seq_length()} rows for {theirs.cache.get_seq_length()}"
    return None


WARPERS = ({}, {"temperature": 0.6}, {"top_p": 0.8}, {"min_p": 0.2}, {"typical_p": 0.7}, {"epsilon_cutoff": 0.2},
           {"eta_cutoff": 0.2}, {"top_h": 0.6}, {"top_k": 2})  # fmt: skip


def repeat_samples(case):
    """What is wrong with sampled calls of one seed, in words."""
    target, drafter = target_of(case), drafter_of(case)
    inputs, position, ids = inputs_of(case, target)
    warper = {"do_sample": True, "top_k": 0} | random.Random(case.seed).choice(WARPERS)
    options = options_of(case, ids, prompt(12, seed=case.seed) % case.vocab_size) | warper
    texts = []
    for assistant in (None, drafter, drafter):
        torch.manual_seed(case.seed)
        if case.weights != "random":
            drafter.follow(ids, [0], first_position=position)
        streamer = Recorder()
        try:
            texts.append(plain(target, **inputs, **options, assistant_model=assistant, streamer=streamer))
        except (ValueError, RuntimeError, IndexError) as error:
            if assistant is None or REFUSAL in str(error) or ends_dead(target, streamer.ids, options):
                return f"skipped: {error}"
            raise
    return None if torch.equal(*texts[1:]) else "the same seed gave two texts"


def ends_dead(target, text, options):
    """Whether plain `generate` cannot go on after this text either: its processors leave no token there."""
    try:
        plain(target, input_ids=torch.tensor([text]), **(options | {"max_new_tokens": 1, "max_length": None}))
    except (ValueError, RuntimeError, IndexError):
        return True
    return False


def enumerate_samples(case):
    """What is wrong with the law of a sampled text, in words: all outcomes on three tokens."""
    rng = random.Random(case.seed)
    sizes = {"vocab_size": 3, "initializer_range": 0.1}
    target = make_target(case.architecture, seed=case.seed % 5, num_hidden_layers=3, **sizes)
    layout = {name: case.drafter[name] for name in ("sample_from_anchor", "markov_head_type", "markov_rank")}
    drafter = make_drafter(block_size=3, mask_token_id=2, target_layer_ids=[0], seed=case.seed % 7, **sizes, **layout)
    drafter.carry_enabled, drafter.draft_length = case.carry, case.draft_length
    if case.block_seconds is not None:
        drafter.draft_length, drafter.timings = "auto", {0: 1.0, drafter.config.num_drafts: case.block_seconds}
    options = {"top_k": 0} | rng.choice(WARPERS) | rng.choice(({}, {"repetition_penalty": 1.5}))
    options |= rng.choice(({}, {"eos_token_id": 1}, {"no_repeat_ngram_size": 3}, {"bad_words_ids": [[0, 1]]}))
    ids = torch.tensor([[0, 1, 1, 2]])

    def sample():
        out = plain(target, input_ids=ids, assistant_model=drafter, do_sample=True, max_new_tokens=3, **options)
        return tuple(out[0, 4:].tolist())

    with pytest.MonkeyPatch.context() as patch:
        found = Tree(patch).run(sample)
    apart = distance(found, law_of_target(target, ids, 3, **options))
    return None if apart < 1e-5 else f"the law of {options} is {apart:.2g} away"


def judge(seed):
    """The case of a seed, and what is wrong with it in words; None if nothing is."""
    case = draw(seed)
    check = enumerate_samples if seed % 40 == 7 else repeat_samples if seed % 5 == 3 else compare
    try:
        return case, check.__name__, check(case)
    except Exception:
        return case, check.__name__, traceback.format_exc(limit=-4)


def fuzz(seconds, first_seed, write):
    """Judge seeds until the time is up; returns how many agreed, how many were skipped, and the seeds that failed."""
    end, seed = time.monotonic() + seconds, first_seed
    agreed, skipped, failed = 0, 0, []
    while time.monotonic() < end:
        case, check, problem = judge(seed)
        if problem is None:
            agreed += 1
        elif problem.startswith("skipped"):
            skipped += 1
        else:
            failed.append(seed)
            write(f"seed {seed}, {check}: {problem}\n{case}\n\n")
        seed += 1
    return agreed, skipped, failed


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    agreed, skipped, failed = fuzz(args.seconds, args.seed, sys.stdout.write)
    sys.stdout.write(f"{agreed} agree, {skipped} are refused alike, {len(failed)} differ: {failed}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
