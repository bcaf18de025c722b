"""What does recycling cost a round, and what the library's own DFlash round? In turn, at the same accepted counts.

    python benchmarks/recycling.py [--rounds 200]

The drafter of random weights is as large as a trained one; its proposals are overwritten so that all variants (carry
on, carry off, Transformers' DFlash generator) accept the same drafts. Prints medians of the ratios of paired rounds,
with bootstrap intervals. Nothing else may run meanwhile.
"""

import argparse
import time

import numpy as np
import torch
from exactness import random_drafter
from transformers import DynamicCache, LogitsProcessorList
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from hf_carryover import CarryoverCandidateGenerator, load_target
from hf_carryover.demo import encode
from hf_carryover.evaluation.acceptance import bootstrap_interval

# Three layers, eight slots, five feature layers: as large as a drafter that one would train for SmolLM2.
STARTER_SIZES = {
    "block_size": 8,
    "num_hidden_layers": 3,
    "intermediate_size": 1536,
    "target_layer_ids": [1, 8, 14, 21, 27],
}
KINDS = ["carry on", "carry off", "library"]
PROMPT = "Tell me a long story about a lighthouse keeper and a whale."


class Variant:
    """One generation, advanced a round at a time with a given number of accepted drafts."""

    def __init__(self, target, drafter, prompt, truth, *, kind):
        drafter.carry_enabled = kind == "carry on"
        config, _ = target._prepare_generation_config(None, do_sample=False, max_length=truth.shape[1])
        if kind == "library":
            heads = target.get_input_embeddings(), target.get_output_embeddings()
            self.generator = DFlashTokenCandidateGenerator(drafter, *heads, generation_config=config)
        else:
            self.generator = CarryoverCandidateGenerator(
                drafter, target, generation_config=config, logits_processor=LogitsProcessorList()
            )
        self.target, self.truth, self.length, self.num_matches = target, truth, prompt.shape[1] + 1, 0
        self.cache = DynamicCache(config=target.config)
        self.outputs = self.verify(prompt)

    def verify(self, ids):
        """The target's pass over ids ``[1, S]``."""
        return self.target(
            ids, cache=self.cache, use_cache=True, logits_to_keep=1, **self.generator.model_kwargs_overrides
        )

    def round(self, num_accepted):
        """Draft, put the true and then wrong tokens in place, verify; returns seconds."""
        started = time.perf_counter()
        text = self.truth[:, : self.length]
        candidates, _ = self.generator.get_candidates(
            text,
            model_kwargs={"position_ids": torch.arange(self.length)[None], "attention_mask": None},
            model_outputs=self.outputs,
            is_first_iteration=False,
            n_last_matches=self.num_matches,
        )
        candidates[:, self.length :] = 7
        candidates[:, self.length : self.length + num_accepted] = self.truth[
            :, self.length : self.length + num_accepted
        ]
        num_drafts = candidates.shape[1] - self.length
        self.outputs = self.verify(candidates[:, self.length - 1 :])
        self.cache.crop(num_accepted - num_drafts)
        self.num_matches = num_accepted
        self.length += num_accepted + 1
        return time.perf_counter() - started


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=240)
    args = parser.parse_args()

    target, tokenizer = load_target("smollm2", dtype=torch.float32)
    drafter = random_drafter(target, sample_from_anchor=False, **STARTER_SIZES)
    prompt = encode(tokenizer, PROMPT, target.device)["input_ids"]
    counts = [0, 1, 0, 2, 1, 0, 3, 0]
    seconds = []
    with torch.no_grad():
        truth = target.generate(prompt, do_sample=False, max_new_tokens=96, eos_token_id=-1, pad_token_id=2)
        while len(seconds) < args.rounds:
            variants = {kind: Variant(target, drafter, prompt, truth, kind=kind) for kind in KINDS}
            for step in range(40):
                turn = KINDS[step % 3 :] + KINDS[: step % 3]
                taken = {kind: variants[kind].round(counts[step % len(counts)]) for kind in turn}
                if step > 1 and variants["library"].length + 10 < truth.shape[1]:
                    seconds.append([taken[kind] for kind in KINDS])
            print(f"{len(seconds)} rounds of each", flush=True)
    rows = np.array(seconds)  # [rounds, 3]: carry on, carry off, library
    for name, one, other in (("carry on to carry off", 0, 1), ("carry off to the library's DFlash", 1, 2)):
        ratios = rows[:, [one]] / rows[:, [other]]
        low, high = bootstrap_interval(ratios, lambda drawn: np.median(drawn[..., 0], axis=-1))
        print(f"Seconds of a round, {name}: {np.median(ratios):.4f} (95 %: {low:.4f} to {high:.4f}).")


if __name__ == "__main__":
    main()
