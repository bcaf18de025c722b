"""How is a drafter trained? Everything that can be set, each once, with its help."""

import os
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import IntervalStrategy, SchedulerType, TrainingArguments

from hf_carryover.targets import default_dtype

STAGES = ("baseline", "carryover", "control")
# Settings of the library that are refused, because our trainer does not read them or they would do harm, and why.
OPTIMIZER, LOADER = "`matrix_optimizer` says which optimizer there is", "texts are drawn in the training process"
BY_LENGTH = "texts of like length are drawn together"
UNUSED = {
    **dict.fromkeys(
        ("optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon"), OPTIMIZER
    ),
    **dict.fromkeys(
        (
            "dataloader_num_workers",
            "dataloader_drop_last",
            "dataloader_prefetch_factor",
            "dataloader_persistent_workers",
        ),
        LOADER,
    ),
    "train_sampling_strategy": BY_LENGTH,
    "eval_accumulation_steps": "validation keeps no logits",
    "save_only_model": "a training without its optimizer does not go on as it began",
    "push_to_hub": "share the finished folder with `hf-carryover push`, which takes the record and the card along",
    "deepspeed": "the loss reads heads and carry embedding outside the drafter's forward pass; use several processes",
    "auto_find_batch_size": "choose `per_device_train_batch_size`; the memory that is needed is printed at the start",
    "per_device_eval_batch_size": "texts are validated in batches of `per_device_train_batch_size`",
    "label_smoothing_factor": "the losses have no smoothing",
    "resume_from_checkpoint": "a training in the same `output_dir` goes on by itself",
}


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class CarryoverTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` with the settings of drafting; its defaults suit two CPU cores.

    Raises:
        ValueError: A setting is out of its range; the message names it.
    """

    stage: str = _setting(
        "baseline", "baseline; carryover (draft, verify, draft); or control: the same, not carrying."
    )
    num_anchors: int = _setting(64, "Blocks drafted in a text, at most one for each token of its answer.")
    steps_per_reading: int = _setting(2, "Batches, each with fresh anchors, on one pass of the target.")
    ce_weight: float = _setting(1.0, "Weight of cross-entropy on the recorded tokens.")
    l1_weight: float = _setting(0.0, "Weight of the L1 distance to the target's probabilities (DSpark: 0.9, CE 0.1).")
    kd_weight: float = _setting(0.0, "Weight of distillation from the target's probabilities.")
    confidence_weight: float = _setting(0.0, "Weight of the confidence head's loss.")
    confidence_detach: bool = _setting(True, "Keep the confidence head's gradient out of the layers below it.")
    slot_weights: str = _setting("decay", "decay: exp(-(k - 1) / gamma); dpace: what a slot is worth to acceptance.")
    gamma: float = _setting(4.0, "Slots over which the weight falls to 1/e.")
    matrix_optimizer: str = _setting("muon", "muon for matrices (AdamW for the rest), or adamw for all.")
    carry_scale: float = _setting(0.3, "First size of the carry embedding, in units of each target layer's rms.")
    carry_learning_rate: float = _setting(0.003, "The carry embedding's learning rate, in the same units.")
    curriculum_steps: int = _setting(
        0, "First steps in which a block carries its anchor's own row, to learn what rows say about the next token."
    )
    validation_every: int = _setting(50, "Of so many texts, one is kept out of training, to validate with.")
    validation_texts: int = _setting(32, "Texts that the validation loss is taken on.")
    validation_prompts: int = _setting(4, "Prompts that validation generates on, by real rounds.")
    validation_tokens: int = _setting(48, "New tokens on each of them.")

    # The library's own settings, with defaults that fit.
    bf16: bool | None = field(
        default=None,
        metadata={
            "help": "Compute in bf16; by itself where the hardware multiplies in it.", "nargs": "?", "const": True
        },
    )  # fmt: skip
    per_device_train_batch_size: int = _setting(8, "Texts a step and process.")
    learning_rate: float = _setting(3e-3, "Peak learning rate.")
    lr_scheduler_type: SchedulerType | str = field(
        default="cosine", metadata={"help": "Schedule of the learning rate."}
    )
    warmup_steps: float = _setting(0.04, "Steps of warm-up, or, below 1, their share.")
    max_steps: int = _setting(600, "Optimizer steps.")
    logging_steps: float = _setting(10, "Steps between two lines of the log.")
    logging_first_step: bool = _setting(True, "Log the first step, too.")
    save_steps: float = _setting(100, "Steps between two checkpoints.")
    save_total_limit: int | None = _setting(2, "Checkpoints that are kept.")
    eval_strategy: IntervalStrategy | str = field(default="steps", metadata={"help": "When to validate."})
    eval_steps: float | None = _setting(100, "Steps between two validations.")
    # The heads and the carry embedding take part outside the wrapped forward; DDP would count them as unused.
    ddp_find_unused_parameters: bool | None = _setting(False, "Leave this off: every trained parameter is used.")
    remove_unused_columns: bool = _setting(False, "Leave this off: the loss reads every column.")

    def __post_init__(self) -> None:
        self._refuse_unused()
        self._choose_dtype()
        super().__post_init__()
        choices: tuple[tuple[str, tuple[str, ...]], ...] = (
            ("stage", STAGES),
            ("slot_weights", ("decay", "dpace")),
            ("matrix_optimizer", ("muon", "adamw")),
        )
        for name, known in choices:
            if vars(self)[name] not in known:
                raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {vars(self)[name]!r}.")
        for name in ("num_anchors", "steps_per_reading", "validation_prompts", "validation_tokens"):
            if vars(self)[name] < 1:
                raise ValueError(f"`{name}` must be at least 1, got {vars(self)[name]}.")
        weights = (self.ce_weight, self.l1_weight, self.kd_weight, self.confidence_weight)
        if min(weights) < 0 or max(weights[:3]) == 0:
            raise ValueError(f"Loss weights must not be negative, and one of CE, L1 and KD positive, got {weights}.")
        for is_wrong, sentence in (
            (self.fp16 and self.use_cpu, "`fp16` must be left out on a processor; it computes in bf16 or fp32."),
            (self.max_steps > 0 and self.num_train_epochs != 3.0,
             f"`num_train_epochs` needs `max_steps` -1, got {self.max_steps}, which would win."),
            (self.n_gpu > 1, "Several GPUs need a process each; start it with `torchrun --nproc_per_node N`."),
            (self.validation_every < 2, f"`validation_every` must be at least 2, got {self.validation_every}."),
            (not self.gamma > 0, f"`gamma` must be positive, got {self.gamma}."),
            (self.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true",
             "`fsdp` must be left out: the loss reads heads and carry embedding outside the drafter's forward pass, "
             "where FSDP has them in shards. A drafter is small; use several processes."),
        ):  # fmt: skip
            if is_wrong:
                raise ValueError(sentence)

    def _refuse_unused(self) -> None:
        for setting in fields(self):
            if setting.name in UNUSED and (found := vars(self)[setting.name]) != setting.default:
                raise ValueError(f"`{setting.name}` must be left out, got {found!r}: {UNUSED[setting.name]}.")

    def _choose_dtype(self) -> None:
        if not torch.accelerator.is_available():
            self.use_cpu = True  # else the library refuses bf16 there
        if self.bf16 is None:
            device = None if self.use_cpu else torch.accelerator.current_accelerator()
            self.bf16 = not self.fp16 and default_dtype(device or torch.device("cpu")) == torch.bfloat16
