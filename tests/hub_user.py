"""Started by tests/test_hub.py in a process whose HF_ENDPOINT is a Hub on loopback; prints what happened as JSON."""

import contextlib
import io
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModel
from typer.testing import CliRunner

from hf_carryover import CarryoverDrafterModel, cli
from tests.fakes import make_drafter

RUN = CliRunner()


def sums(drafter) -> list[float]:
    return [tensor.double().sum().item() for tensor in drafter.state_dict().values()]


def command(*words: str) -> list:
    result = RUN.invoke(cli.app, [str(word) for word in words])
    return [result.exit_code, " ".join(str(result.exception or result.output).split())]


def online(folder: str) -> dict:
    drafter, said = make_drafter("markov-rnn"), {}
    drafter.save_pretrained(folder)
    for name in ("visits.jsonl", "train.log", "checkpoint-10/optimizer.pt"):
        path = Path(folder, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text("left by a training or an evaluation")
    said["push"] = command("push", folder, "owner/tiny")
    said["loaded"] = sums(AutoModel.from_pretrained("owner/tiny")) == sums(drafter)
    third = make_drafter("dflash", seed=7)
    third.push_to_hub("owner/by-method")
    said["by_method"] = sums(CarryoverDrafterModel.from_pretrained("owner/by-method")) == sums(third)
    second = make_drafter("markov-rnn", seed=5).to(torch.bfloat16)
    second.save_pretrained(f"{folder}-sharded", max_shard_size="20KB")
    said["push_again"] = command("push", f"{folder}-sharded", "owner/tiny")
    again = CarryoverDrafterModel.from_pretrained("owner/tiny", dtype="auto")
    said["sharded"] = sums(again) == sums(second)
    said["dtype"] = str(again.dtype)
    return said


def revision(sha: str) -> dict:
    first = CarryoverDrafterModel.from_pretrained("owner/tiny", revision=sha)
    return {"first": sums(first) == sums(make_drafter("markov-rnn"))}


def load(name: str) -> dict:
    try:
        return {"sums": sums(CarryoverDrafterModel.from_pretrained(name, dtype="auto"))}
    except OSError as error:
        return {"error": " ".join(str(error).split())}


def push(folder: str, *words: str) -> dict:
    if not Path(folder).exists():
        make_drafter().save_pretrained(folder)
    return {"push": command("push", folder, *words)}


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        found = {"online": online, "revision": revision, "load": load, "push": push}[sys.argv[1]](*sys.argv[2:])
    sys.stdout.write(json.dumps(found))
