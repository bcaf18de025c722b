"""Do texts, settings and drafter fit each other? What does not is refused before anything is computed."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from hf_carryover.modeling_carryover import CarryoverDrafterModel
from hf_carryover.training.arguments import CarryoverTrainingArguments
from hf_carryover.training.data import Example


def check_texts(examples: Sequence[Example], target: PreTrainedModel) -> None:
    """Refuse a single text, and ids that the target has no embedding for.

    Raises:
        ValueError: One of these.
    """
    if len(examples) < 2:
        raise ValueError("Expected at least two texts, the first of them to validate with, found one; give more.")
    size: int = target.get_input_embeddings().num_embeddings
    highest = max(max(*example.prompt_ids, *example.answer_ids) for example in examples)
    if highest >= size:
        raise ValueError(
            f"Expected ids below {size}, the target's vocabulary, found {highest}, which is another tokenizer's; make "
            "the data with this target."
        )


def check_parts(
    drafter: CarryoverDrafterModel, args: CarryoverTrainingArguments, *, adapts: bool, new_parts: bool, new_judge: bool
) -> None:
    """Refuse settings that have no part of the drafter to act on, and those that leave a new part as it is.

    Raises:
        ValueError: One of these.
    """
    has_head, weighs = drafter.confidence_head is not None, args.confidence_weight > 0
    for is_wrong, sentence in (
        (adapts and new_parts, "`lora_rank` needs a whole `drafter` to adapt, without a new `markov_head`."),
        (new_judge and not weighs, "`confidence_head` needs a `confidence_weight` above 0, or it stays as it is."),
        (weighs and not has_head, "`confidence_weight` must be 0 without a head to train; add `confidence_head`."),
        (weighs and adapts, "`confidence_weight` must be 0 with `lora_rank`: an adapter does not train the head."),
        (adapts and args.weight_decay > 0, "`weight_decay` must be 0 with `lora_rank`: adapters have none."),
        (adapts and args.stage != "carryover" and drafter.carry_embedding.any(),
         f"`stage` must be carryover with `lora_rank` for a drafter that carries rows, got {args.stage}."),
    ):  # fmt: skip
        if is_wrong:
            raise ValueError(sentence)
