import json

import pytest
import torch
from safetensors.torch import load_file

from hf_carryover import load_drafter
from hf_carryover.conversion import FORMATS, convert_drafter, restrict_vocabulary, saving
from tests.conversion_fakes import a_block, block_logits, make_dspark
from tests.fakes import KINDS, make_drafter, make_target, write_zlab_folder
from tests.test_conversion_speculators import make_subset, their_logits

ENGINES = FORMATS[1:]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target with a name: speculators' folders hold it."""
    folder = tmp_path_factory.mktemp("target")
    make_target().save_pretrained(folder)
    model = type(make_target()).from_pretrained(folder).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def make(to):
    """A drafter that a format can express, with a carry embedding."""
    return make_zlab() if to == "z-lab" else make_dspark("markov-gated")


def make_zlab(**overrides):
    return make_drafter(**({"input_embedding_scale": 1.0, "num_target_layers": 4} | overrides))


def same_weights(left, right):
    assert left.state_dict().keys() == right.state_dict().keys()
    return all(torch.equal(tensor, right.state_dict()[name]) for name, tensor in left.state_dict().items())


VARIANTS = [
    ("carryover", lambda: make_subset("markov-rnn")),
    ("z-lab", make_zlab),
    ("z-lab", lambda: make_zlab(input_embedding_scale=2.0, output_multiplier=0.5, final_logit_softcapping=9.0)),
    ("z-lab", lambda: make_zlab(layer_types=["full_attention", "sliding_attention"], sliding_window=6)),
    ("z-lab", lambda: make_zlab(is_causal=True, attention_bias=True, rms_norm_eps=1e-5)),
    ("deepspec", lambda: make_dspark("dflash", num_target_layers=4)),
    ("deepspec", lambda: make_dspark("markov-rnn", num_target_layers=4)),
    ("speculators", lambda: make_drafter(input_embedding_scale=1.0)),
    ("speculators", lambda: make_dspark("dflash")),
    ("speculators", lambda: make_dspark("markov-vanilla", sample_from_anchor=False)),
    ("speculators", lambda: make_subset("markov-rnn")),
]  # fmt: skip


@pytest.mark.parametrize(("to", "make"), VARIANTS, ids=[f"{to}-{i}" for i, (to, _) in enumerate(VARIANTS)])
def test_out_and_in_again_gives_the_same_drafter_bit_for_bit(to, make, target, tmp_path):
    original = make()
    original.save_pretrained(tmp_path / "ours")

    convert_drafter(tmp_path / "ours", tmp_path / "public", to=to, target=target)
    convert_drafter(tmp_path / "public", tmp_path / "back", target=target)

    back = load_drafter(tmp_path / "back", target=target)
    assert same_weights(original, back)
    assert back.config.to_diff_dict() == original.config.to_diff_dict()
    assert back.carry_enabled


@pytest.mark.parametrize("to", ENGINES)
def test_engines_find_no_carry_embedding_among_the_weights(to, target, tmp_path):
    original = make(to)
    original.save_pretrained(tmp_path / "ours")

    convert_drafter(tmp_path / "ours", tmp_path / "out", to=to, target=target)

    weights = load_file(tmp_path / "out" / "model.safetensors")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert "carry_embedding" not in weights
    assert index["weight_map"] == dict.fromkeys(weights, "model.safetensors")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "carryover.safetensors", "config.json", "model.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "kind", "proposals"),
    [(make_zlab, "dflash", 4), (lambda: make_dspark("dflash"), "dspark", 5)],
    ids=["the-anchor-does-not-draft", "the-anchor-drafts"],
)
def test_a_speculators_folder_names_its_target_and_as_many_proposals_as_slots_draft(
    make, kind, proposals, target, tmp_path
):
    make().save_pretrained(tmp_path / "ours")

    convert_drafter(tmp_path / "ours", tmp_path / "out", to="speculators", target=target)

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    use = config["speculators_config"]
    assert (config["speculators_model_type"], use["algorithm"]) == (kind, kind)
    assert [method["speculative_tokens"] for method in use["proposal_methods"]] == [proposals]
    assert use["verifier"] == {"name_or_path": target.name_or_path, "architectures": ["LlamaForCausalLM"]}
    assert config["aux_hidden_state_layer_ids"] == [1, 3]


