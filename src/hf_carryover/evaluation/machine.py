"""On what was it measured, and with what? Facts that a number is worth nothing without."""

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Who saved a model, which says nothing about it.
SAVED_WITH = ("architectures", "transformers_version")
# What a folder may lack, and then has from the target that it is loaded with.
LENT = ("bos_token_id", "eos_token_id", "pad_token_id")
PACKAGES = ("hf-carryover", "torch", "transformers")
# Settings from outside that change how long products (README, "When it pays") and new memory take.
ENVIRONMENT = ("MKL_CBWR", "LD_PRELOAD")


def describe_call() -> dict[str, Any]:
    """Command line and date."""
    return {"command": shlex.join(sys.argv), "date": datetime.now(UTC).isoformat(timespec="seconds")}


def describe_machine(target: PreTrainedModel) -> dict[str, Any]:
    """Versions, commit, processor, threads, settings, and the number type and attention the target computes with."""
    return {
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES},
        "commit": _commit(),
        "source_sha256": _source(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": target.config._attn_implementation,
    }


def describe_model(model: PreTrainedModel) -> dict[str, Any]:
    """Name, number type, size, and a fingerprint of configuration and weights, which a name does not pin down."""
    return {
        "name": model.config.name_or_path,
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": model.num_parameters(),
        "fingerprint": fingerprint(model),
    }


def fingerprint(model: PreTrainedModel, *, without: Sequence[str] = (*SAVED_WITH, *LENT)) -> str:
    """A hash of weights and configuration, ``without`` some of its fields."""
    config = json.loads(model.config.to_json_string())
    facts = {name: value for name, value in config.items() if name not in without}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in model.state_dict().items():
        # Whole numbers: a sum of floats depends on how memory is aligned and how many threads add.
        digest.update(
            f"{name} {tensor.contiguous().view(BITS[tensor.itemsize]).sum(dtype=torch.int64).item()}".encode()
        )
    return digest.hexdigest()[:16]


def _commit() -> str | None:
    """The commit that this package is run from, with a mark if files differ from it; None if git does not track it."""
    if shutil.which("git") is None or not _git("ls-files", __file__):
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _source() -> str:
    """A hash of this package's own code, which neither a version nor a commit pins down."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _processor() -> str:
    """The processor's own name, where the system tells it; else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
