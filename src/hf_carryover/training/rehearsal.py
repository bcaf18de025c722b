"""What would decoding see here? Draft, verify and draft again, at many anchors of recorded texts in parallel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_carryover.evaluation.matched import attention_probabilities
from hf_carryover.evaluation.runs import System, decoding_options, switched
from hf_carryover.modeling_carryover import CarryoverDrafterModel
from hf_carryover.training.masks import NO_ANCHOR, Rejected, Texts, block_masks, branch_masks


class Reading(NamedTuple):
    """The target's pass over texts: features ``[N, T, F]``, last hidden states ``[N, T, D]``, and its cache."""

    features: Tensor
    last_hidden: Tensor
    cache: DynamicCache


@dataclass(frozen=True)
class Rehearsal:
    """A drafter and its frozen target, run at anchors ``[N, M]`` (-1: none) of recorded texts.

    All blocks and branches of a text share one pass; masks keep them apart, so that each sees what it would see while
    decoding (METHOD: parallel draft, verify, draft).
    """

    drafter: CarryoverDrafterModel
    target: PreTrainedModel

    @torch.no_grad()
    def read(self, texts: Texts) -> Reading:
        """The target's own pass over the texts; its head is not run."""
        layers = [i + 1 for i in self.drafter.config.target_layer_ids]
        # A cache without the target's configuration: sliding layers keep all rows, and masks say what they see.
        outputs = self.target.get_decoder()(
            input_ids=texts.input_ids, attention_mask=texts.mask.long(), cache=DynamicCache(), use_cache=True,
            output_hidden_states=layers,
        )  # fmt: skip
        features = torch.cat([outputs.hidden_states[i] for i in layers], dim=-1)  # [N, T, F]
        return Reading(features, outputs.last_hidden_state, outputs.cache)

    def layer_rms(self, texts: Texts) -> Tensor:
        """Root mean square of each target layer's features, repeated over its width, ``[F]``: the median over rows.

        A mean would be the first token's alone, whose features are a hundred times larger in many models.
        """
        rows, width = self.read(texts).features[texts.mask].float(), self.drafter.config.hidden_size  # [rows, F]
        return rows.view(len(rows), -1, width).square().mean(-1).sqrt().median(0).values.repeat_interleave(width)

    def draft(
        self,
        texts: Texts,
        reading: Reading,
        anchors: Tensor,
        rejected: Rejected | None = None,
        *,
        forward: Callable[..., Any] | None = None,
    ) -> Tensor:
        """One drafter pass over all blocks; returns the drafting slots' last hidden states ``[N, M, K, D]``.

        A block sees the memory rows before its anchor, itself, and its own branch's rejected rows. ``forward`` stands
        in for the drafter where something is wrapped around it.
        """
        config, (num_texts, num_blocks) = self.drafter.config, anchors.shape
        known = anchors.clamp(min=0)
        block = self.drafter.embed_block(
            texts.input_ids.gather(1, known).view(-1, 1), self.target.get_input_embeddings()
        ).view(num_texts, num_blocks * config.block_size, -1)  # [N, M B, D]
        slots = known[..., None] + torch.arange(config.block_size, device=known.device)  # [N, M, B]
        memory = reading.features  # [N, T, F]
        positions = [torch.arange(memory.shape[1], device=known.device).expand(num_texts, -1)]
        if rejected is not None:
            marked = self.drafter.mark_rejected(rejected.features.flatten(1, 2).to(self.drafter.norm.weight.dtype))
            memory = torch.cat([memory.to(marked.dtype), marked], dim=1)  # [N, T + M K, F]
            positions.append(rejected.positions.flatten(1))
        hidden = (forward or self.drafter)(
            noise_embeds=block,
            context_hidden_states=memory,
            position_ids=torch.cat([*positions, slots.flatten(1)], dim=1),
            attention_mask=block_masks(self.drafter, texts, anchors, rejected),
        ).last_hidden_state  # [N, M B, D]
        first = 0 if config.sample_from_anchor else 1
        slots = hidden.view(num_texts, num_blocks, config.block_size, -1)[:, :, first : first + config.num_drafts]
        return slots.contiguous()  # else the head would run as a batch of small products, four times slower

    @torch.no_grad()
    def propose(self, texts: Texts, anchors: Tensor, hidden: Tensor) -> Tensor:
        """Greedy drafts ``[N, M, K]`` of slots ``[N, M, K, D]``; a Markov head reads the drafts it made."""
        logits = self.slot_logits(hidden)
        markov, state = self.drafter.markov_head, None
        if markov is None:
            return self.drafter.token_ids(logits.argmax(-1))
        previous, drafts = texts.input_ids.gather(1, anchors.clamp(min=0)), []
        for slot in range(hidden.shape[2]):
            bias, state = markov(previous, hidden[:, :, slot], state)
            previous = self.drafter.token_ids((logits[:, :, slot] + bias).argmax(-1))  # [N, M]
            drafts.append(previous)
        return torch.stack(drafts, dim=-1)

    def teacher_forced(
        self, texts: Texts, anchors: Tensor, hidden: Tensor, *, confidence_detach: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Logits ``[N, M, K, V]`` and confidence logits ``[N, M, K]`` of slots, after the recorded tokens.

        With ``confidence_detach`` the latter's gradient stops at the confidence head.
        """
        logits, confidences = self.slot_logits(hidden), []
        markov, judges, state = self.drafter.markov_head, self.drafter.confidence_head is not None, None
        previous = recorded(
            texts, anchors, hidden.shape[2], first=0, missing=0
        )  # [N, M, K]: the token before each draft
        biases = []
        for slot in range(hidden.shape[2] if markov is not None or judges else 0):
            here, before = hidden[:, :, slot], previous[:, :, slot]
            if markov is not None:
                mixed, state = markov.mix(markov.markov_w1(before), here, state)
                biases.append(mixed)
            if judges:
                confidences.append(self.drafter.confidence(here, before, detach=confidence_detach))
        if markov is not None:
            logits = logits + markov.markov_w2(torch.stack(biases, dim=2))
        return logits, torch.stack(confidences, dim=2) if judges else None

    def slot_logits(self, hidden: Tensor) -> Tensor:
        """Logits of slots ``[..., D]`` through the target's own head, fp32 ``[..., V]``."""
        head = self.target.get_output_embeddings()
        return self.drafter.slot_logits(hidden.to(self.target.dtype), self.drafter.proposal_head(head))

    def accept(self, texts: Texts, anchors: Tensor, drafts: Tensor) -> Tensor:
        """How many drafts ``[N, M, K]`` are kept, ``[N, M]``: those before the first that is not the recorded token.

        For greedy and sampled answers alike: the memory after the branch is the recorded text's.
        """
        right = drafts == recorded(texts, anchors, drafts.shape[2], first=1)
        return right.long().cumprod(-1).sum(-1)

    @torch.no_grad()
    def verify(
        self, texts: Texts, reading: Reading, anchors: Tensor, drafts: Tensor, num_accepted: Tensor
    ) -> Rejected:
        """The target's rows of drafts ``[N, M, K]`` after each anchor, and which of them are rejected.

        All branches of a text run in one pass of the target over its own cache, which is left as it was found. The
        anchor is part of the text, so its row is there already.
        """
        slots = torch.arange(drafts.shape[2], device=drafts.device)
        positions = anchors.clamp(min=0)[..., None] + 1 + slots  # [N, M, K]
        layers = [i + 1 for i in self.drafter.config.target_layer_ids]
        outputs = self.target.get_decoder()(
            input_ids=drafts.flatten(1), attention_mask=branch_masks(self.target, texts, positions),
            position_ids=positions.flatten(1), cache=reading.cache, use_cache=True, output_hidden_states=layers,
        )  # fmt: skip
        reading.cache.crop(-drafts[0].numel())
        rows = torch.cat([outputs.hidden_states[i] for i in layers], dim=-1).view(*drafts.shape, -1)
        return Rejected(rows, positions, is_rejected=slots >= num_accepted[..., None])

    def own_rows(self, reading: Reading, anchors: Tensor) -> Rejected:
        """The anchors' own rows as if they were rejected ones, ``[N, M, 1, F]``: what a right guess would carry.

        It knows what the target finds likely next after the right token; a rejected row, after a wrong one.
        """
        places = anchors.clamp(min=0)[..., None]  # [N, M, 1]
        rows = reading.features.gather(1, places.expand(-1, -1, reading.features.shape[-1]))  # [N, M, F]
        return Rejected(rows[:, :, None], places, is_rejected=(anchors >= 0)[..., None])

    @torch.no_grad()
    def attention_mass(
        self, texts: Texts, reading: Reading, anchors: Tensor, rejected: Rejected,
        *, forward: Callable[..., Any] | None = None,
    ) -> float:  # fmt: skip
        """Share of attention probability on rejected rows: mean over layers, heads and slots of blocks that have some.

        The definition of `evaluate`, on the first text of the batch.
        """
        first = Texts(*(part[:1] for part in texts))
        read = Reading(reading.features[:1], reading.last_hidden[:1], reading.cache)
        branches = Rejected(*(part[:1] for part in rejected))
        num_memory, num_branch = read.features.shape[1], branches.is_rejected.numel()
        carries = ((anchors[0] >= 0) & branches.is_rejected[0].any(-1)).repeat_interleave(
            self.drafter.config.block_size
        )
        if not carries.any():
            return 0.0
        with attention_probabilities(self.drafter) as shown:
            self.draft(first, read, anchors[:1], branches, forward=forward)
        on_rejected = [layer[..., num_memory : num_memory + num_branch].sum(-1) for layer in shown]  # each [1, H, M B]
        return torch.stack(on_rejected)[..., carries].mean().item()

    def accepted_length(self, prompts: Sequence[list[int]], *, carry: bool, max_new_tokens: int) -> float:
        """Tokens a round of real rounds with all drafts after prompts, greedy."""
        system = System("", {"assistant_model": self.drafter}, self.drafter, carry=carry)
        decoding, tokens, rounds = decoding_options(0.0, max_new_tokens), 0, 0
        with switched(system):
            for prompt in prompts:
                ids = torch.tensor([prompt], device=self.target.device)
                self.target.generate(ids, attention_mask=torch.ones_like(ids), **decoding, **system.options)
                stats = self.drafter.last_stats
                tokens, rounds = tokens + stats.num_tokens, rounds + len(stats.rounds)
        return tokens / max(rounds, 1)

    def next_anchors(self, texts: Texts, anchors: Tensor, num_accepted: Tensor) -> Tensor:
        """Where the next round stands, ``a + m + 1``; none where no token follows it."""
        following = anchors + num_accepted + 1
        return following.where((anchors >= 0) & (following < texts.ends[:, None] - 1), NO_ANCHOR)


def recorded(texts: Texts, anchors: Tensor, count: int, *, first: int, missing: int = NO_ANCHOR) -> Tensor:
    """Recorded tokens ``first ..`` after each anchor, ``[N, M, count]``; ``missing`` past the end."""
    places = anchors.clamp(min=0)[..., None] + first + torch.arange(count, device=anchors.device)  # [N, M, count]
    exists = (places < texts.ends[:, None, None]) & (anchors[..., None] >= 0)
    flat = places.clamp(max=texts.input_ids.shape[1] - 1).flatten(1)
    return texts.input_ids.gather(1, flat).view(places.shape).where(exists, missing)
