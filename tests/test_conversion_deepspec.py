import json

import pytest
import torch
from safetensors.torch import load_file

from hf_carryover import load_dflash, load_drafter
from tests.conversion_fakes import a_block, block_logits, edit_tensors, make_dspark, write_deepspec_folder
from tests.fakes import make_target, plain, prompt


def rms(x, weight, eps=1e-6):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turn(x, positions):
    """Rotary embedding of heads ``[H, rows, head_dim]``."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / 10000.0 ** (torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def written_again(folder, ids, states, anchor):
    """What DeepSpec computes for a block, ``[1, K, V]``, from METHOD.md: nobody's code, but the folder's tensors."""
    c, t = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    features = torch.cat([states[i + 1] for i in c["target_layer_ids"]], dim=-1)
    heads, groups, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    block = torch.full((c["block_size"],), c["mask_token_id"])
    block[0] = ids[0, anchor]
    x = t["embed_tokens.weight"][block]  # [B, D]
    memory = rms(features[0, :anchor] @ t["fc.weight"].T, t["hidden_norm.weight"])  # [anchor, D]
    positions = torch.arange(anchor + c["block_size"]).float()
    for i in range(c["num_hidden_layers"]):
        w = {name.removeprefix(f"layers.{i}."): v for name, v in t.items() if name.startswith(f"layers.{i}.")}
        a = rms(x, w["input_layernorm.weight"])
        rows = torch.cat([memory, a])
        q = (a @ w["self_attn.q_proj.weight"].T).view(-1, heads, size).transpose(0, 1)
        k = (rows @ w["self_attn.k_proj.weight"].T).view(-1, groups, size).transpose(0, 1)
        v = (rows @ w["self_attn.v_proj.weight"].T).view(-1, groups, size).transpose(0, 1)
        q = turn(rms(q, w["self_attn.q_norm.weight"]), positions[anchor:])
        k = turn(rms(k, w["self_attn.k_norm.weight"]), positions)
        k, v = (y.repeat_interleave(heads // groups, dim=0) for y in (k, v))
        mixed = (q @ k.transpose(1, 2) / size**0.5).softmax(-1) @ v  # all slots see all rows and the whole block
        x = x + mixed.transpose(0, 1).reshape(len(x), -1) @ w["self_attn.o_proj.weight"].T
        m = rms(x, w["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(m @ w["mlp.gate_proj.weight"].T) * (m @ w["mlp.up_proj.weight"].T)
        x = x + gate @ w["mlp.down_proj.weight"].T
    h = rms(x, t["norm.weight"])
    logits = h @ t["lm_head.weight"].T  # [B, V]: the anchor's slot drafts, too
    if c["markov_rank"] == 0:
        return logits[None]
    s = torch.zeros(c["markov_rank"])
    for k in range(c["block_size"]):
        e = t["markov_head.markov_w1.weight"][ids[0, anchor + k]]
        read = e
        if c["markov_head_type"] == "gated":
            g = t["markov_head.gate_proj.weight"] @ torch.cat([h[k], e]) + t["markov_head.gate_proj.bias"]
            read = g.sigmoid() * e
        if c["markov_head_type"] == "rnn":
            joint = t["markov_head.joint_proj.weight"] @ torch.cat([s, e, h[k]]) + t["markov_head.joint_proj.bias"]
            g, candidate, o = joint.chunk(3)
            s = g.sigmoid() * s + (1 - g.sigmoid()) * candidate.tanh()
            read = o.tanh()
        logits[k] += t["markov_head.markov_w2.weight"] @ read
    return logits[None]


@pytest.mark.parametrize("kind", ["dflash", "markov-vanilla", "markov-gated", "markov-rnn"])
def test_a_deepspec_drafter_has_the_logits_of_the_mathematics_written_again(kind, tmp_path):
    target = make_target()
    write_deepspec_folder(tmp_path, make_dspark(kind), target)

    drafter = load_dflash(tmp_path, target=target)

    block = a_block(target)
    ours = block_logits(drafter, target, *block)
    assert ours.shape[1] == drafter.config.block_size
    torch.testing.assert_close(ours, written_again(tmp_path, *block), rtol=1e-5, atol=1e-5)


def test_a_deepspec_drafter_drafts_at_once_and_carries_nothing(tmp_path):
    target, ids = make_target(), prompt()
    write_deepspec_folder(tmp_path, make_dspark("markov-rnn"), target)

    drafter = load_drafter(tmp_path, target=target)

    assert torch.equal(plain(target, input_ids=ids, assistant_model=drafter), plain(target, input_ids=ids))
    assert (drafter.config.num_drafts, drafter.config.sample_from_anchor, drafter.carry_enabled) == (5, True, False)
    assert drafter.config.confidence_head_with_markov


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_rank": ...}, r"Expected the fields \['markov_rank'\]"),
        ({"markov_head_type": ...}, r"Expected the fields \['markov_head_type'\]"),
        ({"confidence_head_with_markov": ...}, r"Expected the fields \['confidence_head_with_markov'\]"),
        ({"mask_token_id": None}, r"Expected the fields \['mask_token_id'\]"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "Expected full attention in"),
        ({"is_causal": True}, "Expected full attention in every layer .* DeepSpec places their windows otherwise"),
        ({"carh_rank": 2}, r"Expected fields of a DeepSpec drafter in .* got also \['carh_rank'\]"),
        ({"markov_head_type": "carh"}, "`markov_head_type` must be None, vanilla, gated, rnn, got 'carh'"),
        (
            {"architectures": ["Gemma4DSparkModel"]},
            r"got \['Gemma4DSparkModel'\]; other drafters, .* Gemma4DSparkModel",
        ),
        ({"architectures": ["DSparkDraftModel"]}, r"got \['DSparkDraftModel'\]; other drafters"),
    ],
)
def test_a_deepspec_config_that_would_need_a_guess_is_refused(changes, message, tmp_path):
    target = make_target()
    write_deepspec_folder(tmp_path, make_dspark(), target, **changes)

    with pytest.raises(ValueError, match=message):
        load_dflash(tmp_path, target=target)


def test_copies_of_the_target_need_the_target(tmp_path):
    write_deepspec_folder(tmp_path, make_dspark(), make_target())

    with pytest.raises(ValueError, match=r"Expected a target to compare \['embed_tokens.weight', 'lm_head.weight'\]"):
        load_dflash(tmp_path)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_copy_that_is_not_the_targets_is_refused(name, tmp_path):
    target = make_target()
    write_deepspec_folder(tmp_path, make_dspark(), target)
    edit_tensors(tmp_path, lambda t: t[name][3].mul_(1.001))

    with pytest.raises(ValueError, match=f"Expected `{name}` in .* to equal the target's own"):
        load_dflash(tmp_path, target=target)


def test_copies_in_another_precision_are_compared_in_the_coarser_one(tmp_path):
    target = make_target()
    write_deepspec_folder(tmp_path, make_dspark(), target)
    edit_tensors(tmp_path, lambda t: t.update({name: x.bfloat16() for name, x in t.items()}))

    assert load_dflash(tmp_path, target=target, dtype="auto").dtype == torch.bfloat16


def test_a_folder_without_copies_needs_no_target(tmp_path):
    write_deepspec_folder(tmp_path, make_dspark(), make_target())
    edit_tensors(tmp_path, lambda t: (t.pop("embed_tokens.weight"), t.pop("lm_head.weight")))

    assert load_dflash(tmp_path).config.markov_rank == 6


def test_a_target_whose_head_has_a_bias_is_not_what_the_copy_came_from(tmp_path):
    target = make_target()
    write_deepspec_folder(tmp_path, make_dspark(), target)
    target.lm_head.bias = torch.nn.Parameter(torch.ones(61))

    with pytest.raises(ValueError, match="Expected a target whose output head has no bias, got one with"):
        load_dflash(tmp_path, target=target)


def test_a_target_with_packed_weights_cannot_be_compared(tmp_path):
    target = make_target()
    write_deepspec_folder(tmp_path, make_dspark(), target)
    target.lm_head = torch.nn.Identity()

    with pytest.raises(ValueError, match="Expected a target with plain weights, got Identity; load it unquantized"):
        load_dflash(tmp_path, target=target)
