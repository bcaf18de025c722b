"""Answer a prompt with a drafter: what a program needs, and what the drafter tells afterwards.

    python examples/generate.py [TARGET [DRAFTER]]

Without arguments it uses the embedded SmolLM2 and an untrained drafter, which shows the mechanics and gains nothing.
"""

import sys

import torch

from hf_carryover import CarryoverDrafterConfig, CarryoverDrafterModel, load_drafter, load_target


def untrained_drafter(target) -> CarryoverDrafterModel:
    """A drafter that fits the target and has learnt nothing yet: every wrong draft costs time, never a wrong token."""
    sizes = target.config
    config = CarryoverDrafterConfig(
        block_size=4,  # the anchor and three drafts
        mask_token_id=sizes.vocab_size - 1,
        target_layer_ids=[0, sizes.num_hidden_layers // 2],
        sample_from_anchor=False,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        rope_parameters={"rope_theta": 10000.0},
    )
    return CarryoverDrafterModel(config).to(target.device, target.dtype).eval()


def main(arguments: list[str]) -> None:
    """Generate plain and with a drafter, and compare."""
    torch.manual_seed(0)
    # In fp32, where rounding hardly ever settles a near-tie otherwise for a block than for single tokens.
    target, tokenizer = load_target(arguments[0] if arguments else "smollm2", dtype=torch.float32)
    drafter = load_drafter(arguments[1], target=target) if len(arguments) > 1 else untrained_drafter(target)

    inputs = tokenizer("The three primary colours are", return_tensors="pt").to(target.device)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=24)
    drafted = target.generate(**inputs, do_sample=False, max_new_tokens=24, assistant_model=drafter)

    print(tokenizer.decode(drafted[0], skip_special_tokens=True))
    print("the same ids as without a drafter:", torch.equal(plain, drafted))
    stats = drafter.last_stats
    print(f"{len(stats.rounds)} rounds, {stats.accepted_length:.2f} tokens a round, histogram {stats.histogram}")


if __name__ == "__main__":
    main(sys.argv[1:])
