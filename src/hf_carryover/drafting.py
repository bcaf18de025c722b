"""How does one round go? Gather, split, remember, draft, hand over."""

from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.modeling_outputs import ModelOutput

from .acceptance import DraftStats, Round, Verdict, split_at_acceptance
from .cache_carryover import CarryoverCache
from .draft_length import Acceptance, DraftLength, longest_draft
from .modeling_carryover import CarryoverDrafterModel
from .round_seconds import RoundSeconds


class CarryoverCandidateGenerator(CandidateGenerator):
    """Drafts for one ``generate`` call. `get_candidates` is the round; all state lives and dies with this object.

    The target lends its embedding and output head; draft logits pass through the call's processors like its own.
    Drafts are handed over as ``drafter.draft_length`` says; as many as pay only where ``times`` are there to tell.
    """

    requires_model_outputs = True

    def __init__(
        self, drafter: CarryoverDrafterModel, target: PreTrainedModel, *, generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList, memory: CarryoverCache | None = None, times: RoundSeconds | None = None,
    ) -> None:  # fmt: skip
        self.drafter = drafter
        self.embedding = target.get_input_embeddings()
        output_head = target.get_output_embeddings()
        self.head, self.head_place = drafter.proposal_head(output_head), place_of(output_head, drafter.device)
        self.embedding_place, self.dtype = place_of(self.embedding, drafter.device), target.dtype
        self.hidden_state_ids = [i + 1 for i in drafter.config.target_layer_ids]
        self.max_length, self.do_sample = generation_config.max_length, generation_config.do_sample
        self.logits_processor = logits_processor
        self.carry_enabled, self.draft_length = drafter.carry_enabled, longest_draft(drafter)
        # The user's own request for hidden states is for all of them; Transformers cannot split a partial list.
        wants_all = generation_config.output_hidden_states and generation_config.return_dict_in_generate
        self.model_kwargs_overrides = {"output_hidden_states": True if wants_all else self.hidden_state_ids}
        self.cache = CarryoverCache() if memory is None else memory
        self.lengths, self.round_start = None, 0.0
        if times is not None:
            prior = [0.5] * self.draft_length if drafter.acceptance_prior is None else drafter.acceptance_prior
            self.lengths = DraftLength(self.draft_length, Acceptance(prior), times, bool(drafter.confidence_head))
        self.stats = drafter.last_stats = DraftStats()

    def get_candidates(
        self, input_ids: Tensor, model_kwargs: dict[str, Any], model_outputs: ModelOutput | None,
        is_first_iteration: bool, n_last_matches: int,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """One round of drafting (arXiv 2609.14717), from the target's last pass to its next.

        Args:
            input_ids: Text so far, anchor last, ``[1, T]``.
            model_kwargs: The target's arguments; positions and mask of the text are read.
            model_outputs: The target's last pass; None before the prompt's.
            is_first_iteration: Whether that one is still to come.
            n_last_matches: Drafts accepted in the last pass.

        Returns:
            Text and drafts ``[1, T + K]``; when sampling, also the logits they were drawn from, ``[1, K, V]``.
        """
        if model_outputs is None:
            return input_ids, None
        start = perf_counter()
        num_drafts = self._wanted(start, room=self.max_length - input_ids.shape[1] - 1)
        # 1. Gather what the target computed for the rows of its last pass.
        features, positions, num_rejected = self._gather(model_outputs, model_kwargs, n_last_matches)
        record = Round(drafts=input_ids.new_empty(0), num_carried=0)
        self.stats.rounds.append(record)
        # 2. Split at the first rejection.
        verdict = split_at_acceptance(features, num_rejected)
        if num_drafts <= 0:  # drafting does not pay, or the target's next token is the last
            self.cache.postpone(verdict.accepted, positions[:, :-1])
            return input_ids, None
        # 3. Remember: accepted rows for good, rejected rows for this round.
        memory, positions = self._remember(verdict, positions)
        record.num_carried, record.recycle_seconds = self.cache.num_carried, perf_counter() - start
        # 4. Draft a block from the anchor.
        hidden = self._draft(input_ids[:, -1:], memory, positions, num_drafts)
        drafts, logits = self._propose(input_ids, hidden)
        record.draft_seconds = perf_counter() - start - record.recycle_seconds
        # 5. Hand over.
        record.drafts = drafts[0]
        return torch.cat([input_ids, drafts], dim=1), logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:  # noqa: ARG002
        """Record what the target accepted; the prompt's pass is no round."""
        if self.stats.rounds:
            self.stats.rounds[-1].num_accepted = num_matches

    def keep_last(self, outputs: ModelOutput, model_kwargs: dict[str, Any], num_matches: int, surplus: int) -> None:
        """The last pass's rows, which no round gathers, wait for a next turn; not those of ``surplus`` tokens."""
        features, positions, num_rejected = self._gather(outputs, model_kwargs, num_matches)
        num_kept = features.shape[1] - num_rejected - surplus
        self.cache.postpone(features[:, :num_kept], positions[:, :num_kept])

    def _wanted(self, now: float, *, room: int) -> int:
        """Drafts that this round should hand over, at most ``room``, from what the rounds before it were."""
        if self.lengths is None:
            return min(self.draft_length, room)
        if self.stats.rounds:
            last, is_first = self.stats.rounds[-1], len(self.stats.rounds) == 1  # that one reads the whole prompt
            self.lengths.learn(len(last.drafts), last.num_accepted, None if is_first else now - self.round_start)
        self.round_start = now
        return self.lengths.choose(room)

    def _gather(self, outputs: ModelOutput, kwargs: dict[str, Any], num_matches: int) -> tuple[Tensor, Tensor, int]:
        """Features of the pass's rows, ``[1, S, F]``, positions of accepted rows and anchor, ``[1, A + 1]``, and R.

        Prompt rows under a mask (padding, holes) are no text and never become memory.
        """
        states = [outputs.hidden_states[i].to(self.drafter.device) for i in self.hidden_state_ids]
        if {(state.dim(), state.shape[-1]) for state in states} != {(3, self.drafter.config.hidden_size)}:
            raise ValueError(f"The drafter expects hidden states [1, rows, {self.drafter.config.hidden_size}], got "
                             f"{[list(state.shape) for state in states]}; use another target.")  # fmt: skip
        features = torch.cat(states, dim=-1).to(self.drafter.norm.weight.dtype)  # [1, S, F]
        is_prompt = not self.stats.rounds  # the first round reads the prompt's pass
        num_accepted = features.shape[1] if is_prompt else num_matches + 1
        num_rejected = features.shape[1] - num_accepted
        positions = kwargs.get("position_ids")
        if positions is None:  # the target has none (ALiBi)
            anchor = outputs.cache.get_seq_length()
            positions = torch.arange(anchor - num_accepted, anchor + 1)[None]
        positions = positions[:, -num_accepted - 1 :].to(features.device)
        if positions.shape[1] != num_accepted + 1:
            raise ValueError(f"The drafter expects {num_accepted + 1} positions, got {positions.shape[1]}; leave "
                             "prompt tuning (virtual tokens) or assistant_model out.")  # fmt: skip
        mask = kwargs.get("attention_mask")
        if is_prompt and mask is not None:
            is_text = mask[0, -num_accepted - 1 :].to(features.device, torch.bool)  # [A + 1]; the anchor always is
            features, positions = features[:, is_text[:-1]], positions[:, is_text]
        return features, positions, num_rejected

    def _remember(self, verdict: Verdict, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Announce the rows to the cache; returns them for the drafter's pass, ``[1, A + R, F]``, and positions.

        Positions are those of accepted rows and anchor, ``[1, A + 1]``; rows that waited come before both.
        """
        accepted, positions = self.cache.take(verdict.accepted, positions)
        self.cache.commit(accepted.shape[1])
        self.cache.carry(verdict.rejected.shape[1] if self.carry_enabled else 0)
        if self.cache.num_carried == 0:
            return accepted, positions
        return torch.cat([accepted, self.drafter.mark_rejected(verdict.rejected)], dim=1), positions

    def _draft(self, anchor: Tensor, memory: Tensor, positions: Tensor, num_drafts: int) -> Tensor:
        """One drafter pass over new memory and block; returns the drafting slots' last hidden states, ``[1, K, D]``.

        Carried rows keep the positions they were computed at: the first one's is the anchor's.
        """
        config, device = self.drafter.config, self.drafter.device
        carried = positions[:, -1:] + torch.arange(self.cache.num_carried, device=device)
        block = positions[:, -1:] + torch.arange(config.block_size, device=device)
        hidden = self.drafter(
            noise_embeds=self.drafter.embed_block(anchor.to(self.embedding_place), self.embedding).to(device),
            context_hidden_states=memory,
            position_ids=torch.cat([positions[:, :-1], carried, block], dim=1),  # [1, A + R + B]
            cache=self.cache,
            num_carried=self.cache.num_carried,
        ).last_hidden_state  # [1, B, D]
        first = 0 if config.sample_from_anchor else 1
        return hidden[:, first : first + num_drafts]

    def _propose(self, input_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Slots into drafts ``[1, K]``, left to right where a head, a processor or chance looks at the token before.

        When sampling, the logits returned are those that the tokens were drawn from, after every processor, in fp32;
        the drafts end before the first slot that no token can be drawn from, or, after the first one, that a
        confidence head advises against: it has seen the drafts before, never the one it judges.
        """
        markov, state = self.drafter.markov_head, None
        judge = self.lengths if self.lengths is not None and self.lengths.is_open else None
        logits = self._logits(input_ids, hidden) if judge is None else None  # with a judge, slot by slot
        if logits is not None and markov is None and not self.do_sample and not self.logits_processor:
            return self.drafter.token_ids(logits.argmax(dim=-1)), None

        ids, tokens, drawn_from, can_draw = input_ids, [], [], []
        for slot in range(hidden.shape[1]):
            if judge is not None:
                word = self.drafter.confidence(hidden[:, slot], ids[:, -1].to(hidden.device))
                if not judge.goes_on(word.sigmoid().item()) and slot > 0:
                    break
            scores = self._logits(ids, hidden[:, slot : slot + 1])[:, 0] if logits is None else logits[:, slot]
            if markov is not None:
                bias, state = markov(ids[:, -1].to(hidden.device), hidden[:, slot], state)
                scores = scores + bias.to(scores)
            scores = self.logits_processor(ids, self.drafter.whole_vocabulary(scores))
            can_draw.append(scores.amax(dim=-1, keepdim=True).isfinite())
            scores = scores.where(can_draw[-1], 0.0)
            drawn_from.append(scores)
            choice = torch.multinomial(scores.softmax(-1), 1) if self.do_sample else scores.argmax(-1, keepdim=True)
            tokens.append(choice)
            ids = torch.cat([ids, choice], dim=1)
        drafts = torch.cat(tokens, dim=1)
        if not self.do_sample:
            return drafts, None
        num_drawn = int(torch.cat(can_draw, dim=1).long().cumprod(dim=1).sum())
        handed = torch.stack(drawn_from, dim=1)[:, :num_drawn] if num_drawn else None
        return drafts[:, :num_drawn], handed

    def _logits(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Logits of slots ``[1, K, D]`` by the target's head, where the ids are, ``[1, K, V]``."""
        return self.drafter.slot_logits(hidden.to(self.head_place, self.dtype), self.head).to(ids.device)


def place_of(module: nn.Module, default: torch.device) -> torch.device:
    """The device of a lent module; ``default`` if its weights are packed or offloaded, so that it moves its inputs."""
    devices = [parameter.device for parameter in module.parameters()]
    return devices[0] if devices and devices[0].type != "meta" else default
