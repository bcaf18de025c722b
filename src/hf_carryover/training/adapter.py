"""How is a drafter fitted to other texts in a few megabytes? A PEFT adapter that takes the carry embedding along."""

from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file

from hf_carryover.modeling_carryover import CarryoverDrafterModel

# Every matrix of the layers, and the projection of the target's features.
TARGET_MODULES = ["fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CARRY_EMBEDDING = "base_model.model.carry_embedding"


class DrafterAdapter(PeftModel):
    """A `peft.PeftModel` whose folder also holds the carry embedding, a vector that no PEFT method covers.

    Any `PeftModel.from_pretrained` loads it: what the adapter's file has beyond PEFT's own goes into the drafter.
    """

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in PEFT, and then with the carry embedding."""
        # The drafter has no embedding; asked to find out, PEFT looks for a base model on the Hub.
        super().save_pretrained(save_directory, *args, **({"save_embedding_layers": False} | kwargs))
        file = Path(save_directory) / SAFETENSORS_WEIGHTS_NAME
        tensors = load_file(file) | {CARRY_EMBEDDING: self.get_base_model().carry_embedding.detach().contiguous()}
        save_file(tensors, file, metadata={"format": "pt"})


def adapter_of(drafter: CarryoverDrafterModel, rank: int) -> DrafterAdapter:
    """A LoRA adapter (arXiv 2106.09685) of a rank on the drafter's matrices."""
    return DrafterAdapter(drafter, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGET_MODULES))
