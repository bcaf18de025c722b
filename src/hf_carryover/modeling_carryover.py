"""What does the drafter compute? Slots that read memory and each other, and heads that turn them into logits."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from .configuration_carryover import CarryoverDrafterConfig

# What a drafter folder needs to work without this package, in reading order.
CORE_FILES = ("configuration_carryover.py", "acceptance.py", "cache_carryover.py", "modeling_carryover.py",
              "round_seconds.py", "draft_length.py", "drafting.py", "stopping.py", "decoding.py")  # fmt: skip
AUTO_MAP = {"AutoConfig": "configuration_carryover.CarryoverDrafterConfig",
            "AutoModel": "modeling_carryover.CarryoverDrafterModel"}  # fmt: skip


def block_visibility(num_keys: int, num_slots: int, num_carried: int, window: int | None, causal: bool) -> Tensor:
    """Which keys (memory, carried, block) the slots see in a sliding or causal layer, ``[1, 1, B, num_keys]``.

    A slot sees keys less than ``window`` rows away, carried rows always and, if ``causal``, no slot after itself.
    """
    num_memory = num_keys - num_carried - num_slots
    slots = num_memory + torch.arange(num_slots)
    keys = torch.cat([torch.arange(num_memory + num_carried), slots])  # [num_keys]
    distance = slots[:, None] - keys  # [B, num_keys]
    visible = distance.abs() < (window or num_keys)
    if causal:
        visible &= distance >= 0
    visible[:, num_memory : num_memory + num_carried] = True
    return visible[None, None]


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of states ``[1, H, rows, head_dim]`` by angles ``[1, rows, head_dim]``."""
    return states * cos[:, None] + qwen3.rotate_half(states) * sin[:, None]


class CarryoverAttention(qwen3.Qwen3Attention):
    """Attention of the block to memory and itself, both through the layer's own key and value projections."""

    def __init__(self, config: CarryoverDrafterConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.is_causal = False  # for the attention functions: what a slot may see stands in the mask alone
        self.block_is_causal = self.sliding_window is not None if config.is_causal is None else config.is_causal

    def forward(
        self, block: Tensor, memory: Tensor, angles: tuple[Tensor, Tensor], attention_mask: Tensor | None,
        cache: Cache | None, num_carried: int,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Slots ``[1, B, D]`` and new memory ``[1, S, D]`` in; slots and, if eager, attention probabilities out."""
        num_slots = block.shape[1]
        rows = torch.cat([memory, block], dim=1)  # [1, S + B, D]
        cos, sin = angles
        queries = self.q_norm(self._heads(self.q_proj(block)))  # [1, H, B, head_dim]
        queries = rotate(queries, cos[:, -num_slots:], sin[:, -num_slots:])
        keys = rotate(self.k_norm(self._heads(self.k_proj(rows))), cos, sin)  # [1, H_kv, S + B, head_dim]
        values = self._heads(self.v_proj(rows))  # [1, H_kv, S + B, head_dim]
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)  # [1, H_kv, keys, head_dim]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, qwen3.eager_attention_forward)
        mask = self._mask(attention_mask, keys, num_slots, num_carried)
        dropout = self.attention_dropout if self.training else 0.0
        output, probabilities = attend(self, queries, keys, values, mask, dropout=dropout, scaling=self.scaling)
        return self.o_proj(output.reshape(*block.shape[:2], -1)), probabilities

    def _heads(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:2], -1, self.head_dim).transpose(1, 2)

    def _mask(self, attention_mask: Tensor | None, keys: Tensor, num_slots: int, num_carried: int) -> Tensor | None:
        """Additive mask ``[1, 1, B, keys]``, the form that every attention function takes; None: all is visible."""
        num_keys, visible = keys.shape[2], attention_mask
        if visible is None or visible.dim() == 2:
            visible = None if visible is None else visible[:, None, None, -num_keys:].bool()
            if self.sliding_window is not None or self.block_is_causal:
                near = block_visibility(num_keys, num_slots, num_carried, self.sliding_window, self.block_is_causal)
                visible = near.to(keys.device) if visible is None else near.to(keys.device) & visible
        if visible is None:
            return None
        mask = torch.zeros_like(visible, dtype=keys.dtype).masked_fill(~visible, torch.finfo(keys.dtype).min)
        return mask.expand(-1, -1, num_slots, -1)


class CarryoverLayer(qwen3.Qwen3DecoderLayer):
    """One drafter layer: norm, attention, norm, SwiGLU, each pair inside a residual."""

    def __init__(self, config: CarryoverDrafterConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = CarryoverAttention(config, layer_idx)

    def forward(self, block: Tensor, memory: Tensor, **kwargs: Any) -> Tensor:
        """Slots ``[1, B, D]`` in, slots out; ``kwargs`` are those of `CarryoverAttention.forward`."""
        block = block + self.self_attn(self.input_layernorm(block), memory, **kwargs)[0]
        return block + self.mlp(self.post_attention_layernorm(block))


class MarkovHead(nn.Module):
    """Bias on a draft's logits from the token before it: ``W2 e`` with ``e = W1[x]`` (DSpark, arXiv 2607.05147)."""

    def __init__(self, config: CarryoverDrafterConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size or config.vocab_size, bias=False)

    def forward(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Bias ``[1, V]`` and next state from the token before ``[1]``, slot ``[1, D]`` and state (at first None)."""
        mixed, state = self.mix(self.markov_w1(previous), hidden, state)
        return self.markov_w2(mixed), state

    def mix(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:  # noqa: ARG002
        """What ``W2`` reads, ``[1, r]``, and the next state, from ``e`` ``[1, r]`` and the slot ``[1, D]``."""
        return embedding, state


class GatedMarkovHead(MarkovHead):
    """``W2 (sigmoid(G[h; e]) * e)``."""

    def __init__(self, config: CarryoverDrafterConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def mix(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The embedding, gated by the slot."""
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1))) * embedding, state


