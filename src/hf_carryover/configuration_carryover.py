"""What is a drafter? Its configuration: every fact that a checkpoint must carry, checked and closed."""

from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Keys that Transformers writes into a config.json, or passes on its own account, without declaring them as fields.
TRANSFORMERS_KEYS = {"_name_or_path", "_commit_hash", "attn_implementation", "auto_map", "model_type", "name_or_path",
                     "num_labels", "output_attentions", "per_layer_config", "quantization_config", "rope_scaling",
                     "rope_theta", "torch_dtype", "use_cache"}  # fmt: skip
# The most that a drafter can have; a file that says more is damaged or hostile, and refused before it takes memory.
MOST = {"block_size": 2**12, "vocab_size": 2**24, "hidden_size": 2**18, "intermediate_size": 2**20, "head_dim": 2**12,
        "num_hidden_layers": 2**8, "num_attention_heads": 2**12, "num_key_value_heads": 2**12}  # fmt: skip


@strict
class CarryoverDrafterConfig(PreTrainedConfig):
    """Everything that defines a drafter. Fields without a default are facts of training and are never guessed.

    Args:
        block_size: Slots of a block, B: the anchor and the mask tokens after it.
        mask_token_id: Token whose embedding fills the slots after the anchor.
        target_layer_ids: Target layers whose outputs are the features, increasing; ``i`` is ``hidden_states[i + 1]``,
            -1 the embedding output. The target's last layer is not allowed: its output is already normalised.
        sample_from_anchor: Whether the anchor's slot predicts the first draft (K = B) or the first mask's (K = B - 1).
        vocab_size: Rows of the target's vocabulary, V; embedding and output head are the target's and not stored.
        hidden_size: Width of target and drafter, D.
        rope_parameters: Rotary settings in Transformers' form, for example ``{"rope_theta": 1e6}``.
        layer_types: ``full_attention`` (default) or ``sliding_attention``, which sees ``sliding_window`` rows.
        is_causal: Whether slots see only the slots before them; None: in sliding layers only, as DFlash does.
        num_target_layers: Layers of the target, where known; checked against the target at hand.
        input_embedding_scale: Factor on the raw rows of the target's embedding; None: ask the embedding module itself.
        output_multiplier: Factor on the output head's logits, which then pass through ``c tanh(logits / c)`` if
            ``final_logit_softcapping`` c is set.
        markov_head_type: ``vanilla``, ``gated`` or ``rnn`` (DSpark, arXiv 2607.05147); None: slots are independent.
            ``markov_rank`` is its rank, 0 without one.
        enable_confidence_head: Whether a head estimates how likely each draft is to be accepted; it may also read the
            Markov embedding of the token before (``confidence_head_with_markov``).
        draft_vocab_size: Number of tokens that may be proposed; None: all of them.

    Raises:
        TypeError, ValueError, StrictDataclassError: A field is missing, unknown, or wrong; the message names it.
    """

    model_type = "carryover_drafter"

    block_size: int
    mask_token_id: int
    target_layer_ids: list[int]
    sample_from_anchor: bool
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_parameters: dict[str, Any] | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float | int = 1e-6
    max_position_embeddings: int = 32768
    initializer_range: float | int = 0.02
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    num_target_layers: int | None = None
    input_embedding_scale: float | int | None = None
    output_multiplier: float | int = 1.0
    final_logit_softcapping: float | int | None = None
    markov_head_type: str | None = None
    markov_rank: int = 0
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    draft_vocab_size: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if unknown := sorted(kwargs.keys() - TRANSFORMERS_KEYS):
            known = [match for name in unknown for match in get_close_matches(name, self.__dataclass_fields__, n=1)]
            hint = f"did you mean {known}?" if known else "remove them."
            raise ValueError(f"Expected only fields of {type(self).__name__}, got also {unknown}; {hint}")
        if not (self.rope_parameters or {}).get("rope_theta") and not kwargs.get("rope_theta"):
            raise TypeError("Missing required field - 'rope_parameters', for example {'rope_theta': 10000.0}.")
        num_layers = min(self.num_hidden_layers, MOST["num_hidden_layers"])
        self.layer_types = self.layer_types or ["full_attention"] * num_layers
        super().__post_init__(**kwargs)
        eos = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        if self.mask_token_id in (self.bos_token_id, self.pad_token_id, *eos):
            logger.warning(f"`mask_token_id` {self.mask_token_id} is also bos, eos or pad: slots look like text.")

    @property
    def num_drafts(self) -> int:
        """Drafts of a full block, K."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def feature_size(self) -> int:
        """Width of a row's features, F."""
        return len(self.target_layer_ids) * self.hidden_size

    def validate_fields(self) -> None:
        """Check what types cannot say; each line is what must hold, what is expected, and what was found."""
        ids, heads, kv = self.target_layer_ids, self.num_attention_heads, self.num_key_value_heads
        layers, vocab, mask, slots = self.layer_types or [], self.vocab_size, self.mask_token_id, self.block_size
        head, rank, subset = self.markov_head_type, self.markov_rank, self.draft_vocab_size
        fewest = "1 (the anchor drafts)" if self.sample_from_anchor else "2 (one anchor, one draft)"
        below = float("inf") if self.num_target_layers is None else self.num_target_layers - 1
        rope, reads = self.rope_parameters or {}, self.confidence_head_with_markov
        theta, factor = rope.get("rope_theta"), rope.get("partial_rotary_factor", 1.0)
        rules: list[tuple[bool, str, object]] = [
            (heads % max(kv, 1) == 0, f"`num_attention_heads` must be a multiple of {kv} key/value heads", heads),
            (self.num_drafts >= 1, f"`block_size` must be at least {fewest}", slots),
            *((1 <= vars(self)[name] <= most, f"`{name}` must be at least 1, at most {most}", vars(self)[name])
              for name, most in MOST.items()),
            (self.head_dim % 2 == 0, "`head_dim` must be even (its halves are rotated)", self.head_dim),
            (0 <= mask < vocab, f"`mask_token_id` must be in 0..{vocab - 1}", mask),
            (subset is None or 1 <= subset <= vocab, f"`draft_vocab_size` must be in 1..{vocab}", subset),
            (self.rms_norm_eps > 0, "`rms_norm_eps` must be above 0", self.rms_norm_eps),
            (isinstance(theta, float | int) and theta > 0, "`rope_theta` must be a number above 0", theta),
            (bool(ids) and ids[0] >= -1 and all(a < b for a, b in pairwise(ids)),
             "`target_layer_ids` must be increasing layer ids from -1 on, at least one", ids),
            (max(ids, default=-1) < below,
             f"`target_layer_ids` must be below the target's last layer (its output is normalised), {below}", ids),
            (len(layers) == self.num_hidden_layers and set(layers) <= {"full_attention", "sliding_attention"},
             f"`layer_types` must name full_attention or sliding_attention {self.num_hidden_layers} times", layers),
            ("sliding_attention" not in layers or (self.sliding_window or 0) >= 1,
             "`sliding_window` must be at least 1 with sliding layers", self.sliding_window),
            (factor == 1.0, "`partial_rotary_factor` must be 1.0 (whole heads are rotated)", factor),
            (head in (None, "vanilla", "gated", "rnn"), "`markov_head_type` must be None, vanilla, gated, rnn", head),
            (bool(head) <= rank <= bool(head) * MOST["hidden_size"],
             "`markov_rank` must be positive with a Markov head, 0 without", rank),
            (not reads or bool(self.enable_confidence_head and head),
             "`confidence_head_with_markov` must come with a confidence head and a Markov head", reads),
        ]  # fmt: skip
        for holds, expected, found in rules:
            if not holds:
                raise ValueError(f"{expected}, got {found!r}.")


AutoConfig.register(CarryoverDrafterConfig.model_type, CarryoverDrafterConfig, exist_ok=True)
