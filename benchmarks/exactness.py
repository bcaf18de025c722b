"""Is greedy text with a drafter the target's own, in fp32, on real prompts?

    python benchmarks/exactness.py --prompts ../shared/eval/*.jsonl --drafter ../shared/starter --out exact.jsonl

Compares plain `generate` with every drafter, carry on and off, on evenly spaced prompts of each file. A difference is
an error unless float64 shows a near-tie. Results are appended to the output file; the same command goes on where it
stopped.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_carryover import CarryoverDrafterConfig, CarryoverDrafterModel, load_drafter, load_target
from hf_carryover.demo import encode


def random_drafter(
    target: PreTrainedModel, *, cls: type[CarryoverDrafterModel] = CarryoverDrafterModel, **overrides
) -> CarryoverDrafterModel:
    """A small drafter of random weights for a target, with a carry embedding that is not zero."""
    theirs = target.config
    fields = {
        "block_size": 3,
        "mask_token_id": 16,
        "target_layer_ids": [1, theirs.num_hidden_layers // 2, theirs.num_hidden_layers - 3],
        "vocab_size": theirs.vocab_size,
        "hidden_size": theirs.hidden_size,
        "intermediate_size": theirs.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": theirs.num_attention_heads,
        "num_key_value_heads": theirs.num_key_value_heads,
        "head_dim": theirs.head_dim,
        "rope_parameters": {"rope_theta": 10000.0},
    }
    config = CarryoverDrafterConfig(**(fields | overrides))
    torch.manual_seed(0)
    drafter = cls(config).eval()
    torch.nn.init.normal_(drafter.carry_embedding)
    return drafter


def is_near_tie(target: PreTrainedModel, drafter: CarryoverDrafterModel, inputs: dict, options: dict) -> bool:
    """Whether the two texts agree in float64, so that rounding alone parted them."""
    target.double()
    texts = [target.generate(**inputs, **options, assistant_model=system) for system in (None, drafter)]
    target.float()
    return torch.equal(*texts)


def main() -> None:
    """Compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--per-set", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    target, tokenizer = load_target("smollm2", dtype=torch.float32)
    drafters = {
        "random-dflash": random_drafter(target, sample_from_anchor=False),
        "random-markov": random_drafter(target, sample_from_anchor=True, markov_head_type="gated", markov_rank=32),
    }
    if args.drafter:
        drafters["given"] = load_drafter(args.drafter, target=target, dtype=torch.float32)
    for drafter in drafters.values():
        drafter.draft_length = None  # all drafts
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    seen = {(row["set"], row["prompt"]) for row in done}
    sets = {
        path.stem: [json.loads(line)["turns"][0] for line in path.read_text().splitlines()] for path in args.prompts
    }
    for place, (name, prompts) in itertools.product(range(args.per_set), sets.items()):
        index = place * (len(prompts) // args.per_set)
        if (name, index) in seen:
            continue
        inputs = encode(tokenizer, prompts[index], target.device)
        options = {"do_sample": False, "max_new_tokens": args.new_tokens}
        plain = target.generate(**inputs, **options)
        row = {"set": name, "prompt": index, "differences": [], "near_ties": [], "accepted_length": {}}
        for kind, drafter in drafters.items():
            for carry in (False, True):
                drafter.carry_enabled = carry
                text = target.generate(**inputs, **options, assistant_model=drafter)
                system = f"{kind}, carry {'on' if carry else 'off'}"
                row["accepted_length"][system] = round(drafter.last_stats.accepted_length, 3)
                if not torch.equal(text, plain):
                    kind_of = "near_ties" if is_near_tie(target, drafter, inputs, options) else "differences"
                    row[kind_of].append(system)
        done.append(row)
        with args.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(name, index, row["differences"] or "equal", row["accepted_length"], flush=True)
    wrong = sum(len(row["differences"]) for row in done)
    ties = sum(len(row["near_ties"]) for row in done)
    print(f"{len(done)} prompts x {2 * len(drafters)} systems: {wrong} differences, {ties} near-ties.")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
