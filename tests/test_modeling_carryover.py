import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel
from transformers.cache_utils import DFlashCache

from hf_carryover import CarryoverCache, CarryoverDrafterModel, uninstall
from hf_carryover.decoding import MARK, PRIVATE_NAMES, GenerationMixin
from hf_carryover.modeling_carryover import block_visibility
from tests.fakes import KINDS, MASK, VOCAB, drafter_config, make_drafter, make_target, plain, prompt


def run_block(drafter, *, num_rows=6, num_carried=0, cache=None, features=None, **kwargs):
    """One pass of the drafter over random features; positions count up from 0, carried rows restart at the anchor."""
    block_size, size = drafter.config.block_size, drafter.config.feature_size
    generator = torch.Generator().manual_seed(0)
    if features is None:
        features = torch.randn(1, num_rows, size, generator=generator)
    block = torch.randn(1, block_size, drafter.config.hidden_size, generator=generator)
    num_new = features.shape[1] - num_carried
    positions = torch.cat(
        [torch.arange(num_new), num_new + torch.arange(num_carried), num_new + torch.arange(block_size)]
    )
    with torch.no_grad():
        return drafter(
            block, features, positions[None], cache=cache, num_carried=num_carried, **kwargs
        ).last_hidden_state


def test_every_slot_sees_every_other_slot_and_every_row():
    drafter = make_drafter()
    features = torch.randn(1, 6, drafter.config.feature_size, requires_grad=True)
    block = torch.randn(1, 5, 32, requires_grad=True)

    hidden = drafter(block, features, torch.arange(11)[None]).last_hidden_state
    row_grads, slot_grads = torch.autograd.grad(hidden[0, 1].sum(), [features, block])

    assert (row_grads.abs().sum(-1) > 0).all()
    assert (slot_grads.abs().sum(-1) > 0).all()


def test_committing_in_two_passes_equals_committing_in_one():
    drafter, features = make_drafter(), torch.randn(1, 6, 64)
    once, twice = CarryoverCache(), CarryoverCache()

    once.commit(6)
    whole = run_block(drafter, features=features, cache=once)
    twice.commit(4)
    run_block(drafter, features=features[:, :4], cache=twice)
    twice.commit(2)
    block = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        parts = drafter(block, features[:, 4:], torch.arange(4, 11)[None], cache=twice).last_hidden_state
        whole = drafter(block, features[:, :0], torch.arange(6, 11)[None], cache=_trimmed(once)).last_hidden_state

    torch.testing.assert_close(parts, whole)


def _trimmed(cache):
    cache.commit(0)
    return cache


