import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_carryover import load_dflash, load_drafter
from tests.fakes import make_drafter, make_target, plain, prompt, write_zlab_folder

STARTER = Path(__file__).parents[2] / "shared" / "starter"


def edit_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_zlab_folder_gives_the_same_drafter_that_carries_nothing(tmp_path):
    original = make_drafter(input_embedding_scale=1.0)
    write_zlab_folder(tmp_path, original)
    target, ids = make_target(), prompt()

    drafter = load_dflash(tmp_path, target=target)

    assert (drafter.config.num_drafts, drafter.config.sample_from_anchor) == (4, False)
    assert drafter.config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    assert not drafter.carry_embedding.any()
    assert not drafter.carry_enabled
    original.carry_enabled = False
    texts = [plain(target, input_ids=ids, assistant_model=model) for model in (original, drafter)]
    assert torch.equal(*texts)
    assert [r.drafted_ids for r in drafter.last_stats.rounds] == [r.drafted_ids for r in original.last_stats.rounds]


def test_a_carry_embedding_in_the_folder_is_used(tmp_path):
    write_zlab_folder(tmp_path, make_drafter())
    edit_tensors(tmp_path, lambda t: t.update(carry_embedding=torch.ones(64)))

    assert load_dflash(tmp_path).carry_enabled


def test_sharded_folders_are_read_whole(tmp_path):
    write_zlab_folder(tmp_path, make_drafter())
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"model-{number}.safetensors")

    assert torch.equal(load_dflash(tmp_path).fc.weight, tensors["fc.weight"])


def test_the_dtype_is_the_checkpoints_unless_asked(tmp_path):
    write_zlab_folder(tmp_path, make_drafter().to(torch.bfloat16))

    drafter = load_dflash(tmp_path)
    assert drafter.fc.weight.dtype == torch.bfloat16
    assert drafter.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(drafter.rotary_emb.inv_freq, make_drafter().rotary_emb.inv_freq)
    assert load_dflash(tmp_path, dtype=torch.float32).fc.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": ...}, r"Expected the fields \['block_size'\]"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, r"Expected the fields \['mask_token_id'\]"),
        ({"dflash_config": ...}, r"Expected the fields \['mask_token_id', 'target_layer_ids'\]"),
        ({"head_dim": ...}, r"Expected the fields \['head_dim'\]"),
        ({"block_size": "five"}, "Expected a drafter's settings in .*config.json, got: .*'block_size'"),
        ({"dflash_config": 3}, "Expected an object as `dflash_config` in .* got 3"),
        ({"rope_theta": ...}, "Missing required field - 'rope_parameters'"),
        ({"mask_token_id": 3}, "Expected one `mask_token_id` .* got 3 at the top and 60 in `dflash_config`"),
        ({"use_sliding_window": True, "layer_types": ...}, "Expected `layer_types` .* beside `use_sliding_window`"),
        ({"attention_sinks": True}, r"got also \['attention_sinks'\]"),
        (
            {"dflash_config": {"mask_token_id": 60, "target_layer_ids": [0, 2], "conv_kernel_size": 2}},
            r"in `dflash_config` of .* got \['conv_kernel_size'\]",
        ),
        ({"architectures": ["DFlash2DraftModel"]}, r"got \['DFlash2DraftModel'\]; other drafters, DFlash2DraftModel"),
        ({"architectures": ["DFlashDraftModel", "Other"]}, r"got \['DFlashDraftModel', 'Other'\]; other drafters"),
        ({"intermediate_size": 40}, r"Expected `layers.0.mlp.*` of shape .* got"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, r"unknown: \['layers.1"),
        ({"num_hidden_layers": 3, "layer_types": ...}, r"missing: \['layers.2"),
    ],
)
def test_a_config_that_would_need_a_guess_is_refused(changes, message, tmp_path):
    write_zlab_folder(tmp_path, make_drafter(), **changes)

    with pytest.raises((ValueError, TypeError), match=message):
        load_dflash(tmp_path)


