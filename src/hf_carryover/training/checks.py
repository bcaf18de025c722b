"""Do texts, settings and drafter fit each other? What does not is refused before anything is computed."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from hf_carryover.modeling_carryover import CarryoverDrafterModel
from hf_carryover.training.arguments import CarryoverTrainingArguments
from hf_carryover.training.data import Example


def check_texts(examples: Sequence[Example], target: PreTrainedModel) -> None:
    """Refuse training without a text, and ids that the target has no embedding for.

    Raises:
        ValueError: One of these.
    """
    if not examples:
        raise ValueError("Expected at least two texts, the first of them to validate with, found one; give more.")
    size: int = target.get_input_embeddings().num_embeddings
    highest = max(max(*example.prompt_ids, *example.answer_ids) for example in examples)
    if highest >= size:
        raise ValueError(
            f"Expected ids below {size}, the target's vocabulary, found {highest}, which is another tokenizer's; make "
            "the data with this target."
        )


def check_parts(
    drafter: CarryoverDrafterModel, args: CarryoverTrainingArguments, *, lora_rank: int | None, new_head: bool
) -> None:
    """Refuse settings that have no part of the drafter to act on, and those that leave a part behind.

    Raises:
        ValueError: One of these.
    """
    has_head, adapts, weighs = drafter.confidence_head is not None, lora_rank is not None, args.confidence_weight > 0
    for is_wrong, sentence in (
        (new_head and not weighs, "`confidence_head` needs a `confidence_weight` above 0, or it would stay as it is."),
        (weighs and not has_head, "`confidence_weight` must be 0 without a head to train; add `confidence_head`."),
        (weighs and adapts, "`confidence_weight` must be 0 with `lora_rank`: an adapter does not train the head."),
        (adapts and args.stage != "carryover" and drafter.carry_embedding.any(),
         f"`stage` must be carryover with `lora_rank` for a drafter that carries rows, got {args.stage}."),
    ):  # fmt: skip
        if is_wrong:
            raise ValueError(sentence)
