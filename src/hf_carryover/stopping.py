"""Where does a text end inside a block? At the token at which plain ``generate`` ends it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from .drafting import CarryoverCandidateGenerator


def is_cut_by_loop(criterion: Any, config: GenerationConfig) -> bool:
    """Whether the loop itself cuts a block where this criterion fires; a clock may be asked once a round."""
    if type(criterion) is EosTokenCriteria and config._eos_token_tensor is not None:
        return bool(criterion.eos_token_id.tolist() == config._eos_token_tensor.tolist())
    at_limit = type(criterion) is MaxLengthCriteria and criterion.max_length == config.max_length
    return at_limit or type(criterion) is MaxTimeCriteria


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
    once_a_round: bool
    surplus: int = 0

    def __post_init__(self) -> None:
        self.length = self.prompt_length

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None, **kwargs: Any) -> Tensor:
        """Whether to stop, ``[1]``; judges the tokens of ``input_ids`` ``[1, T]`` that are new, one by one."""
        done = torch.zeros(1, dtype=torch.bool, device=input_ids.device)
        self.length = input_ids.shape[1] - 1 if self.once_a_round and self.streamer is None else self.length
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
