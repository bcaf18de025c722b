"""What happens to a damaged or hostile folder? One clear error, no code run, nothing large allocated."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from hf_carryover import CarryoverDrafterModel, load_dflash, load_drafter
from tests.fakes import make_drafter, make_target, plain, prompt, write_zlab_folder

LOADERS = {
    "from_pretrained": CarryoverDrafterModel.from_pretrained,
    "load_drafter": load_drafter,
    "load_dflash": load_dflash,
}


def folder_of(loader, path, **overrides):
    """A sound folder, in the format that a loader reads."""
    drafter = make_drafter(**overrides)
    if loader == "load_dflash":
        write_zlab_folder(path, drafter)
    else:
        drafter.save_pretrained(path)
    return path


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


def refusal(loader, folder, *errors):
    """What a loader says of a folder, the notes on its error included."""
    with pytest.raises((ValueError, StrictDataclassError, *errors)) as caught:
        LOADERS[loader](folder)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 10**9}, "`block_size` must be at least 1, at most 4096, got 1000000000"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "`num_hidden_layers` must be at least 1, at most 256"),
        ({"hidden_size": 10**12}, "`hidden_size` must be at least 1, at most"),
        ({"vocab_size": 10**12}, "`vocab_size` must be at least 1, at most"),
        ({"num_attention_heads": 10**9}, "`num_attention_heads` must be at least 1, at most"),
        ({"head_dim": 7}, "`head_dim` must be even (its halves are rotated), got 7"),
        ({"rms_norm_eps": 0}, "`rms_norm_eps` must be above 0, got 0"),
        ({"rms_norm_eps": -1e-6}, "`rms_norm_eps` must be above 0, got -1e-06"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` must be above 0, got nan"),
        (
            {"rope_theta": -1.0, "rope_parameters": {"rope_theta": -1.0}},
            "`rope_theta` must be a number above 0, got -1",
        ),
        ({"block_size": "8"}, "Field 'block_size' expected int, got str"),
        ({"attention_sinks": True}, "got also ['attention_sinks']"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_absurd_setting_is_refused_by_name(loader, changes, message, tmp_path):
    """NVIDIA/TensorRT-LLM#18343: sizes that a file claims must not be allocated."""
    folder = folder_of(loader, tmp_path / "drafter")
    edit_config(folder, **changes)

    said = refusal(loader, folder)

    assert message in said
    assert str(folder) in said


@pytest.mark.parametrize("loader", ["load_drafter", "load_dflash"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "evil"}, "Expected `hidden_act` in {path} to be one of ["),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "evil"}},
            "Expected `rope_type` in {path} to be one of ['default', 'dynamic'",
        ),
        ({"dtype": "float99"}, "Expected `dtype` in {path} to be one of ['None', 'bfloat16'"),
        ({"dtype": "serialization"}, "Expected `dtype` in {path} to be one of"),
    ],
    ids=["activation", "rotation", "dtype", "an-attribute-of-torch"],
)
def test_an_unknown_name_is_refused_with_those_there_are(loader, changes, message, tmp_path):
    folder = folder_of(loader, tmp_path / "drafter")
    edit_config(folder, **changes)

    assert message.format(path=folder / "config.json") in refusal(loader, folder)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name(loader, value, tmp_path):
    folder = folder_of(loader, tmp_path / "drafter")
    edit_tensors(folder, lambda tensors: tensors["norm.weight"][3:4].fill_(value))

    said = refusal(loader, folder)

    assert "norm.weight" in said
    assert str(folder) in said


@pytest.mark.parametrize("loader", ["from_pretrained", "load_drafter"])
@pytest.mark.parametrize("ids", [[3, 2, 1], [1, 1, 2], [1, 2, 61], [-1, 2, 3]], ids=str)
def test_a_draft_vocabulary_of_no_increasing_token_ids_is_refused(loader, ids, tmp_path):
    """vllm-project/vllm#55294 and ggml-org/llama.cpp#28158: an id beyond the vocabulary must never be proposed."""
    folder = folder_of(loader, tmp_path / "drafter", draft_vocab_size=3)
    edit_tensors(folder, lambda tensors: tensors.update(draft_vocab_ids=torch.tensor(ids)))

    said = refusal(loader, folder)

    assert "draft_vocab_ids" in said
    assert str(folder) in said


