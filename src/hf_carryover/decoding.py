"""How does `target.generate(..., assistant_model=drafter)` reach us? The one seam, and what it refuses."""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from time import time
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import MaxLengthCriteria, MaxTimeCriteria, SynthIDTextWatermarkingConfig
from transformers.generation.configuration_utils import GenerationMode

from .cache_carryover import MEMORIES, recall
from .configuration_carryover import CarryoverDrafterConfig
from .draft_length import AUTO
from .drafting import CarryoverCandidateGenerator
from .round_seconds import RoundSeconds, frozen_times, measured_times
from .stopping import TokenGate, is_cut_by_loop

# The private methods that we wrap; we read a model's `_is_stateful`, a call's `_mask_length` and `_eos_token_tensor`.
PRIVATE_NAMES = ("_validate_generation_mode", "_assisted_decoding", "_get_candidate_generator",
                 "_update_model_kwargs_for_generation")  # fmt: skip
# Marks a wrapper and holds what it wraps, so that a second copy of this file (from remote code) does not wrap again.
MARK = "carryover_original"
# Of calls that draft, by the target's cache: the last pass (`_update` alone sees it), arguments after it, drafts kept.
LAST_PASSES: dict[Cache, tuple[Any, Any, int]] = {}
STATEFUL = {"UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",  # processors that count their calls
            "SynthIDTextWatermarkLogitsProcessor": "a SynthID watermark"}  # fmt: skip
MEASURED_PROMPT = 16  # tokens, in a call that measures how long rounds take


def install() -> None:
    """Teach ``generate`` to accept our drafters. Idempotent; every call without one passes through untouched."""
    for name, answer in zip(PRIVATE_NAMES, (_validate, _decode, _get_generator, _update), strict=True):
        original = vars(GenerationMixin)[name]
        if MARK not in vars(original):
            setattr(GenerationMixin, name, _wrap(original, answer))


