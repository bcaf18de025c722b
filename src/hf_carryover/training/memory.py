"""How much memory will a training need?"""

from transformers import PreTrainedModel

from hf_carryover.modeling_carryover import CarryoverDrafterModel
from hf_carryover.training.arguments import CarryoverTrainingArguments
from hf_carryover.training.parts import sizes_of


def estimate_memory(
    drafter: CarryoverDrafterModel, target: PreTrainedModel, args: CarryoverTrainingArguments, length: int
) -> dict[str, int]:
    """Bytes that training needs, by part, for texts of ``length`` tokens; ``all`` is their sum.

    Rows times widths of what is alive at the end of the forward pass, where most is; logits count four times (head,
    softmax, their gradients), and with a teacher three times more, beside its own over the whole vocabulary.
    """
    config, theirs = drafter.config, sizes_of(target)
    width, inner = config.hidden_size, config.intermediate_size
    item, texts = target.dtype.itemsize, args.per_device_train_batch_size
    rows, blocks = texts * length, texts * args.num_anchors
    slots, carried = blocks * config.block_size, blocks * config.num_drafts * (args.stage == "carryover")
    kv = 2 * (theirs.get("num_key_value_heads") or theirs["num_attention_heads"])
    kv *= theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
    weights = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    moments = 2 if args.matrix_optimizer == "adamw" else 1
    drafted = blocks * config.num_drafts
    teaches = args.l1_weight or args.kd_weight or args.confidence_weight
    layer = 12 * width + 5 * inner + 6 * config.num_attention_heads * config.head_dim
    keys = length + (slots + carried) // texts
    parts = {
        "target's weights": target.num_parameters() * item,
        "drafter: weights, gradients, momentum": 4 * drafter.num_parameters() + 4 * (1 + moments) * weights,
        "target's pass: features and cache": (rows + carried) * (2 * config.feature_size + width) * item
        + (rows + carried) * theirs["num_hidden_layers"] * kv * item,
        "drafter's pass": 4 * config.num_hidden_layers * (slots * layer + 4 * (rows + carried) * kv)
        + 12 * (rows + carried) * width,
        "logits": 4 * (7 if teaches else 4) * drafted * (config.draft_vocab_size or config.vocab_size)
        + (4 * min(drafted, rows) * config.vocab_size if teaches else 0),
        "masks": 6 * slots * keys,
        "Python, PyTorch and texts": 600_000_000,
    }
    return parts | {"all": sum(parts.values())}