def test_facts_nested_or_at_the_top_mean_the_same(tmp_path):
    """InternLM/lmdeploy#4991; raullenchai/Rapid-MLX#2195; ggml-org/llama.cpp#26761."""
    write_zlab_folder(tmp_path, make_drafter(), dflash_config=..., mask_token_id=60, target_layer_ids=[0, 2])

    config = load_dflash(tmp_path).config

    assert (config.mask_token_id, config.target_layer_ids) == (60, [0, 2])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("hidden_norm.weight"), r"missing: \['hidden_norm.weight'\], unknown: none"),
        (lambda t: t.update(extra=torch.zeros(2)), r"missing: none, unknown: \['extra'\]"),
        (
            lambda t: t.update({"fc.weight": torch.zeros(3, 3)}),
            r"Expected `fc.weight` of shape \[32, 64\] .* got \[3, 3\]",
        ),
        (lambda t: t["norm.weight"].fill_(torch.nan), "found NaN or infinity in `norm.weight`"),
    ],
    ids=["missing", "unknown", "misshapen", "not-a-number"],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(edit, message, tmp_path):
    """A drafter with an embedding of its own, too: spiritbuun/buun-llama-cpp#118."""
    write_zlab_folder(tmp_path, make_drafter())
    edit_tensors(tmp_path, edit)

    with pytest.raises(ValueError, match=message):
        load_dflash(tmp_path)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda f: (f / "config.json").unlink(), FileNotFoundError, "Expected a drafter's config.json at"),
        (lambda f: (f / "config.json").write_bytes(b"\xff{}"), ValueError, "Expected UTF-8 JSON in"),
        (lambda f: (f / "config.json").write_text("[]"), ValueError, "Expected a JSON object in .* got list"),
        (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, "pickled weights are not read"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"x" * 99),
            ValueError,
            "Expected a whole safetensors file at",
        ),
        (lambda f: save_file({"fc.weight": torch.zeros(1)}, f / "more.safetensors"), ValueError, "each tensor once"),
    ],
    ids=["no-config", "not-utf8", "not-an-object", "no-weights", "broken-weights", "a-tensor-twice"],
)
def test_a_damaged_folder_is_refused(damage, error, message, tmp_path):
    write_zlab_folder(tmp_path, make_drafter())
    damage(tmp_path)

    with pytest.raises(error, match=message):
        load_dflash(tmp_path)


def test_a_target_that_does_not_fit_is_refused_on_loading(tmp_path):
    write_zlab_folder(tmp_path, make_drafter())

    with pytest.raises(ValueError, match="expects vocabulary size 61, got LlamaForCausalLM: 30"):
        load_dflash(tmp_path, target=make_target(vocab_size=30))


@pytest.mark.parametrize(
    ("curve", "prior"),
    [
        ([0.8, 0.4, 0.1, 0.0], [0.8, 0.5, 0.25, 0.0]),
        ([0.8, 0.05, 0.051, 0.0], [0.8, 0.0625, 1.0, 0.0]),  # the third draft was verified in fewer rounds
        ([0.5, 0.2], None),
        (None, None),
    ],
    ids=str,
)
def test_what_was_measured_is_where_automatic_draft_lengths_start(curve, prior, tmp_path):
    make_drafter().save_pretrained(tmp_path)
    place = {"set": "all", "system": "carry-on", "temperature": 0.0}
    rows = [] if curve is None else [place | {"acceptance_by_position": curve}]
    (tmp_path / "evaluation.json").write_text(json.dumps({"acceptance": rows}))

    found = load_drafter(tmp_path).acceptance_prior

    assert found == (None if prior is None else pytest.approx(prior))


@pytest.mark.parametrize("content", ["{", "[]", '{"acceptance": {"a": 1}}', '{"acceptance": [{"set": "all"}]}'])
def test_a_broken_evaluation_does_not_keep_a_drafter_from_loading(content, tmp_path, caplog):
    make_drafter().save_pretrained(tmp_path)
    (tmp_path / "evaluation.json").write_text(content)

    assert load_drafter(tmp_path).acceptance_prior is None
    assert "evaluation.json tells automatic draft lengths nothing" in caplog.text


