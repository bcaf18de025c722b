"""How does a training stop and go on? Ctrl-C saves, and only whole checkpoints count."""

import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from safetensors import SafetensorError
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COMPLETE = "complete"  # the name of a checkpoint's mark


def last_checkpoint(out: Path) -> str | None:
    """The newest checkpoint that was written to its end."""
    whole = [path.parent for path in out.glob(f"checkpoint-*/{COMPLETE}")]
    return str(max(whole, key=lambda path: steps_made(str(path)))) if whole else None


def steps_made(checkpoint: str | None) -> int:
    """Steps after which a checkpoint was written; none without one."""
    return 0 if checkpoint is None else int(checkpoint.rpartition("-")[2])


@contextmanager
def saving(out: Path) -> Iterator[None]:
    """A write for which there is no room becomes an OSError that says what to do; safetensors and torch differ there.

    Raises:
        OSError: The disk is full.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        has_room = isinstance(error, OSError) and error.errno not in FULL
        if has_room or (isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error)):
            raise
        kept = last_checkpoint(out) or "the start, for none is whole"
        raise OSError(f"Expected room to save in {out}, got: {error}. Make room and run the same command again; it "
                      f"goes on from {kept}.") from error  # fmt: skip


class MarkComplete(TrainerCallback):
    """Marks a checkpoint once it is whole, so that one cut short by a full disk is never resumed from."""

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any  # noqa: ARG002
    ) -> None:  # fmt: skip
        """Called when this process has written its part."""
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE).touch()


class Interruption(TrainerCallback):
    """Within its context, Ctrl-C ends training after the current step, with a checkpoint."""

    def __init__(self) -> None:
        self.asked = self.happened = False

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, *_: object) -> None:
        self.asked = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any  # noqa: ARG002
    ) -> None:  # fmt: skip
        """Save and stop, all processes after the same step."""
        if any(gather_object([self.asked])) and not control.should_training_stop:
            self.happened = True
            control.should_save = control.should_training_stop = True
