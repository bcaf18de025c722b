"""How does a drafter learn? `transformers.Trainer` with the loss of rehearsed rounds."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl

from hf_carryover.modeling_carryover import CarryoverDrafterModel
from hf_carryover.training import losses
from hf_carryover.training.arguments import CarryoverTrainingArguments
from hf_carryover.training.blocks import BlockLosses
from hf_carryover.training.data import AnchoredTexts, Example, LikeLengths, collate
from hf_carryover.training.interruption import saving
from hf_carryover.training.masks import Rejected, Texts
from hf_carryover.training.optimizer import Muon
from hf_carryover.training.rehearsal import Reading, Rehearsal


class CarryoverTrainer(Trainer):
    """Trains a drafter on the target's own answers (arXiv 2609.14717), baseline, Carryover or control.

    Accumulation, processes, checkpoints, resume and logging are the library's. The target is frozen and runs
    inside the step. The log has, besides the loss: ``estimate`` (`losses.expected_length` of the trained blocks) and,
    where rows are carried, ``carry_gain`` (loss without them minus loss with them: positive is good),
    ``attention_mass`` on them, and ``carried_rows`` a block.

    Args:
        drafter: The drafter, or a PEFT adapter around one: then the adapter is trained, and the carry embedding.
        target: Its embedding and head serve the drafter. It is frozen, and stays so: in eval mode, without gradients.
        args: What and how.
        examples: Texts to train on.
        validation: Texts to validate with; None, with ``eval_strategy="no"``: no validation.
        callbacks: As in `Trainer`.
    """

    optimizer: torch.optim.Optimizer
    control: TrainerControl

    def __init__(
        self,
        drafter: CarryoverDrafterModel | PeftModel,
        target: PreTrainedModel,
        *,
        args: CarryoverTrainingArguments,
        examples: Sequence[Example],
        validation: Sequence[Example] | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        target.requires_grad_(False).eval()
        network = drafter.get_base_model() if isinstance(drafter, PeftModel) else drafter.requires_grad_(True)
        network.carry_embedding.requires_grad_(args.stage == "carryover")
        if network.confidence_head is not None and not isinstance(drafter, PeftModel):
            network.confidence_head.requires_grad_(args.confidence_weight > 0)
        self.examples, self.validation = examples, validation or []
        super().__init__(
            drafter,
            args,
            data_collator=collate,
            train_dataset=AnchoredTexts(examples, num_anchors=args.num_anchors, seed=args.seed),
            eval_dataset=None if not validation else AnchoredTexts(
                validation[: args.validation_texts], num_anchors=args.num_anchors, seed=args.seed
            ),
            callbacks=callbacks,
        )  # fmt: skip
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True
        self.rehearsal = Rehearsal(network, target.to(args.device))
        self.block_losses = BlockLosses(self.rehearsal, args)
        self._reading: tuple[Texts, Reading] | None = None
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._began, self._started = perf_counter(), 0.0

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Read, rehearse a round, draft, and compare; the loss is a sum over blocks divided by the anchors drawn.

        That number is known before anything is computed, so batches, accumulation and processes do not change the
        gradient; an anchor whose round leaves nothing to learn counts as a loss of zero.
        """
        texts, anchors = Texts(inputs["input_ids"], inputs["ends"]), inputs["anchors"]
        # 1. The target reads the texts, or has just read them.
        reading = self._read(texts)
        # 2. A first round: draft and verify; its rejected rows, and the anchors after it.
        carried = None
        if self.args.stage != "baseline":
            anchors, carried = self._first_round(texts, reading, anchors)
        # 3. The draft that learns.
        hidden = self.rehearsal.draft(texts, reading, anchors, carried, forward=model)  # [N, M, K, D]
        # 4. Compare with what stands there.
        count = num_items_in_batch if num_items_in_batch is not None else (inputs["anchors"] >= 0).sum()
        sums, logits, labels = self.block_losses(texts, reading, anchors, hidden)
        loss = sums.sum() / torch.as_tensor(count).clamp(min=1) * self.accelerator.num_processes
        if not loss.isfinite():
            raise ValueError(
                f"Expected a finite loss, got {loss.item()} at step {self.state.global_step} on the examples "
                f"{inputs['example'].tolist()}; lower the learning rate, or look at these texts. Nothing was saved "
                "since the last checkpoint."
            )
        self._note(texts, reading, anchors, carried, sums.detach(), logits.detach(), labels)
        return (loss, {}) if return_outputs else loss

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Batches of a step, and the anchors that all processes draw in it."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        count = torch.stack([(batch["anchors"] >= 0).sum() for batch in batches]).sum() if batches else torch.tensor(0)
        return batches, self.accelerator.gather(count.to(device)).sum()

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches of like length, each ``steps_per_reading`` times."""
        args = self.args
        sampler = LikeLengths(
            [example.length for example in self.examples],
            batch_size=args.per_device_train_batch_size,
            repeats=args.steps_per_reading,
            world=args.world_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            epoch=lambda: int(self.state.epoch or 0),
        )
        loader: DataLoader[Any] = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=collate)
        return self.accelerator.prepare(loader)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Muon for the layers' matrices, AdamW for vectors, embeddings and heads; the carry embedding by itself."""
        if self.optimizer is None:
            args, groups = self.args, defaultdict(list)
            for name, parameter in (model or self.model).named_parameters():
                if parameter.requires_grad:
                    is_matrix = parameter.ndim == 2 and "_head." not in name and "lora_" not in name
                    carry = name.endswith("carry_embedding")
                    groups["carry" if carry else "matrix" if is_matrix else "rest"].append(parameter)
            size = self._layer_rms().mean().item() if "carry" in groups else 1.0
            self.optimizer = Muon(
                [
                    {"params": parameters, "orthogonal": kind == "matrix" and args.matrix_optimizer == "muon",
                     "lr": args.carry_learning_rate * size if kind == "carry" else args.learning_rate,
                     "weight_decay": args.weight_decay if kind == "matrix" else 0.0}
                    for kind, parameters in groups.items()
                ],
                lr=args.learning_rate,
            )  # fmt: skip
        return self.optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`; a carry embedding of zero first gets its size, and a control's becomes zero."""
        drafter, self._began = self.rehearsal.drafter, perf_counter()
        if self.args.stage == "control":
            drafter.carry_embedding.data.zero_()  # it learns to do without rows, so it is not to be shown any
        if self.args.stage == "carryover" and not drafter.carry_embedding.any():
            generator = torch.Generator().manual_seed(self.args.seed)
            noise = torch.randn(drafter.carry_embedding.shape, generator=generator).to(drafter.carry_embedding)
            with torch.no_grad():
                drafter.carry_embedding.copy_(self.args.carry_scale * self._layer_rms() * noise)
        return super().train(*args, **kwargs)

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Loss and estimate on the validation texts, and the accepted length of real rounds on their prompts."""
        drafter = self.rehearsal.drafter
        was_training = drafter.training
        drafter.eval()
        self._seen, kept = defaultdict(list), self._seen
        size, held = self.args.per_device_train_batch_size, self.eval_dataset
        with torch.no_grad():
            for start in range(0, len(held), size):
                batch = collate([held[i] for i in range(start, min(start + size, len(held)))])
                self.compute_loss(self.model, self._prepare_inputs(batch))
        metrics = {f"{metric_key_prefix}_{name}": fmean(found) for name, found in self._seen.items()}
        self._seen = kept
        metrics[f"{metric_key_prefix}_accepted_length"] = self._accepted_length(carry=False)
        if self.args.stage == "carryover":
            metrics[f"{metric_key_prefix}_accepted_length_carry"] = self._accepted_length(carry=True)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        drafter.train(was_training)
        return metrics

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with saving(Path(self.args.output_dir)):
            super()._save_checkpoint(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The library's line, with means over the steps since the last one, and the seconds of all calls."""
        if not self._started:
            self._started = self._began - max((line.get("seconds", 0.0) for line in self.state.log_history), default=0)
        logs["seconds"] = round(perf_counter() - self._started, 1)
        if "loss" in logs:
            logs |= {name: round(fmean(found), 5) for name, found in self._seen.items() if name != "loss"}
            self._seen.clear()
        super().log(logs, start_time)

    def _read(self, texts: Texts) -> Reading:
        before = self._reading
        if before is None or not all(torch.equal(old, new) for old, new in zip(before[0], texts, strict=True)):
            before = self._reading = texts, self.rehearsal.read(texts)
        return before[1]

    @torch.no_grad()
    def _first_round(self, texts: Texts, reading: Reading, anchors: Tensor) -> tuple[Tensor, Rejected | None]:
        """The anchors after a round, and its rejected rows, for which the control needs no pass of the target."""
        rehearsal, carries = self.rehearsal, self.args.stage == "carryover"
        if self.state.global_step < self.args.curriculum_steps and rehearsal.drafter.training:
            return anchors, rehearsal.own_rows(reading, anchors) if carries else None
        drafts = rehearsal.propose(texts, anchors, rehearsal.draft(texts, reading, anchors, forward=self.model))
        num_accepted = rehearsal.accept(texts, anchors, drafts)
        rejected = rehearsal.verify(texts, reading, anchors, drafts, num_accepted) if carries else None
        return rehearsal.next_anchors(texts, anchors, num_accepted), rejected

    @torch.no_grad()
    def _note(
        self, texts: Texts, reading: Reading, anchors: Tensor, carried: Rejected | None, sums: Tensor, logits: Tensor,
        labels: Tensor,
    ) -> None:  # fmt: skip
        """Keep what the log shows; what costs another pass only in steps that are logged."""
        blocks = anchors >= 0
        lengths = losses.expected_length(logits, labels)[blocks]
        self._seen["estimate"].append(lengths.mean().item() if len(lengths) else 1.0)
        self._seen["loss"].append((sums[blocks].mean() if blocks.any() else sums.sum()).item())
        if carried is None:
            return
        carrying = blocks & carried.is_rejected.any(-1)
        self._seen["carried_rows"].append(carried.is_rejected.sum(-1)[blocks].float().mean().item())
        step = self.state.global_step + 1
        is_logged = step % max(1, int(self.args.logging_steps)) == 0 or (step == 1 and self.args.logging_first_step)
        if carrying.any() and (is_logged or not self.rehearsal.drafter.training):
            without = self.rehearsal.draft(texts, reading, anchors, forward=self.model)
            bare = self.block_losses(texts, reading, anchors, without)[0]
            self._seen["carry_gain"].append((bare - sums)[carrying].mean().item())
            mass = self.rehearsal.attention_mass(texts, reading, anchors, carried, forward=self.model)
            self._seen["attention_mass"].append(mass)

    def _accepted_length(self, *, carry: bool) -> float:
        prompts = [text.prompt_ids for text in self.validation[: self.args.validation_prompts]]
        return self.rehearsal.accepted_length(prompts, carry=carry, max_new_tokens=self.args.validation_tokens)

    @torch.no_grad()
    def _layer_rms(self) -> Tensor:
        """`Rehearsal.layer_rms` of a few texts, ``[F]``."""
        items = collate([self.train_dataset[i] for i in range(min(4, len(self.train_dataset)))])
        return self.rehearsal.layer_rms(Texts(*(items[name].to(self.args.device) for name in ("input_ids", "ends"))))
