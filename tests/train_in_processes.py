"""Started by a test under `torch.distributed.run`: one step on eight texts, shared by the processes there are."""

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed

from tests.fakes import make_drafter, make_target
from tests.test_training_trainer import answered, trainer_of

if __name__ == "__main__":
    torch.set_num_threads(1)
    out, count = Path(sys.argv[1]), int(sys.argv[2])
    target, drafter = make_target(), make_drafter("markov-rnn")
    examples = answered(target, count=8)
    trainer = trainer_of(
        drafter, target, examples, Path(tempfile.mkdtemp()), stage="carryover", max_steps=1, steps_per_reading=1,
        per_device_train_batch_size=8 // count, matrix_optimizer="adamw", lr_scheduler_type="constant",
        warmup_steps=0, max_grad_norm=0.0, ddp_backend="gloo",
    )  # fmt: skip
    kept = {}

    def keep(args, state, control, **kwargs):
        kept.update(
            {name: p.grad.double().sum().item() for name, p in drafter.named_parameters() if p.grad is not None}
        )

    trainer.callback_handler.callbacks[0].on_pre_optimizer_step = keep
    trainer.train()
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        out.write_text(json.dumps({"loss": trainer.state.log_history[0]["loss"], "sums": kept}))
    if distributed.is_initialized():  # one that ends first can abort the other
        distributed.barrier()
        distributed.destroy_process_group()