def test_our_cache_and_the_librarys_dflash_cache_give_the_same_slots():
    drafter = make_drafter()
    theirs, ours = DFlashCache(config=drafter.config), CarryoverCache()
    ours.commit(6)

    slots = run_block(drafter, cache=theirs)

    assert theirs.get_seq_length() == 6 + drafter.config.block_size
    torch.testing.assert_close(slots, run_block(drafter, cache=ours), rtol=0, atol=0)
    torch.testing.assert_close(slots, run_block(drafter, cache=None), rtol=0, atol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_rows_under_a_mask_do_not_change_the_slots(attention):
    drafter = make_drafter(attn_implementation=attention)
    features = torch.randn(1, 6, drafter.config.feature_size)
    mask = torch.ones(1, 6 + 5)
    mask[0, :2] = 0
    changed = features.clone()
    changed[0, :2] = 9.0

    slots = run_block(drafter, features=features, attention_mask=mask)

    torch.testing.assert_close(slots, run_block(drafter, features=changed, attention_mask=mask), rtol=0, atol=0)
    assert not torch.allclose(slots, run_block(drafter, features=features), atol=1e-3)


def test_eager_and_sdpa_agree():
    features = torch.randn(1, 6, 64)

    eager, sdpa = (
        run_block(make_drafter(attn_implementation=name), features=features, num_carried=2)
        for name in ("eager", "sdpa")
    )

    torch.testing.assert_close(eager, sdpa)


def test_a_sliding_layer_forgets_rows_beyond_its_window_but_sees_all_carried_ones():
    """ikawrakow/ik_llama.cpp#2021; vllm-project/tpu-inference#3526."""
    drafter = make_drafter(num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=4, is_causal=False)
    features = torch.randn(1, 10, drafter.config.feature_size)
    far, near, carried = (features.clone() for _ in range(3))
    far[0, 0], near[0, 7], carried[0, 9] = 9.0, 9.0, 9.0

    slots = run_block(drafter, features=features, num_carried=2)[0]

    assert torch.equal(slots, run_block(drafter, features=far, num_carried=2)[0])
    assert not torch.equal(slots[0], run_block(drafter, features=near, num_carried=2)[0, 0])
    assert not torch.equal(slots[4], run_block(drafter, features=carried, num_carried=2)[0, 4])


def test_visibility_by_hand():
    visible = block_visibility(3 + 2 + 2, 2, 2, window=3, causal=True)[0, 0].int().tolist()

    # Memory rows 0, 1, 2; carried rows at 3, 4; slots at 3, 4. A slot sees two rows back and no slot ahead.
    assert visible == [[0, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1, 1]]


def test_the_block_is_the_anchor_and_mask_tokens():
    """warpfront/hipfire#483."""
    drafter, target = make_drafter(), make_target()
    embedding = target.get_input_embeddings()

    block = drafter.embed_block(torch.tensor([[7]]), embedding)

    assert torch.equal(block, embedding(torch.tensor([[7, MASK, MASK, MASK, MASK]])))


def test_an_embedding_scale_in_the_config_replaces_the_modules_own():
    """vllm-project/vllm#41262 and #41703; huggingface/transformers#47913."""
    target = make_target("gemma3_text")
    embedding, anchor = target.get_input_embeddings(), torch.tensor([[7]])

    asked = make_drafter().embed_block(anchor, embedding)
    raw = make_drafter(input_embedding_scale=2.0).embed_block(anchor, embedding)

    torch.testing.assert_close(asked, embedding.weight[[7] + [MASK] * 4][None] * 32**0.5)
    torch.testing.assert_close(raw, embedding.weight[[7] + [MASK] * 4][None] * 2.0)


def test_markov_heads_by_hand():
    previous, hidden = torch.tensor([3]), torch.randn(1, 32)
    for kind in ("markov-vanilla", "markov-gated", "markov-rnn"):
        head = make_drafter(kind).markov_head
        embedding, w2 = head.markov_w1.weight[[3]], head.markov_w2.weight
        if kind == "markov-vanilla":
            expected = [embedding @ w2.T] * 2
        elif kind == "markov-gated":
            gate = head.gate_proj(torch.cat([hidden, embedding], -1)).sigmoid()
            expected = [(gate * embedding) @ w2.T] * 2
        else:
            expected, state = [], torch.zeros(1, 6)
            for _ in range(2):
                g, c, o = head.joint_proj(torch.cat([state, embedding, hidden], -1)).split(6, -1)
                expected.append(o.tanh() @ w2.T)
                state = g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh()

        first, state = head(previous, hidden, None)
        second, _ = head(previous, hidden, state)

        torch.testing.assert_close([first, second], expected)


def test_confidence_head_reads_slot_and_markov_embedding():
    drafter = make_drafter("markov-vanilla", enable_confidence_head=True, confidence_head_with_markov=True)
    assert {name: tuple(tensor.shape) for name, tensor in drafter.confidence_head.state_dict().items()} == {
        "proj.weight": (1, 32 + 6),
        "proj.bias": (1,),
    }
    hidden, previous = torch.randn(1, 4, 32), torch.tensor([[3, 9, 9, 60]])

    logits = drafter.confidence(hidden, previous)

    weight, embedding = drafter.confidence_head["proj"].weight[0], drafter.markov_head.markov_w1.weight[previous]
    expected = hidden @ weight[:32] + embedding @ weight[32:] + drafter.confidence_head["proj"].bias
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain-linear-is-cut", "any-other-head-runs-whole"])
def test_a_draft_vocabulary_reads_the_heads_rows_at_its_tokens(wrapped):
    """vllm-project/vllm-ascend#9795 and #11374."""
    drafter = make_drafter(draft_vocab_size=4)
    drafter.draft_vocab_ids.copy_(torch.tensor([2, 3, 11, 40]))
    head, hidden = torch.nn.Linear(32, VOCAB), torch.randn(1, 3, 32)

    logits = drafter.slot_logits(hidden, drafter.proposal_head(torch.nn.Sequential(head) if wrapped else head))

    torch.testing.assert_close(logits, head(hidden)[..., [2, 3, 11, 40]])
    assert drafter.token_ids(torch.tensor([0, 3])).tolist() == [2, 40]
    whole = drafter.whole_vocabulary(logits[:, 0])
    assert whole[0, 11] == logits[0, 0, 2]
    assert whole.isfinite().sum() == 4


def test_softcap_and_multiplier_shape_the_logits():
    drafter = make_drafter(final_logit_softcapping=2.0, output_multiplier=3.0)
    hidden = torch.randn(1, 3, 32)

    logits = drafter.slot_logits(hidden, lambda x: x)

    torch.testing.assert_close(logits, 2.0 * torch.tanh(3.0 * hidden / 2.0))


def test_a_fresh_drafter_carries_nothing_until_its_carry_embedding_is_trained():
    drafter = CarryoverDrafterModel(drafter_config())
    assert not drafter.carry_embedding.any()
    assert not drafter.carry_enabled

    drafter.carry_embedding.data[3] = 0.1
    assert drafter.carry_enabled

    drafter.carry_enabled = False
    assert not drafter.carry_enabled


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load_give_the_same_drafter(kind, tmp_path):
    """huggingface/transformers#46661; sgl-project/sglang#40144 and #40181."""
    drafter = make_drafter(kind, draft_vocab_size=9, enable_confidence_head=True)
    drafter.draft_vocab_ids.copy_(torch.arange(1, 18, 2))
    drafter.save_pretrained(tmp_path)

    loaded = AutoModel.from_pretrained(tmp_path)

    assert type(loaded) is CarryoverDrafterModel
    assert {name: tensor.tolist() for name, tensor in loaded.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in drafter.state_dict().items()
    }
    assert torch.equal(run_block(loaded), run_block(drafter))


def test_a_checkpoint_without_carry_embedding_loads_it_as_zero(tmp_path, monkeypatch):
    """Transformers takes what is missing from memory as it finds it; fresh memory is often zero by luck."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(7))
    make_drafter().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["carry_embedding"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    loaded = CarryoverDrafterModel.from_pretrained(tmp_path)

    assert not loaded.carry_embedding.any()
    assert not loaded.carry_enabled


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"missing: \['fc.weight'\], unknown: none"),
        (lambda t: t.update(sinks=torch.zeros(3)), r"missing: none, unknown: \['sinks'\]"),
    ],
    ids=["missing", "unknown"],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(edit, message, tmp_path):
    make_drafter().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(ValueError, match=message):
        CarryoverDrafterModel.from_pretrained(tmp_path)


def test_a_pickled_checkpoint_is_refused(tmp_path):
    drafter = make_drafter()
    drafter.config.save_pretrained(tmp_path)
    torch.save(drafter.state_dict(), tmp_path / "pytorch_model.bin")

    with pytest.raises(OSError, match="safetensors"):
        CarryoverDrafterModel.from_pretrained(tmp_path)


def test_a_plain_save_promises_no_code(tmp_path):
    drafter = make_drafter()
    drafter.save_pretrained(tmp_path / "with", with_code=True)
    drafter.save_pretrained(tmp_path / "without")

    assert "auto_map" in json.loads((tmp_path / "with" / "config.json").read_text())
    assert "auto_map" not in json.loads((tmp_path / "without" / "config.json").read_text())
    drafter.config.save_pretrained(tmp_path / "config")
    assert "auto_map" not in json.loads((tmp_path / "config" / "config.json").read_text())
    assert not list((tmp_path / "without").glob("*.py"))


@pytest.mark.slow
def test_remote_code_gives_the_same_text_and_logits_where_this_package_is_not_installed(tmp_path):
    target, drafter = make_target(), make_drafter()
    drafter.save_pretrained(tmp_path / "drafter", with_code=True)
    target.save_pretrained(tmp_path / "target")
    script = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_carryover":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoModel, AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained({str(tmp_path / "target")!r})
drafter = AutoModel.from_pretrained({str(tmp_path / "drafter")!r}, trust_remote_code=True).eval()
assert type(drafter).__module__.startswith("transformers_modules"), type(drafter).__module__
generator = torch.Generator().manual_seed(0)
features, block = torch.randn(1, 6, 64, generator=generator), torch.randn(1, 5, 32, generator=generator)
with torch.no_grad():
    hidden = drafter(block, features, torch.arange(11)[None]).last_hidden_state
ids = torch.tensor({prompt().tolist()})
text = target.generate(input_ids=ids, do_sample=False, max_new_tokens=40, assistant_model=drafter)
assert drafter.last_stats.carried_rows > 0
torch.save((hidden, text), {str(tmp_path / "out.pt")!r})
"""
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}

    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, env=environment)
    hidden, text = torch.load(tmp_path / "out.pt")

    torch.testing.assert_close(hidden, run_block(drafter))
    assert torch.equal(text, plain(target, input_ids=prompt()))


@pytest.mark.parametrize(
    "revive", [copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))], ids=["copied", "unpickled"]
)
def test_a_drafter_that_never_ran_its_constructor_still_works(revive):
    target, drafter = make_target(), make_drafter()
    uninstall()
    assert all(MARK not in vars(vars(GenerationMixin)[name]) for name in PRIVATE_NAMES)

    revived = revive(drafter)

    assert torch.equal(plain(target, input_ids=prompt(), assistant_model=revived), plain(target, input_ids=prompt()))
    assert revived.last_stats.rounds
