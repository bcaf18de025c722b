"""A target with a LoRA adapter keeps the drafter of its base: the text is the adapted target's own.

    python examples/adapted_target.py DRAFTER [ADAPTER]

ADAPTER is a PEFT folder or Hub id for the embedded SmolLM2; without one, a random small one stands in for it. The
further an adapter moves the target, the fewer drafts it accepts; `examples/adapt_drafter.py` fits the drafter then.
"""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from hf_carryover import load_drafter, load_target


def adapted(target, adapter: str | None) -> PeftModel:
    """The target with an adapter from a folder or the Hub, or with a random one that moves it a little."""
    if adapter is not None:
        return PeftModel.from_pretrained(target, adapter)
    return get_peft_model(target, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def main(arguments: list[str]) -> None:
    """Answer a prompt with the base and with the adapted target, each with the same drafter."""
    torch.manual_seed(0)
    target, tokenizer = load_target("smollm2", dtype=torch.float32)  # bf16 settles near-ties otherwise in blocks
    drafter = load_drafter(arguments[0], target=target)
    drafter.draft_length = None  # all drafts of each block: what is accepted is compared here, not time
    inputs = tokenizer("The three primary colours are", return_tensors="pt").to(target.device)
    options = {"do_sample": False, "max_new_tokens": 24}

    target.generate(**inputs, **options, assistant_model=drafter)
    print(f"base: {drafter.last_stats.accepted_length:.2f} tokens a round")

    model = adapted(target, arguments[1] if len(arguments) > 1 else None).eval()
    plain = model.generate(**inputs, **options)
    drafted = model.generate(**inputs, **options, assistant_model=drafter)
    print(tokenizer.decode(drafted[0], skip_special_tokens=True))
    print(f"adapted: {drafter.last_stats.accepted_length:.2f} tokens a round")
    print("the same ids as without a drafter:", torch.equal(plain, drafted))


if __name__ == "__main__":
    main(sys.argv[1:])