class RecurrentMarkovHead(MarkovHead):
    """``W2 tanh(o)`` with ``[g, c, o] = J[s; e; h]`` and the next state ``s' = sig(g) s + (1 - sig(g)) tanh(c)``."""

    def __init__(self, config: CarryoverDrafterConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def mix(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One step of the recurrence; its state starts at zero."""
        state = torch.zeros_like(embedding) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}


class CarryoverDrafterModel(PreTrainedModel):
    """A DFlash or DSpark-derived drafter that can read the target's rejected rows (arXiv 2609.14717).

    Embedding and output head are the target's own and not stored. Pass the drafter as ``assistant_model`` to the
    target's ``generate``; the constructor installs the seam that makes this work.

    Attributes:
        draft_length: Most drafts a round hands over; None: all; ``"auto"`` (the default): as many as pay.
        timings: For ``"auto"``, seconds of a round by drafts handed over, so that choices do not depend on a clock.
        acceptance_prior: For ``"auto"``, the acceptance of each draft to start from, ``[K]``; None: one half.
        last_stats: `DraftStats` of the last ``generate`` call; None before it.
    """

    config_class = CarryoverDrafterConfig
    config: CarryoverDrafterConfig
    main_input_name = "noise_embeds"
    _no_split_modules = ["CarryoverLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True
    draft_vocab_ids: Tensor
    draft_length: int | str | None = "auto"

    def __init__(self, config: CarryoverDrafterConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = qwen3.Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.carry_embedding = nn.Parameter(torch.zeros(config.feature_size))
        self.layers = nn.ModuleList(CarryoverLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = qwen3.Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = qwen3.Qwen3RotaryEmbedding(config)
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.markov_head_type else None
        width = config.hidden_size + config.markov_rank * config.confidence_head_with_markov
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)}) if config.enable_confidence_head else None
        if config.draft_vocab_size is not None:
            self.register_buffer("draft_vocab_ids", torch.arange(config.draft_vocab_size))
        self.timings: dict[int, float] | None = None
        self.acceptance_prior: list[float] | None = None
        self.last_stats: Any = None
        self._carry_enabled: bool | None = None
        self.post_init()
        self._install_seam()

    def _install_seam(self) -> None:
        # Late, because the seam stands above the network in the reading order, and only a drafter needs it.
        from .decoding import install

        install()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # unpickled and copied drafters never run the constructor
        self._install_seam()

    @property
    def carry_enabled(self) -> bool:
        """Whether rejected rows are carried; until set, whether the carry embedding was trained (is not zero)."""
        return bool(self.carry_embedding.any()) if self._carry_enabled is None else self._carry_enabled

    @carry_enabled.setter
    def carry_enabled(self, value: bool) -> None:
        self._carry_enabled = value

    def forward(
        self, noise_embeds: Tensor, context_hidden_states: Tensor, position_ids: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None = None, cache: Cache | None = None, num_carried: int = 0,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        """One drafter pass: new rows in, slots ``[1, B, D]`` out. Arguments as in Transformers' DFlash generator.

        Args:
            noise_embeds: Embeddings of the block's slots, ``[1, B, D]``.
            context_hidden_states: Features of the new memory rows, carried ones last and marked, ``[1, S, F]``.
            position_ids: Positions of those rows and the slots, ``[1, S + B]``.
            attention_mask: 0 where a key is hidden, ``[1, earlier + S + B]``; or, where many blocks share a pass, all
                that slots see, by layer type: boolean, ``[N, 1, slots, keys]``.
            cache: Earlier memory. The new rows *and the block's* are appended; who owns the cache trims it.
            num_carried: How many of the last memory rows are carried ones.
        """
        dtype = self.norm.weight.dtype
        memory = self.hidden_norm(self.fc(context_hidden_states.to(dtype)))  # [1, S, D]
        block = noise_embeds.to(dtype)
        angles = self.rotary_emb(block, position_ids)  # two of [1, S + B, head_dim]
        for kind, layer in zip(self.config.layer_types or (), self.layers, strict=True):
            mask = attention_mask[kind] if isinstance(attention_mask, dict) else attention_mask
            block = layer(block, memory, angles=angles, attention_mask=mask, cache=cache, num_carried=num_carried)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(block), cache=cache)

    def embed_block(self, anchor: Tensor, embedding: nn.Module) -> Tensor:
        """The target's embeddings of anchors ``[N, 1]`` and the mask tokens after them, ``[N, B, D]``."""
        masks = anchor.new_full((len(anchor), self.config.block_size - 1), self.config.mask_token_id)
        slots = torch.cat([anchor, masks], dim=1)
        if self.config.input_embedding_scale is None:
            return embedding(slots)
        has_rows = isinstance(embedding, nn.Embedding) and embedding.weight.device == slots.device
        raw = F.embedding(slots, embedding.get_parameter("weight")) if has_rows else embedding(slots)
        return raw * self.config.input_embedding_scale

    def mark_rejected(self, rejected: Tensor) -> Tensor:
        """Rejected rows ``[1, R, F]`` with the carry embedding added, which tells them from committed rows."""
        return rejected + self.carry_embedding

    def proposal_head(self, output_head: nn.Module) -> Callable[[Tensor], Tensor]:
        """The target's output head, cut to the draft vocabulary; an adapted or quantised one runs whole first."""
        if self.config.draft_vocab_size is None:
            return output_head
        if type(output_head) is not nn.Linear or output_head.weight.device.type == "meta":
            return lambda hidden: output_head(hidden)[..., self.draft_vocab_ids.to(hidden.device)]
        ids = self.draft_vocab_ids.to(output_head.weight.device)
        weight, bias = output_head.weight[ids], None if output_head.bias is None else output_head.bias[ids]
        return lambda hidden: F.linear(hidden, weight, bias)

    def slot_logits(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits of the drafting slots before any Markov bias, ``[1, K, D]`` in, fp32 ``[1, K, V]`` out."""
        logits = head(hidden).float() * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def confidence(self, hidden: Tensor, previous: Tensor, *, detach: bool = False) -> Tensor:
        """Logit of a draft being accepted ``[..]``, from its slot ``[.., D]`` and maybe the token before (DSpark)."""
        assert self.confidence_head is not None
        if self.config.confidence_head_with_markov and self.markov_head is not None:
            hidden = torch.cat([hidden, self.markov_head.markov_w1(previous)], dim=-1)
        return self.confidence_head["proj"](hidden.detach() if detach else hidden)[..., 0]

    def token_ids(self, proposed: Tensor) -> Tensor:
        """Indices into the draft vocabulary as token ids."""
        return proposed if self.config.draft_vocab_size is None else self.draft_vocab_ids.to(proposed.device)[proposed]

    def whole_vocabulary(self, scores: Tensor) -> Tensor:
        """Scores ``[1, Vd]`` of the draft vocabulary in the whole one, ``[1, V]``, with minus infinity elsewhere."""
        if self.config.draft_vocab_size is None:
            return scores
        whole = scores.new_full((1, self.config.vocab_size), -torch.inf)
        return whole.index_copy(1, self.draft_vocab_ids.to(scores.device), scores)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, CarryoverDrafterModel):
            init.zeros_(module.carry_embedding)

    def save_pretrained(self, save_directory: Any, *, with_code: bool = False, **kwargs: Any) -> None:
        """Write the folder; ``with_code`` adds the core files: then it loads as remote code without this package."""
        self.config.__dict__.pop("auto_map", None)
        if with_code:  # before the base class, which may push the folder
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            for name in CORE_FILES:
                shutil.copy(Path(__file__).with_name(name), save_directory)
            self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, **kwargs)
        self.config.__dict__.pop("auto_map", None)

    @classmethod
    def from_pretrained(cls, name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as the base class does, but safetensors only and all tensors; a missing ``carry_embedding`` is zero."""
        kwargs["use_safetensors"] = True
        try:
            model, info = super().from_pretrained(name_or_path, *args, output_loading_info=True, **kwargs)
        except Exception as error:  # of many kinds; each stays what it is and says where it was met
            error.add_note(f"This drafter could not be loaded: {name_or_path}")
            raise
        missing, unknown = sorted(set(info["missing_keys"]) - {"carry_embedding"}), sorted(info["unexpected_keys"])
        tensors, last = model.state_dict().items(), model.config.vocab_size - 1
        mended = ((n, t, t.clamp(0, last).unique() if n == "draft_vocab_ids" else t.nan_to_num()) for n, t in tensors)
        wrong = [name for name, tensor, sound in mended if not (tensor.is_meta or torch.equal(tensor, sound))]
        if missing or unknown or wrong:
            raise ValueError(
                f"Expected exactly the tensors of a drafter in {name_or_path}; missing: {missing or 'none'}, unknown: "
                f"{unknown or 'none'}, not finite, or ids not increasing: {wrong or 'none'}. Convert or save it again."
            )
        return (model, info) if output_loading_info else model


AutoModel.register(CarryoverDrafterConfig, CarryoverDrafterModel, exist_ok=True)