def test_the_folded_carry_embedding_does_after_fc_what_the_whole_one_does_before(tmp_path):
    drafter = make_zlab()
    drafter.save_pretrained(tmp_path / "ours")
    convert_drafter(tmp_path / "ours", tmp_path / "out", to="z-lab")
    rows = torch.randn(1, 3, 64)

    side = load_file(tmp_path / "out" / "carryover.safetensors")

    assert torch.equal(side["carry_embedding"], drafter.carry_embedding)
    torch.testing.assert_close(
        drafter.fc(rows) + side["carry_embedding_folded"], drafter.fc(rows + side["carry_embedding"])
    )


def test_a_drafter_that_never_learnt_to_carry_has_no_side_file(tmp_path):
    write_zlab_folder(tmp_path / "public", make_drafter())

    convert_drafter(tmp_path / "public", tmp_path / "out", to="z-lab")

    assert not (tmp_path / "out" / "carryover.safetensors").exists()
    assert not load_drafter(tmp_path / "out").carry_enabled


def test_a_converted_drafter_keeps_its_precision(tmp_path):
    make_zlab().to(torch.bfloat16).save_pretrained(tmp_path / "ours")

    convert_drafter(tmp_path / "ours", tmp_path / "out", to="z-lab")

    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_drafter(tmp_path / "out").dtype == torch.bfloat16


def test_a_target_that_embeds_plainly_stands_in_for_a_factor(target, tmp_path):
    make_drafter().save_pretrained(tmp_path / "ours")

    convert_drafter(tmp_path / "ours", tmp_path / "out", to="z-lab", target=target)

    assert load_drafter(tmp_path / "out").config.input_embedding_scale == 1.0


LONG = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}


