"""Is drafting as much as pays never slower than plain, and what do short blocks cost Carryover?

    python benchmarks/draft_lengths.py --drafter DRAFTER --prompts SET... [--prompts-per-set 1] [--repeats 3]

First `generate` with ``draft_length="auto"`` beside plain, in turn, set by set; then the same with a drafter
of random weights over 256 tokens, where drafting never pays; then tokens a round and accepted drafts for each drafted
one, with carry off and on, at every draft length up to the block. Greedy. Nothing else may run meanwhile.
"""

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from hf_carryover import CarryoverDrafterModel, load_drafter, load_target
from hf_carryover.chat import encode_prompt
from hf_carryover.evaluation.acceptance import summarize_acceptance, summarize_difference
from hf_carryover.evaluation.runs import System, decoding_options, drafting, run
from hf_carryover.evaluation.speed import run_in_turn, summarize_ratio, warm_up
from hf_carryover.evaluation.tables import number
from hf_carryover.prompts import evenly_spaced, read_prompts

LONG_TEXT = 256  # new tokens with a drafter of random weights


def compare(target, drafter, prompts, *, repeats, max_new_tokens):
    """Speed of automatic drafting relative to plain on prompts ``[1, T]`` each, as `summarize_ratio` gives it."""
    systems = [System("plain", {}), drafting("auto", drafter, carry=drafter.carry_enabled, draft_length="auto")]
    options = decoding_options(0.0, max_new_tokens)
    found = {system.name: [] for system in systems}
    for prompt in prompts:
        turns = [run_in_turn(systems, target, prompt, turn=turn, seed=0, **options) for turn in range(repeats)]
        for name, runs in found.items():
            runs.append([turn[name] for turn in turns])
    drafts = [count for repeats in found["auto"] for one in repeats for count in one.drafts]
    return found, sum(drafts) / max(len(drafts), 1)


def ratio_of(found):
    """A cell: the ratio of speeds, and its interval over prompts."""
    ratio = summarize_ratio(found["auto"], found["plain"])
    return number(ratio["ratio"], ratio["interval"])


def show_speed(target, drafter, sets, console, **settings):
    """Automatic drafting beside plain, set by set and pooled."""
    table, pooled = Table("set", "auto to plain", "drafts a round"), {"plain": [], "auto": []}
    for name, prompts in sets.items():
        found, drafts = compare(target, drafter, prompts, **settings)
        table.add_row(name, ratio_of(found), f"{drafts:.2f}")
        for system, runs in found.items():
            pooled[system] += runs
    table.add_row("all", ratio_of(pooled), "")
    console.print(table)


def show_lengths(target, drafter, prompts, console, *, max_new_tokens):
    """What each draft length gives with carry off and on."""
    table = Table("drafts", "tokens a round, off", "on", "difference", "accepted of drafted, off", "on")
    for length in range(1, drafter.config.num_drafts + 1):
        runs = {}
        for carry in (False, True):
            system = drafting("", drafter, carry=carry, draft_length=length)
            options = decoding_options(0.0, max_new_tokens)
            runs[carry] = [run(system, target, prompt, seed=0, **options) for prompt in prompts]
        tau = [f"{summarize_acceptance(runs[carry])['accepted_length']:.3f}" for carry in (False, True)]
        gain = summarize_difference(runs[True], runs[False])
        shares = [
            f"{sum(sum(r.tokens) - len(r.tokens) for r in runs[carry]) / sum(sum(r.drafts) for r in runs[carry]):.3f}"
            for carry in (False, True)
        ]
        table.add_row(str(length), *tau, number(gain["difference"], gain["interval"], "+"), *shares)
    console.print(table)


def main():
    """Everything, one table after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument(
        "--prompts", nargs="+", required=True, help="sets of prompts, as `hf-carryover evaluate` takes"
    )
    parser.add_argument("--prompts-per-set", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    console = Console(width=120)
    target, tokenizer = load_target(options.target)
    drafter = load_drafter(options.drafter, target=target)
    sets = {
        Path(name).stem: [encode_prompt(p, tokenizer).to(target.device) for p in chosen]
        for name in options.prompts
        for chosen in [evenly_spaced(read_prompts(name).prompts, options.prompts_per_set)]
    }
    prompts = [prompt for chosen in sets.values() for prompt in chosen]
    systems = [System("plain", {}), drafting("auto", drafter, draft_length="auto")]
    warm_up(systems, target, prompts[0], **decoding_options(0.0, 8))
    show_speed(target, drafter, sets, console, repeats=options.repeats, max_new_tokens=options.max_new_tokens)

    torch.manual_seed(0)
    random = CarryoverDrafterModel(drafter.config).to(target.device, drafter.dtype).eval()
    found, drafts = compare(target, random, prompts[:1], repeats=options.repeats, max_new_tokens=LONG_TEXT)
    console.print(f"random weights, {LONG_TEXT} tokens: auto to plain {ratio_of(found)}, {drafts:.2f} drafts a round")

    show_lengths(target, drafter, prompts, console, max_new_tokens=options.max_new_tokens)


if __name__ == "__main__":
    main()
