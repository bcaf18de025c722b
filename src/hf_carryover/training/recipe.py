"""How does a bare target get a drafter? What to start from, what to learn, and the record of how it was made."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState, set_seed

from hf_carryover.configuration_carryover import CarryoverDrafterConfig
from hf_carryover.conversion import load_drafter, restrict_vocabulary
from hf_carryover.decoding import check_pair
from hf_carryover.evaluation.plan import context_length
from hf_carryover.modeling_carryover import CarryoverDrafterModel
from hf_carryover.targets import load_target
from hf_carryover.training.adapter import adapter_of
from hf_carryover.training.arguments import CarryoverTrainingArguments
from hf_carryover.training.checks import check_parts, check_texts
from hf_carryover.training.data import Example, end_tokens, most_used_tokens, read_examples
from hf_carryover.training.interruption import Interruption, MarkComplete, last_checkpoint, saving, steps_made
from hf_carryover.training.memory import estimate_memory
from hf_carryover.training.parts import plain_rope, sizes_of, spaced_layers, unused_token
from hf_carryover.training.record import RECORD, begin, finish
from hf_carryover.training.trainer import CarryoverTrainer

logger = logging.getLogger(__name__)

ADAPTER = "adapter"


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class RecipeArguments:
    """What is trained: target, data, and a drafter to start from or the shape of a new one."""

    target: str = _setting("smollm2", "Embedded target, model folder or Hub id.")
    data: str = _setting("data.jsonl", "JSONL (or .gz) of the target's own answers.")
    drafter: str | None = _setting(None, "Drafter folder or Hub id to start from; without one, a new drafter.")
    max_length: int | None = _setting(None, "Longer texts are left out; without it they are an error.")
    num_layers: int | None = _setting(None, "Layers of a new drafter; 3, if not given.")
    num_target_layers: int | None = _setting(None, "Target layers that a new drafter reads, evenly spaced; 5.")
    block_size: int | None = _setting(None, "Slots of a block; the drafter's own, or 8.")
    sample_from_anchor: bool | None = _setting(None, "Whether the anchor's slot drafts; the drafter's own, or no.")
    markov_head: str | None = _setting(None, "vanilla, gated or rnn; the drafter's own, or none.")
    markov_rank: int | None = _setting(None, "Rank of the Markov head.")
    confidence_head: bool | None = _setting(None, "Whether there is a confidence head; the drafter's own, or no.")
    draft_vocab: int | None = _setting(None, "Propose only the so many tokens that the answers use most.")
    lora_rank: int | None = _setting(
        None, "Train an adapter of this rank, and, where rows are carried, their embedding."
    )
    mask_token_id: int | None = _setting(None, "New: token of the mask slots; by default an unused special token.")


def train_drafter(recipe: RecipeArguments, args: CarryoverTrainingArguments) -> CarryoverDrafterModel:
    """Train as the recipe says, into ``args.output_dir``; the same call goes on where an interrupted one stopped.

    The folder holds the drafter and ``training.json``, how it was made. Ctrl-C saves a checkpoint and stops.

    Raises:
        FileNotFoundError: The data is missing.
        ValueError: Data, drafter or settings do not fit; the folder holds a finished drafter.
        OSError: The disk is full; the last whole checkpoint stays.
        KeyboardInterrupt: Ctrl-C was pressed; the checkpoint is written.
    """
    out = Path(args.output_dir)
    if (out / RECORD).exists():
        raise ValueError(f"Expected a folder without a finished drafter at {out}, found {RECORD}; choose another.")
    begun, checkpoint = begin(out, vars(recipe), args), last_checkpoint(out)
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    target, tokenizer = load_target(recipe.target, dtype=dtype, device=args.device)
    ends = end_tokens(target)
    data = read_examples(recipe.data, tokenizer, max_length=_longest(target, recipe), ends=ends)
    if recipe.max_length is None and any(reason.startswith("longer") for reason in data.dropped):
        raise ValueError(f"Expected texts that fit the target's context, found {dict(data.dropped)}; leave them out "
                         f"with `--max_length {_longest(target, recipe)}`.")  # fmt: skip
    examples, validation = data.split(args.validation_every)
    check_texts(data.examples, target)
    if checkpoint is None or recipe.lora_rank is not None:  # an adapter's checkpoint is the adapter alone
        set_seed(args.seed)  # of what is new in the drafter
        drafter = starting_drafter(recipe, target, tokenizer, examples)
    else:
        drafter = CarryoverDrafterModel.from_pretrained(checkpoint, dtype=torch.float32)
    check_parts(
        drafter, args, adapts=recipe.lora_rank is not None, new_judge=bool(recipe.confidence_head),
        new_parts=recipe.drafter is None or recipe.markov_head is not None,
    )  # fmt: skip
    check_pair(target, drafter)
    for part, size in estimate_memory(drafter, target, args, max(example.length for example in examples)).items():
        logger.warning("%-40s %8.2f GB", part, size / 1e9)
    interruption = Interruption()
    learner = drafter if recipe.lora_rank is None else adapter_of(drafter, recipe.lora_rank)
    trainer = CarryoverTrainer(
        learner, target, args=args, examples=examples, validation=validation,
        callbacks=[interruption, MarkComplete()],
    )  # fmt: skip
    with interruption:
        _make_steps(trainer, checkpoint)
    if interruption.happened:
        raise KeyboardInterrupt("Stopped, and saved; the same command goes on from here.")
    if trainer.is_world_process_zero():  # several processes hold the same drafter
        drafter = _save(trainer, drafter)
        finish(out, begun, trainer, dict(data.dropped))
    PartialState().wait_for_everyone()  # else one returns before the folder is whole
    return drafter.eval()


def _make_steps(trainer: CarryoverTrainer, checkpoint: str | None) -> None:
    """Train to the end; where all steps are made but the drafter was not saved, the Trainer would make one more."""
    if checkpoint is None or steps_made(checkpoint) != trainer.args.max_steps:
        trainer.train(resume_from_checkpoint=checkpoint)
        return
    trainer._load_from_checkpoint(checkpoint)
    trainer.state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))


def _save(trainer: CarryoverTrainer, drafter: CarryoverDrafterModel) -> CarryoverDrafterModel:
    """Write the adapter, if there is one, and the drafter, with it merged."""
    out = Path(trainer.args.output_dir)
    with saving(out):
        if trainer.model is not drafter:
            trainer.model.save_pretrained(out / ADAPTER)
            drafter = trainer.model.merge_and_unload()
        drafter.save_pretrained(out)
    return drafter


def read_recipe(words: Sequence[str]) -> list[str]:
    """Command-line words with a leading YAML file turned into flags before them, so that given flags win.

    Raises:
        ValueError: The file is missing or is not a flat mapping.
    """
    if not words or words[0].startswith("-"):
        return list(words)
    path = Path(words[0])
    if not path.is_file():
        raise ValueError(f"Expected a recipe (YAML) at {path}, found no file; check the path.")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"Expected YAML in {path}, got: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(
            f"Expected `name: value` lines in {path}, found {type(settings).__name__}; see examples/recipes."
        )
    for name, value in settings.items():
        if isinstance(value, dict | list):
            raise ValueError(f"Expected one value for `{name}` in {path}, found {value!r}; see examples/recipes.")
    flags = [(f"--{name}", str(value)) for name, value in settings.items() if value is not None]
    return [word for flag in flags for word in flag] + list(words[1:])


def starting_drafter(
    recipe: RecipeArguments,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
) -> CarryoverDrafterModel:
    """The recipe's drafter, in fp32: new, or loaded and changed where the recipe says so; what it lacks is random.

    Raises:
        ValueError: The recipe changes what loaded weights depend on.
    """
    changes = _changes(recipe)
    if recipe.drafter is None:
        drafter = CarryoverDrafterModel(new_config(recipe, target, tokenizer, changes))
    else:
        drafter = load_drafter(recipe.drafter, target=target, dtype=torch.float32)
        old = drafter.config
        wanted = recipe.num_target_layers
        reads = None if wanted is None else len(spaced_layers(target, wanted))
        if recipe.num_layers not in (None, old.num_hidden_layers) or reads not in (None, len(old.target_layer_ids)):
            raise ValueError(f"Expected the layers of {recipe.drafter} ({old.num_hidden_layers}, reading "
                             f"{old.target_layer_ids}), found others in the recipe; leave them out.")  # fmt: skip
        if changes:
            changed = CarryoverDrafterModel(CarryoverDrafterConfig(**(old.to_dict() | changes)))
            try:
                changed.load_state_dict(drafter.state_dict(), strict=False)
            except RuntimeError as error:
                raise ValueError(f"Expected settings that the weights of {recipe.drafter} fit, got {changes}; leave "
                                 f"them out: {error}") from error  # fmt: skip
            drafter = changed
    if recipe.draft_vocab is not None:
        chosen, covered = most_used_tokens(examples, recipe.draft_vocab, always=end_tokens(target))
        drafter = restrict_vocabulary(drafter, chosen)
        logger.warning("The draft vocabulary of %d covers %.2f %% of the answers.", len(chosen), 100 * covered)
    return drafter


def _changes(recipe: RecipeArguments) -> dict[str, Any]:
    """The recipe's settings that are fields of a drafter's configuration."""
    named = {
        "block_size": recipe.block_size,
        "sample_from_anchor": recipe.sample_from_anchor,
        "markov_head_type": recipe.markov_head,
        "markov_rank": recipe.markov_rank,
        "enable_confidence_head": recipe.confidence_head,
        "mask_token_id": recipe.mask_token_id,
    }
    return {name: value for name, value in named.items() if value is not None}


def new_config(
    recipe: RecipeArguments, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, changes: dict[str, Any]
) -> CarryoverDrafterConfig:
    """A drafter of the target's width and head sizes that reads evenly spaced layers."""
    theirs = sizes_of(target)
    heads = theirs["num_attention_heads"]
    fields = {
        "block_size": 8,
        "sample_from_anchor": False,
        "target_layer_ids": spaced_layers(target, recipe.num_target_layers or 5),
        "vocab_size": theirs["vocab_size"],
        "hidden_size": theirs["hidden_size"],
        "intermediate_size": theirs.get("intermediate_size") or 4 * theirs["hidden_size"],
        "num_hidden_layers": recipe.num_layers or 3,
        "num_attention_heads": heads,
        "num_key_value_heads": theirs.get("num_key_value_heads") or heads,
        "head_dim": theirs.get("head_dim") or theirs["hidden_size"] // heads,
        "rope_parameters": plain_rope(theirs),
        "max_position_embeddings": context_length(target) or 32768,
        "num_target_layers": theirs["num_hidden_layers"],
        "final_logit_softcapping": theirs.get("final_logit_softcapping"),
    }
    if recipe.mask_token_id is None:
        fields["mask_token_id"] = unused_token(tokenizer)
    return CarryoverDrafterConfig(**(fields | changes))


def _longest(target: PreTrainedModel, recipe: RecipeArguments) -> int:
    context = context_length(target) or sys.maxsize
    if (recipe.max_length or 0) > context:
        raise ValueError(f"`max_length` must be at most the target's context, {context}, got {recipe.max_length}.")
    return recipe.max_length or context
