"""What is a drafter worth? Five prompts, measured by hand, in under two minutes.

    python examples/measure_speedup.py --drafter DRAFTER [--target TARGET]

Read it to see how speculative decoding is measured honestly; `hf-carryover evaluate` does the same with more prompts,
more rivals, intervals and plots.
"""

import argparse
from statistics import median
from time import perf_counter

import torch

from hf_carryover import load_drafter, load_target

PROMPTS = (
    "Write a Python function that reverses a string.",
    "Translate to French: The weather is nice today.",
    "What is 17 times 23? Show your steps.",
    "Name three rivers in Europe and one fact about each.",
    "Explain in two sentences why the sky is blue.",
)


# Three ways to write the same text; only the last hands rejected rows to the drafter.
SYSTEMS = ("plain", "carry off", "carry on")


def run(system, target, drafter, inputs, max_new_tokens):
    """Generate once. Returns the text, its seconds, and the drafter's record of rounds (None for plain)."""
    options = {"do_sample": False, "max_new_tokens": max_new_tokens}
    if system != "plain":
        drafter.carry_enabled = system == "carry on"
        drafter.draft_length = None  # all drafts; by default a drafter hands over as many as pay on this machine
        options["assistant_model"] = drafter
    start = perf_counter()
    text = target.generate(**inputs, **options)
    return text, perf_counter() - start, None if system == "plain" else drafter.last_stats


def measure(target, tokenizer, drafter, *, prompts=PROMPTS, max_new_tokens=32):
    """Print tokens a round and speed relative to plain generation, and return both for each system."""
    ratios, rounds = {name: [] for name in SYSTEMS}, {name: [] for name in SYSTEMS}
    for number, prompt in enumerate(prompts):
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        inputs = inputs.to(target.device)
        if number == 0:
            # The first call pays for memory and code that later ones find ready: it is not counted.
            for name in SYSTEMS:
                run(name, target, drafter, inputs, max_new_tokens=4)

        # In turn on the same prompt, in a new order each time: a machine that slows down hits all alike.
        order = SYSTEMS[number % 3 :] + SYSTEMS[: number % 3]
        found = {name: run(name, target, drafter, inputs, max_new_tokens) for name in order}

        plain_text, plain_seconds, _ = found["plain"]
        for name in SYSTEMS:
            text, seconds, stats = found[name]
            ratios[name].append(plain_seconds / seconds)
            # A round is one pass of the target after the prompt's; it keeps accepted drafts and a token of its own.
            rounds[name] += stats.rounds if stats else []
            # Drafting must not change the text. Only rounding may, at a near-tie: rare in fp32, less so in bf16.
            remark = "" if torch.equal(text, plain_text) else "  (another text than plain)"
            print(f"{name:>9}: {seconds:6.2f} s  {prompt[:50]}{remark}")

    print("\n           tokens a round   speed relative to plain")
    worth = {}
    for name in SYSTEMS:
        # Tokens are pooled over all rounds; speed is the median of the prompts' ratios, never an absolute time.
        kept = [record.num_accepted + 1 for record in rounds[name]]
        worth[name] = (sum(kept) / len(kept) if kept else 1.0, median(ratios[name]))
        print(f"{name:>9}: {worth[name][0]:14.2f} {worth[name][1]:24.2f}x")
    return worth


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2", help="embedded target, model folder or Hub id")
    parser.add_argument("--drafter", required=True, help="drafter folder or Hub id")
    given = parser.parse_args()

    model, words = load_target(given.target)
    measure(model, words, load_drafter(given.drafter, target=model))
