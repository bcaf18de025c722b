"""What does a block cost? The losses that the settings ask for, summed over its slots."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_carryover.training import losses
from hf_carryover.training.arguments import CarryoverTrainingArguments
from hf_carryover.training.masks import Texts
from hf_carryover.training.rehearsal import Reading, Rehearsal, recorded


@dataclass(frozen=True)
class BlockLosses:
    """Compares drafted blocks with what stands there, and with what the target finds likely there."""

    rehearsal: Rehearsal
    args: CarryoverTrainingArguments

    def __call__(
        self, texts: Texts, reading: Reading, anchors: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of each block ``[N, M]``, logits ``[N, M, K, V]`` and labels ``[N, M, K]`` in the draft vocabulary."""
        args, num_drafts = self.args, hidden.shape[2]
        logits, confidences = self.rehearsal.teacher_forced(
            texts, anchors, hidden, confidence_detach=args.confidence_detach
        )
        labels = self._labels(recorded(texts, anchors, num_drafts, first=1, missing=losses.IGNORED))
        weights = losses.position_decay(num_drafts, args.gamma).to(logits)
        if args.slot_weights == "dpace":
            weights = losses.dpace_weights(logits, labels)
        parts = args.ce_weight * losses.cross_entropy(logits, labels)
        if args.l1_weight or args.kd_weight or args.confidence_weight:
            teacher = self._teacher(texts, reading, anchors, num_drafts)  # [N, M, K, V]
            l1 = losses.total_variation(logits, teacher)
            parts = parts + args.l1_weight * l1
            if args.kd_weight:
                parts = parts + args.kd_weight * losses.distillation(logits, teacher)
            if confidences is not None and args.confidence_weight:
                parts = parts + args.confidence_weight * losses.confidence(confidences, l1)
        known = recorded(texts, anchors, num_drafts, first=1) >= 0
        scale = losses.position_decay(num_drafts, args.gamma).sum() if args.slot_weights == "decay" else num_drafts
        return (parts * weights * known).sum(-1) / scale, logits, labels

    def _labels(self, tokens: Tensor) -> Tensor:
        """Tokens as indices into the draft vocabulary; those it lacks take no part."""
        drafter = self.rehearsal.drafter
        if drafter.config.draft_vocab_size is None:
            return tokens
        index = torch.full((drafter.config.vocab_size,), losses.IGNORED, device=tokens.device)
        index[drafter.draft_vocab_ids] = torch.arange(len(drafter.draft_vocab_ids), device=tokens.device)
        return index[tokens.clamp(min=0)].where(tokens >= 0, losses.IGNORED)

    @torch.no_grad()
    def _teacher(self, texts: Texts, reading: Reading, anchors: Tensor, num_drafts: int) -> Tensor:
        """The target's probabilities of the recorded tokens' places, ``[N, M, K, V]`` over the draft vocabulary."""
        rehearsal, config = self.rehearsal, self.rehearsal.drafter.config
        places = (anchors.clamp(min=0)[..., None] + torch.arange(num_drafts, device=anchors.device)).clamp(
            max=texts.input_ids.shape[1] - 1
        )
        rows, which = torch.unique(
            places + torch.arange(len(places), device=places.device)[:, None, None] * texts.input_ids.shape[1],
            return_inverse=True,
        )  # every place of a text goes through the head once
        hidden = reading.last_hidden.flatten(0, 1)[rows]
        whole = rehearsal.drafter.slot_logits(hidden, rehearsal.target.get_output_embeddings()).softmax(-1)
        if config.draft_vocab_size is not None:
            whole = whole[:, rehearsal.drafter.draft_vocab_ids]
        return whole[which]