@pytest.mark.parametrize("public", [False, True])
def test_a_drafter_computes_in_its_targets_type_unless_told(public, tmp_path):
    """A checkpoint in bf16 beside a target in fp32, on a processor without bf16, would be many times slower."""
    drafter = make_drafter().to(torch.bfloat16)
    write_zlab_folder(tmp_path, drafter) if public else drafter.save_pretrained(tmp_path)

    assert load_drafter(tmp_path, target=make_target()).dtype == torch.float32
    assert load_drafter(tmp_path, target=make_target(), dtype="auto").dtype == torch.bfloat16
    assert load_drafter(tmp_path, target=make_target(), dtype=torch.float64).dtype == torch.float64
    assert load_drafter(tmp_path).dtype == torch.bfloat16


def test_load_drafter_reads_both_formats(tmp_path):
    drafter = make_drafter("markov-gated")
    drafter.save_pretrained(tmp_path / "ours")
    write_zlab_folder(tmp_path / "zlab", make_drafter())
    target = make_target()

    ours = load_drafter(tmp_path / "ours", target=target, dtype=torch.float64)
    public = load_drafter(tmp_path / "zlab", target=target)

    assert ours.config.markov_head_type == "gated"
    assert ours.fc.weight.dtype == torch.float64
    assert ours.carry_enabled
    assert not public.carry_enabled
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "carryover_drafter"


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_in_a_public_config_changes_nothing(tied, tmp_path):
    """sgl-project/SpecForge#139 and #140: embedding and head are the target's."""
    original = make_drafter()
    write_zlab_folder(tmp_path / "public", original, tie_word_embeddings=tied)

    load_dflash(tmp_path / "public").save_pretrained(tmp_path / "ours")
    loaded = load_drafter(tmp_path / "ours")

    assert all(torch.equal(tensor, original.state_dict()[name]) for name, tensor in loaded.state_dict().items()
               if name != "carry_embedding")  # fmt: skip


@pytest.mark.all
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    [{}, {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}],
    ids=["full-attention", "sliding-windows"],
)
def test_the_package_dflash_accepts_the_same_drafts_round_by_round(kind, tmp_path, monkeypatch):
    """An oracle that nobody here wrote. A vocabulary of seven lets random weights be right now and then."""
    target = make_target(vocab_size=7)
    make = {"vocab_size": 7, "mask_token_id": 6, "input_embedding_scale": 1.0}
    drafter = make_drafter(**make, **kind)
    write_zlab_folder(tmp_path, drafter, sliding_window=kind.get("sliding_window"), use_sliding_window=bool(kind))
    lengths = []
    for seed in range(4):
        ids = torch.randint(0, 6, (1, 9), generator=torch.Generator().manual_seed(seed))
        lengths += compare_with_dflash(target, tmp_path, ids, 60, monkeypatch)

    assert len(lengths) > 40
    assert {1, 2} < set(lengths)


@pytest.mark.all
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not STARTER.exists(), reason="the starter drafter is not beside this checkout")
def test_the_package_dflash_agrees_on_the_starter_and_smollm2(smollm2, monkeypatch):
    target, tokenizer = smollm2
    chat = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    lengths = compare_with_dflash(target, STARTER, inputs["input_ids"], 64, monkeypatch)

    assert len(lengths) > 20
    assert max(lengths) >= 3


def compare_with_dflash(target, folder, ids, num_tokens, monkeypatch):
    """Run both on the same prompt, greedy; returns tokens a round after checking that they are the same."""
    theirs = pytest.importorskip("dflash.model", reason="run `make test-all`, which installs dflash")
    monkeypatch.setattr(theirs, "_cuda_time", time.perf_counter)
    model = theirs.DFlashDraftModel.from_pretrained(folder, dtype=target.dtype).eval()
    out = theirs.dflash_generate(model, target, ids, num_tokens, None, return_stats=True)
    drafter = load_dflash(folder, target=target, dtype=target.dtype)

    text = plain(target, input_ids=ids, assistant_model=drafter, max_new_tokens=num_tokens)

    lengths = [r.num_accepted + 1 for r in drafter.last_stats.rounds]
    assert torch.equal(text, out.output_ids)
    # Near the limit dflash drafts one token more than can be kept; before it every round is the same.
    full = next(i for i in range(len(lengths)) if sum(lengths[: i + 1]) >= num_tokens - 1 - drafter.config.block_size)
    assert lengths[:full] == out.acceptance_lengths[:full]
    return lengths[:full]