@pytest.mark.parametrize("loader", ["load_drafter", "load_dflash"])
def test_integer_weights_are_refused_by_name(loader, tmp_path):
    """kekzl/imp#1428: a quantised head read as plain bytes loads, and no draft is ever accepted."""
    folder = folder_of(loader, tmp_path / "drafter")
    edit_tensors(folder, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].to(torch.int8)}))

    assert "Expected floating-point weights, found torch.int8 in `fc.weight`" in refusal(loader, folder)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", ["missing", "unknown", "misshapen"])
def test_tensors_that_do_not_fit_are_refused(loader, kind, tmp_path, caplog):
    """NVIDIA/Model-Optimizer#2149: tensors that are dropped or left over change the drafter in silence."""
    folder = folder_of(loader, tmp_path / "drafter")
    edits = {
        "missing": lambda tensors: tensors.pop("fc.weight"),
        "unknown": lambda tensors: tensors.update({"fc.weight_scale": torch.ones(1)}),
        "misshapen": lambda tensors: tensors.update({"fc.weight": torch.zeros(3, 3)}),
    }
    edit_tensors(folder, edits[kind])

    said = refusal(loader, folder, RuntimeError)

    assert str(folder) in said
    # Transformers names misshapen tensors in a report that it logs.
    assert "fc.weight" in said or (loader, kind) == ("from_pretrained", "misshapen")


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", ["truncated", "not-safetensors", "a-pickle-of-that-name"])
def test_broken_weights_are_refused(loader, kind, tmp_path):
    folder = folder_of(loader, tmp_path / "drafter")
    path = folder / "model.safetensors"
    whole, tensors = path.read_bytes(), {name: tensor.clone() for name, tensor in load_file(path).items()}
    if kind == "a-pickle-of-that-name":
        path.unlink()
        torch.save(tensors, path)
    else:
        path.write_bytes(whole[:-100] if kind == "truncated" else b"x" * 99)

    with pytest.raises(Exception, match="deserializing header") as caught:  # safetensors' own error has no base
        LOADERS[loader](folder)

    assert str(folder) in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


class Malice:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_pickle_is_refused_and_not_read(loader, tmp_path):
    folder = folder_of(loader, tmp_path / "drafter")
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Malice()}, folder / "pytorch_model.bin")

    with pytest.raises(OSError, match="safetensors"):
        LOADERS[loader](folder)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("text", [b"\xff{}", b"[]", b"{", b""], ids=["not-utf8", "a-list", "cut", "empty"])
def test_a_config_that_is_no_json_object_is_refused(loader, text, tmp_path):
    folder = folder_of(loader, tmp_path / "drafter")
    (folder / "config.json").write_bytes(text)

    said = refusal(loader, folder, OSError, TypeError)

    assert str(folder) in said


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("name", ["/no/such/folder", "./no_such_folder"])
def test_a_folder_that_does_not_exist_is_refused_by_name(loader, name):
    assert name in refusal(loader, name, OSError)


@pytest.mark.parametrize("loader", ["load_drafter", "load_dflash"])
def test_a_path_that_does_not_exist_says_so(loader, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Expected a drafter's folder or Hub id, found no .*absent; check"):
        LOADERS[loader](tmp_path / "absent")


@pytest.mark.parametrize("load", [*LOADERS.values(), AutoModel.from_pretrained], ids=[*LOADERS, "AutoModel"])
def test_no_code_of_a_checkpoint_runs_unless_it_is_trusted(load, tmp_path):
    """huggingface/transformers#46483: code beside the weights, and a `custom_generate`, stay files."""
    loader = "load_dflash" if load is load_dflash else "from_pretrained"
    folder = folder_of(loader, tmp_path / "drafter")
    edit_config(folder, auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"})
    (folder / "custom_generate").mkdir()
    for path in (folder / "evil.py", folder / "custom_generate" / "generate.py"):
        path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")

    drafter = load(folder)
    plain(make_target(), input_ids=prompt(), assistant_model=drafter)

    assert type(drafter) is CarryoverDrafterModel
    assert not (tmp_path / "ran").exists()
