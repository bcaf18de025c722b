"""How does `target.generate(..., assistant_model=drafter)` reach us? The one seam, and what it refuses."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteria
from transformers.generation import SynthIDTextWatermarkingConfig as SynthID
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from .configuration_carryover import CarryoverDrafterConfig
from .drafting import CarryoverCandidateGenerator

# The private Transformers methods that we wrap; we also read `_is_stateful` of a model and `_mask_length` of a call.
PRIVATE_NAMES = ("_validate_generation_mode", "_assisted_decoding", "_get_candidate_generator")
# Marks a wrapper and holds what it wraps, so that a second copy of this file (from remote code) does not wrap again.
MARK = "carryover_original"


def install() -> None:
    """Teach ``generate`` to accept our drafters. Idempotent; every call without one passes through untouched."""
    for name, wrap in zip(PRIVATE_NAMES, (_wrap_validation, _wrap_decoding, _wrap_generator), strict=True):
        original = vars(GenerationMixin)[name]
        if MARK not in vars(original):
            wrapper = wraps(original)(wrap(original))
            vars(wrapper)[MARK] = original
            setattr(GenerationMixin, name, wrapper)


def uninstall() -> None:
    """Put Transformers' own methods back. The next drafter that is constructed installs the seam again."""
    for name in PRIVATE_NAMES:
        wrapper = vars(GenerationMixin)[name]
        setattr(GenerationMixin, name, vars(wrapper).get(MARK, wrapper))


def is_ours(assistant: Any, config: GenerationConfig) -> bool:
    """Whether this call drafts with us: our drafter (bare or in an adapter), and no other way chosen by the caller."""
    other_ways = config.speculation_type, config.prompt_lookup_num_tokens, config.assistant_early_exit, config.use_mtp
    is_model = isinstance(assistant, torch.nn.Module) and not any(other_ways)
    return bool(is_model and assistant.config.model_type == CarryoverDrafterConfig.model_type)