@pytest.mark.parametrize(
    ("to", "make", "message"),
    [
        ("z-lab", lambda: make_dspark("dflash", enable_confidence_head=False, confidence_head_with_markov=False),
         "z-lab format can express, got one with a draft from the anchor's slot"),
        ("z-lab", lambda: make_drafter("markov-rnn", sample_from_anchor=False), "z-lab .* got one with a Markov head"),
        ("z-lab", lambda: make_drafter(enable_confidence_head=True), "z-lab .* got one with a confidence head"),
        ("z-lab", make_subset, "z-lab .* got one with a draft vocabulary"),
        ("deepspec", make_drafter, "DeepSpec .* got one with an anchor that does not draft"),
        ("deepspec", lambda: make_subset("markov-rnn"), "DeepSpec .* got one with a draft vocabulary"),
        ("deepspec", lambda: make_dspark(**LONG), "DeepSpec .* got one with sliding or causal layers"),
        ("deepspec", lambda: make_dspark(input_embedding_scale=2.0), "DeepSpec .* got one with scaled embeddings"),
        ("speculators", lambda: make_dspark(is_causal=True), "speculators .* got one with sliding or causal layers"),
        ("speculators", lambda: make_dspark(output_multiplier=2.0), "speculators .* got one with scaled logits"),
        ("speculators", lambda: make_dspark(final_logit_softcapping=3.0), "speculators .* got one with capped logits"),
        ("speculators", lambda: make_dspark("markov-rnn", sample_from_anchor=False),
         "speculators .* got one with a recurrent Markov head that starts after the anchor's slot"),
    ],
)  # fmt: skip
def test_what_a_format_has_no_place_for_is_refused_and_nothing_written(to, make, message, target, tmp_path):
    make().save_pretrained(tmp_path / "ours")

    with pytest.raises(ValueError, match=message):
        convert_drafter(tmp_path / "ours", tmp_path / "out", to=to, target=target)

    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize(
    ("to", "change", "message"),
    [
        ("deepspec", None, "Expected the target, which a DeepSpec folder describes or holds copies of, got none"),
        ("z-lab", None, "Expected the target, which a z-lab folder describes or holds copies of, got none"),
        (
            "speculators",
            None,
            "Expected the target, which a speculators folder describes or holds copies of, got none",
        ),
        ("speculators", lambda t: t.config.__dict__.update(_name_or_path=""), "got one with a target without a name"),
        ("deepspec", lambda t: setattr(t.lm_head, "bias", torch.nn.Parameter(torch.ones(61))), "head has no bias"),
    ],
    ids=["deepspec-none", "zlab-none", "speculators-none", "nameless", "biased-head"],
)
def test_a_target_that_is_missing_or_does_not_serve_is_refused(to, change, message, tmp_path):
    drafter = make_zlab(num_target_layers=None) if to == "z-lab" else make(to)
    drafter.save_pretrained(tmp_path / "ours")
    target = None if change is None else make_target()
    if change is not None:
        change(target)

    with pytest.raises(ValueError, match=message):
        convert_drafter(tmp_path / "ours", tmp_path / "out", to=to, target=target)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, r"Expected the target, to see whether it scales its embeddings .* got none"),
        ("gemma3_text", "Expected plain embeddings or a factor, got Gemma3TextScaledWordEmbedding"),
    ],
)
def test_a_factor_that_only_the_target_knows_is_not_guessed(target, message, tmp_path):
    make_drafter().save_pretrained(tmp_path / "ours")

    with pytest.raises(ValueError, match=message):
        convert_drafter(tmp_path / "ours", tmp_path / "out", to="z-lab", target=target and make_target(target))


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="among carryover, z-lab, deepspec, speculators, got 'gguf'; choose one"):
        convert_drafter(tmp_path, tmp_path / "out", to="gguf")


@pytest.mark.parametrize(
    "occupy",
    [lambda p: p.mkdir(), lambda p: p.write_text("mine"), lambda p: p.symlink_to("nowhere")],
    ids=["empty-folder", "file", "dangling-link"],
)
def test_nothing_is_overwritten(occupy, tmp_path):
    make_zlab().save_pretrained(tmp_path / "ours")
    occupy(tmp_path / "out")

    with pytest.raises(FileExistsError, match=r"Expected a new folder, found .*out already there; name another"):
        convert_drafter(tmp_path / "ours", tmp_path / "out", to="z-lab")


@pytest.mark.parametrize("to", ["carryover", "z-lab"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("No space left")], ids=["ctrl-c", "disk-full"])
def test_an_interrupted_write_leaves_nothing(error, to, tmp_path, monkeypatch):
    make_zlab().save_pretrained(tmp_path / "ours")

    def break_off(*args, **kwargs):
        seen.extend(path.name for path in tmp_path.iterdir())
        raise error

    seen = []
    monkeypatch.setattr(saving, "save_file", break_off)
    monkeypatch.setattr("hf_carryover.CarryoverDrafterModel.save_pretrained", break_off)

    with pytest.raises(type(error)):
        convert_drafter(tmp_path / "ours", tmp_path / "deep" / "out" if to == "z-lab" else tmp_path / "out", to=to)

    assert seen
    assert list(tmp_path.rglob("*out*")) == []