def _wrap(original: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    @wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return answer(original, *args, **kwargs)

    vars(wrapper)[MARK] = original
    return wrapper


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


def _validate(base: Any, self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any) -> None:
    drafter = generation_mode_kwargs.get("assistant_model")
    if is_ours(drafter, generation_config):
        check_pair(self, drafter)
        check_options(generation_mode, generation_config)
    base(self, generation_mode, generation_config, generation_mode_kwargs)


def _decode(base: Callable[..., Any], self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    drafter: Any = kwargs.get("assistant_model")
    config = kwargs.get("generation_config")
    if config is None or not is_ours(drafter, config):
        return base(self, input_ids, *args, **kwargs)
    streamer = kwargs.pop("streamer", None)
    try:
        check_inputs(input_ids, self.device, kwargs)
        passed_on: Any = {name: kwargs[name] for name in ("generation_config", "logits_processor")}
        cache = kwargs["cache"]
        passed_on |= {"memory": recall(cache, drafter), "times": _times(self, drafter, kwargs, base)}
        generator = CarryoverCandidateGenerator(drafter, self, **passed_on)
        by_loop = all(is_cut_by_loop(criterion, config) for criterion in kwargs["stopping_criteria"])
        gate = TokenGate(kwargs["stopping_criteria"], streamer, generator, input_ids.shape[1], by_loop)
        # `_get_candidate_generator` hands the generator back to the library's loop; the gate streams and stops.
        kwargs |= {"assistant_model": generator, "stopping_criteria": StoppingCriteriaList([gate])}
        LAST_PASSES[cache] = (None, None, 0)
        output = base(self, input_ids, **kwargs)
        if LAST_PASSES[cache][0] is not None:  # a target's own update may never ask the library's
            generator.keep_last(*LAST_PASSES[cache], gate.surplus)
            MEMORIES.setdefault(cache, WeakKeyDictionary())[drafter] = generator.cache
        return gate.trim(output, cache)
    except ValueError as error:
        lossy = "cache that can be cropped" in str(error)  # the library's own sentence
        _refuse("leave assistant_model out", (lossy, "a cache that can be cropped", kwargs.get("cache")))
        raise
    finally:
        LAST_PASSES.pop(kwargs.get("cache"), None)
        if streamer is not None:
            streamer.end()


def _times(target: Any, drafter: Any, kwargs: dict[str, Any], decode: Callable[..., Any]) -> RoundSeconds | None:
    """Seconds of rounds for automatic lengths: given, learned, or frozen where a clock could change the text."""
    if drafter.draft_length != AUTO:
        return None
    if drafter.timings is not None:
        return RoundSeconds(drafter.timings)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None  # ranks that share a target must not go by clocks of their own: all drafts
    precision = None
    with suppress(RuntimeError):  # where PyTorch's newer settings ask for less than the highest
        precision = torch.get_float32_matmul_precision()
    is_precise = target.dtype in (torch.float32, torch.float64) and precision == "highest"
    if is_precise and not (kwargs["generation_config"].do_sample or torch.is_autocast_enabled(target.device.type)):
        return measured_times(target, drafter)

    def measure(rounds: int) -> RoundSeconds:
        times, ids = RoundSeconds(needed=rounds // 4), torch.zeros(1, MEASURED_PROMPT, device=target.device).long()
        most = MEASURED_PROMPT + (rounds + 3) * (drafter.config.num_drafts + 1)
        both: Any = {"generation_config": GenerationConfig(max_length=most), "logits_processor": LogitsProcessorList()}
        generator = CarryoverCandidateGenerator(drafter, target, times=times, **both)
        enough = [lambda *_, **__: torch.full((1,), times.num_rounds >= rounds, device=ids.device)]
        both |= {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(most), *enough])}
        both |= {"assistant_model": generator, "cache": DynamicCache(config=target.config)}
        decode(target, ids, attention_mask=ids + 1, use_cache=True, **both)
        return times

    began, times = time(), frozen_times(target, drafter, measure)
    for criterion in kwargs["stopping_criteria"]:
        if isinstance(criterion, MaxTimeCriteria):  # what is measured once is no part of a call's time
            criterion.initial_timestamp += time() - began
    return times


def _get_generator(base: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    assistant = kwargs.get("assistant_model")
    return assistant if isinstance(assistant, CarryoverCandidateGenerator) else base(*args, **kwargs)


def _update(
    base: Callable[..., Any], self: Any, outputs: Any, model_kwargs: dict[str, Any],
    is_encoder_decoder: bool = False, num_new_tokens: int = 1,  # targets hand these on by place or by name
) -> Any:  # fmt: skip
    updated = base(self, outputs, model_kwargs, is_encoder_decoder, num_new_tokens)
    if (cache := updated.get("cache")) in LAST_PASSES:
        LAST_PASSES[cache] = outputs, updated, num_new_tokens - 1
    return updated


def check_pair(target: PreTrainedModel, drafter: Any) -> None:
    """Refuse a drafter that was made for another target."""
    ours, theirs, name = drafter.config, target.config.get_text_config(decoder=True), type(target).__name__
    ids, depth = ours.target_layer_ids, theirs.num_hidden_layers
    _refuse(
        "use the target that the drafter was trained for, or leave assistant_model out",
        (target.config.is_encoder_decoder or target._is_stateful,
         "a decoder-only target without a running state (a rejected draft could not be taken back)", name),
        (target.device.type == "meta", "a target whose first weights are in memory", f"{name} with offloaded ones"),
        (ours.vocab_size != theirs.vocab_size, f"vocabulary size {ours.vocab_size}", f"{name}: {theirs.vocab_size}"),
        (ours.hidden_size != theirs.hidden_size, f"hidden size {ours.hidden_size}", f"{name}: {theirs.hidden_size}"),
        (ours.num_target_layers not in (None, depth), f"{ours.num_target_layers} target layers", f"{name}: {depth}"),
        (ids[-1] >= depth - 1, f"its layers {ids} below the target's last, whose output is normalised", depth - 1),
    )  # fmt: skip


def check_options(mode: GenerationMode, config: GenerationConfig) -> None:
    """Refuse options that drafting cannot honour exactly."""
    options = {
        "num_return_sequences": (config.num_return_sequences or 1) > 1,
        "use_cache=False": config.use_cache is False,
        "assistant_ensemble_weight": config.assistant_ensemble_weight is not None,
        "guidance_scale": config.guidance_scale not in (None, 1),
        "dola_layers": config.dola_layers is not None,
        "a SynthID watermarking_config": isinstance(config.watermarking_config, SynthIDTextWatermarkingConfig),
    }
    _refuse(
        "leave that option or assistant_model out",
        (mode != GenerationMode.ASSISTED_GENERATION, "greedy decoding or sampling (num_beams=1)", mode.value),
        *((is_set, "options that a draft can honour and undo", name) for name, is_set in options.items()),
    )


def check_inputs(input_ids: Tensor, device: torch.device, kwargs: dict[str, Any]) -> None:
    """Refuse a batch, and inputs that the library's loop would cut, process twice or never end with."""
    config, mask, positions = kwargs["generation_config"], kwargs.get("attention_mask"), kwargs.get("position_ids")
    past = 0 if kwargs.get("cache") is None else kwargs["cache"].get_seq_length()
    length, limit = input_ids.shape[1], config.max_length
    longest = max([limit, *(c.max_length for c in kwargs["stopping_criteria"] if isinstance(c, MaxLengthCriteria))])
    masked = mask.shape[1] if mask is not None else config._mask_length if past else 0
    stateful = [STATEFUL[kind] for p in kwargs["logits_processor"] if (kind := type(p).__name__) in STATEFUL]
    _refuse(
        "call generate() so, or leave assistant_model out",
        (bool(stateful), "options that a draft can honour and undo", ", ".join(stateful)),
        (input_ids.device != device, f"ids on the target's device, {device}", input_ids.device),
        (len(input_ids) != 1, "one prompt at a time (batch size 1)", len(input_ids)),
        (positions is not None and positions.dim() != 2, "one position a token", "several"),
        (longest > limit, f"no length criterion above max_length {limit}", longest),
        (past > 0 and kwargs.get("inputs_embeds") is not None, "ids beside a filled cache", "embeddings"),
        (past > 0 and masked == length, "only new ids, with the whole text's attention_mask, beside a filled cache",
         f"{length} ids, a mask of {masked} and {past} cached rows"),
        (mask is not None and masked != length, f"a mask with holes to cover the {length} ids and no more", masked),
    )  # fmt: skip


def _refuse(what_to_do: str, *rules: tuple[bool, str, object]) -> None:
    for is_broken, expected, found in rules:
        if is_broken:
            raise ValueError(f"Carryover drafting expects {expected}, got {found}; {what_to_do}.")