def _wrap_validation(original: Callable[..., None]) -> Callable[..., None]:
    def validate(self: Any, mode: GenerationMode, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
        if is_ours(kwargs.get("assistant_model"), config):
            check_pair(self, kwargs["assistant_model"])
            check_options(mode, config)
        original(self, mode, config, kwargs)

    return validate


def _wrap_decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    def decode(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        drafter: Any = kwargs.get("assistant_model")
        if drafter is None or not is_ours(drafter, kwargs["generation_config"]):
            return original(self, *args, **kwargs)
        (input_ids,), streamer = args, kwargs.pop("streamer", None)
        try:
            check_inputs(input_ids, kwargs)
            passed_on = {name: kwargs[name] for name in ("generation_config", "logits_processor")}
            generator = CarryoverCandidateGenerator(drafter, self, **passed_on)
            gate = TokenGate(kwargs["stopping_criteria"], streamer, generator, input_ids.shape[1])
            # `_get_candidate_generator` hands the generator back to the library's loop; the gate streams and stops.
            kwargs |= {"assistant_model": generator, "stopping_criteria": StoppingCriteriaList([gate])}
            return gate.trim(original(self, input_ids, **kwargs), kwargs["cache"])
        except ValueError as error:
            if kwargs.get("cache") is None or kwargs["cache"].is_croppable:
                raise
            message = f"Carryover drafting expects a cache that can be cropped, got {kwargs['cache']}"
            raise ValueError(f"{message}; leave `assistant_model` out, or choose another cache.") from error
        finally:
            if streamer is not None:
                streamer.end()

    return decode


def _wrap_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_generator(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("assistant_model"), CarryoverCandidateGenerator):
            return kwargs["assistant_model"]
        return original(self, *args, **kwargs)

    return get_generator


@dataclass(eq=False)
class TokenGate(StoppingCriteria):
    """Asks the stopping criteria about every token of a round in turn, and streams only those that stay.

    The library's loop asks once a round, about the whole block. Here a criterion sees what plain ``generate`` shows
    it, one more token each time, and stops at the same one; what the loop added after it is trimmed.
    """

    criteria: StoppingCriteriaList
    streamer: BaseStreamer | None
    generator: CarryoverCandidateGenerator
    prompt_length: int
    surplus: int = 0

    def __post_init__(self) -> None:
        self.length = self.prompt_length
        # The loop itself cuts a block at the end of text and at the length limit; a clock may be asked once a round.
        by_loop = EosTokenCriteria | MaxLengthCriteria | MaxTimeCriteria
        self.once_a_round = all(isinstance(criterion, by_loop) for criterion in self.criteria)

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None, **kwargs: Any) -> Tensor:
        """Whether to stop, ``[1]``; judges the tokens of ``input_ids`` ``[1, T]`` that are new, one by one."""
        done = torch.zeros(1, dtype=torch.bool, device=input_ids.device)
        while self.length < input_ids.shape[1] and not done.all():
            self.length += 1
            if self.streamer is not None:
                self.streamer.put(input_ids[0, self.length - 1 : self.length].cpu())
            if self.length == input_ids.shape[1] or not self.once_a_round:
                seen = None if scores is None else scores[: self.length - self.prompt_length]
                done = self.criteria(input_ids[:, : self.length], seen, **kwargs)
        self.surplus = input_ids.shape[1] - self.length
        if self.surplus:
            self.generator.stats.rounds[-1].num_accepted -= self.surplus
        return done

    def trim(self, output: Any, cache: Cache) -> Any:
        """The loop's output without the tokens after the stop: ids ``[1, T]``, or the dictionary with its parts."""
        if not self.surplus:
            return output
        if {type(layer) for layer in cache.layers} <= {DynamicLayer, StaticLayer}:
            cache.crop(-self.surplus)
        else:
            cache.update = _refuse_lossy_cache
        if isinstance(output, Tensor):
            return output[:, : self.length]
        output.sequences = output.sequences[:, : self.length]
        for name in {"scores", "logits", "attentions", "hidden_states"} & output.keys():
            output[name] = output[name][: -self.surplus]
        return output


def _refuse_lossy_cache(*_: Any, **__: Any) -> None:
    """Stands in for ``update`` of a sliding or recurrent cache; the loop dropped rows that a late crop would need."""
    raise RuntimeError("Expected a whole cache, got one that lost rows when a stop string or criterion ended a text "
                       "inside a block of drafts; start the next turn without it.")  # fmt: skip


def check_pair(target: PreTrainedModel, drafter: Any) -> None:
    """Refuse a drafter that was made for another target, in one sentence."""
    found = type(target).__name__
    if target.config.is_encoder_decoder or target._is_stateful:
        raise ValueError("Carryover drafting expects a decoder-only target without a running state (a rejected draft "
                         f"could not be taken back), got {found}; leave `assistant_model` out.")  # fmt: skip
    ours, theirs = drafter.config, target.config.get_text_config(decoder=True)
    for name, expected, size in (
        ("vocabulary size", ours.vocab_size, theirs.vocab_size),
        ("hidden size", ours.hidden_size, theirs.hidden_size),
        ("number of layers", ours.num_target_layers or theirs.num_hidden_layers, theirs.num_hidden_layers),
    ):
        if expected != size:
            raise ValueError(
                f"The drafter expects a target with {name} {expected}, got {found} with {size}; use the target it was "
                "trained for, or a drafter for this target."
            )
    ids, last = ours.target_layer_ids, theirs.num_hidden_layers - 1
    if ids[-1] >= last:
        raise ValueError(f"The drafter reads layers {ids}, expected below the target's last, got {last}; use another.")


def check_options(generation_mode: GenerationMode, config: GenerationConfig) -> None:
    """Refuse options that drafting cannot honour exactly, in one sentence."""
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"Carryover drafting expects greedy decoding or sampling, got {generation_mode.value}; set `num_beams=1` "
            "without other search options, or leave `assistant_model` out."
        )
    refused = {
        "num_return_sequences": (config.num_return_sequences or 1) > 1,
        "use_cache=False": config.use_cache is False,
        "assistant_ensemble_weight": config.assistant_ensemble_weight is not None,
        "guidance_scale": config.guidance_scale not in (None, 1),
        "dola_layers": config.dola_layers is not None,
        "a SynthID `watermarking_config`": isinstance(config.watermarking_config, SynthID),
    }
    for name in (name for name, is_set in refused.items() if is_set):
        raise ValueError(
            f"Carryover drafting expects generate() without {name}, which changes the text or cannot be taken back "
            "after a rejected draft; leave it or `assistant_model` out."
        )


def check_inputs(input_ids: Tensor, kwargs: dict[str, Any]) -> None:
    """Refuse a batch, and a filled cache together with the ids that it already holds."""
    if input_ids.shape[0] != 1:
        raise ValueError(f"Carryover drafting expects one prompt at a time (batch size 1), got {len(input_ids)}; call "
                         "generate for each, or leave `assistant_model` out.")  # fmt: skip
    if kwargs.get("position_ids") is not None and kwargs["position_ids"].dim() != 2:
        raise ValueError("Carryover drafting expects one position a token, got three; leave `assistant_model` out.")
    past = 0 if kwargs.get("cache") is None else kwargs["cache"].get_seq_length()
    mask, length = kwargs.get("attention_mask"), input_ids.shape[1]
    if 0 < past < length and length == (kwargs["generation_config"]._mask_length if mask is None else mask.shape[1]):
        raise ValueError(f"Carryover drafting expects only new ids beside a filled cache, got {length} ids and {past} "
                         "cached rows; pass the new ids with the whole text's `attention_mask`.")  # fmt: skip