def test_a_folder_that_appeared_meanwhile_is_kept(tmp_path, monkeypatch):
    make_zlab().save_pretrained(tmp_path / "ours")
    monkeypatch.setattr(saving, "write_side_file", lambda *_: (tmp_path / "out").mkdir())

    with pytest.raises(FileExistsError, match="already there"):
        convert_drafter(tmp_path / "ours", tmp_path / "out", to="z-lab")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "out"]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.all
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case", [case for case in VARIANTS if case[0] == "z-lab"], ids=["plain", "scaled", "sliding", "causal"]
)
def test_the_package_dflash_loads_a_zlab_export_with_our_logits(case, target, tmp_path):
    theirs = pytest.importorskip("dflash.model", reason="run `make test-all`, which installs dflash")
    original = case[1]()
    original.save_pretrained(tmp_path / "ours")
    convert_drafter(tmp_path / "ours", tmp_path / "out", to="z-lab", target=target)

    model, info = theirs.DFlashDraftModel.from_pretrained(tmp_path / "out", output_loading_info=True)

    assert (set(info["missing_keys"]), set(info["unexpected_keys"])) == (set(), set())
    ids, states, anchor = a_block(target)
    block = torch.full((1, 5), 60)
    block[0, 0] = ids[0, anchor]
    scale = float(theirs._draft_value(model.config, "input_embedding_scale", 1.0))
    with torch.no_grad():
        hidden = model.eval()(
            target_hidden=theirs.extract_context_feature(states, model.target_layer_ids)[:, :anchor],
            noise_embedding=theirs._raw_input_embeddings(target, block, scale),
            position_ids=torch.arange(anchor + 5)[None],
        )
        logits = model.compute_logits(hidden[:, 1:], target.lm_head)
    torch.testing.assert_close(block_logits(original, target, ids, states, anchor), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.all
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", [n for n, case in enumerate(VARIANTS) if case[0] == "speculators"])
def test_the_package_speculators_loads_an_export_with_our_logits(number, target, tmp_path):
    original = VARIANTS[number][1]()
    original.save_pretrained(tmp_path / "ours")

    convert_drafter(tmp_path / "ours", tmp_path / "out", to="speculators", target=target)

    block = a_block(target)
    theirs = their_logits(tmp_path / "out", *block)
    torch.testing.assert_close(block_logits(original, target, *block), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_tokens_change_nothing_about_those_that_stay(kind, target, tmp_path):
    whole = make_drafter(kind)
    whole.save_pretrained(tmp_path / "whole")
    ids = torch.tensor([0, 3, 4, 17, 60])

    drafter = convert_drafter(tmp_path / "whole", tmp_path / "small", target=target, token_ids=ids)

    loaded = load_drafter(tmp_path / "small", target=target)
    assert (drafter.config.draft_vocab_size, loaded.draft_vocab_ids.tolist()) == (5, ids.tolist())
    hidden = torch.randn(1, 4, 32)
    full, few = (d.slot_logits(hidden, d.proposal_head(target.lm_head)) for d in (whole, loaded))
    assert torch.allclose(full[..., ids], few, atol=1e-6)
    if whole.markov_head is not None:
        biases = [d.markov_head(torch.tensor([7]), hidden[:, 0], None)[0] for d in (whole, loaded)]
        assert torch.allclose(biases[0][:, ids], biases[1], atol=1e-6)
    other = [3, 60] if whole.markov_head is not None else [5, 60]  # without a Markov head any token has a row
    again = restrict_vocabulary(loaded, torch.tensor(other))
    again.fc.weight.data.zero_()
    assert again.draft_vocab_ids.tolist() == other
    assert loaded.fc.weight.any()  # a copy


@pytest.mark.parametrize("ids", [[], [3, 3], [4, 2], [3, 61], [-1, 3], [5]], ids=str)
def test_a_vocabulary_that_the_drafter_lacks_is_refused(ids):
    drafter = make_drafter("markov-vanilla", draft_vocab_size=5)
    drafter.draft_vocab_ids.copy_(torch.tensor([0, 2, 3, 4, 60]))

    with pytest.raises(
        ValueError, match=r"Expected increasing ids of tokens that the drafter has rows for \(5 of 61\)"
    ):
        restrict_vocabulary(drafter, torch.tensor(ids, dtype=torch.long))
