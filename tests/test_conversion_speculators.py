import json

import pytest
import torch

from hf_carryover import load_dflash, load_drafter
from tests.conversion_fakes import a_block, block_logits, edit_tensors, make_dspark, write_speculators_folder
from tests.fakes import make_drafter, make_target, plain, prompt


def make_subset(kind="dflash", **overrides):
    """A drafter that proposes every third token."""
    drafter = make_drafter(kind, draft_vocab_size=20, input_embedding_scale=1.0, **overrides)
    drafter.draft_vocab_ids.copy_(torch.arange(0, 60, 3))
    return drafter


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_drafter(input_embedding_scale=1.0),
        make_subset,
        lambda: make_dspark("markov-gated"),
        lambda: make_subset("markov-rnn"),
        lambda: make_dspark("dflash"),
    ],
    ids=["dflash", "draft-vocabulary", "dspark", "dspark-draft-vocabulary", "dspark-without-markov-head"],
)
def test_a_speculators_folder_gives_the_same_drafter_that_carries_nothing(make, tmp_path):
    original, target, ids = make(), make_target(), prompt()
    write_speculators_folder(tmp_path, original, target)

    drafter = load_drafter(tmp_path, target=target)

    original.carry_enabled = False
    texts = [plain(target, input_ids=ids, assistant_model=model) for model in (original, drafter)]
    assert torch.equal(*texts)
    assert [r.drafted_ids for r in drafter.last_stats.rounds] == [r.drafted_ids for r in original.last_stats.rounds]
    assert drafter.config.target_layer_ids == [0, 2]
    assert drafter.config.num_drafts == original.config.num_drafts
    assert not drafter.carry_enabled


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "dflash2"}, r"got 'dflash2'; other drafters, DFlash 2 \(dflash2\) among them"),
        ({"speculators_model_type": "eagle3"}, "Expected `speculators_model_type` dflash or dspark .* got 'eagle3'"),
        ({"sample_from_anchor": ...}, r"Expected the fields \['sample_from_anchor'\]"),
        ({"aux_hidden_state_layer_ids": None}, r"Expected the fields \['aux_hidden_state_layer_ids'\]"),
        ({"mask_token_id": None}, r"Expected the fields \['mask_token_id'\]"),
        ({"transformer_layer_config": {}}, r"Expected the fields \['vocab_size', 'hidden_size'"),
        ({"transformer_layer_config": 3}, "Expected an object as `transformer_layer_config` .* got int"),
        ({"aux_hidden_state_layer_ids": ["1"]}, r"a list of integers as `aux_hidden_state_layer_ids` .* \['1'\]"),
        ({"markov_rank": 3}, r"Expected fields of a speculators dflash drafter in .* got also \['markov_rank'\]"),
        ({"target_hidden_size": 64}, "got `target_hidden_size` 64 and `hidden_size` 32"),
        ({"speculators_model_type": "dspark"}, r"Expected the fields \['markov_rank', 'enable_confidence_head'\]"),
        (
            {"speculators_model_type": "dspark", "markov_rank": 6, "markov_head_type": "rnn",
             "enable_confidence_head": False},
            "Expected `sample_from_anchor` true beside `markov_head_type` rnn",
        ),
        ({"draft_vocab_size": 70}, "`draft_vocab_size` must be in 1..61, got 70"),
    ],
)  # fmt: skip
def test_a_speculators_config_that_would_need_a_guess_is_refused(changes, message, tmp_path):
    write_speculators_folder(tmp_path, make_drafter(input_embedding_scale=1.0), make_target(), **changes)

    with pytest.raises(ValueError, match=message):
        load_dflash(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "speculators places their windows otherwise"),
        ({"attention_sinks": True}, r"Expected fields of a speculators drafter in .* got also \['attention_sinks'\]"),
    ],
)
def test_nested_layers_that_compute_otherwise_are_refused(changes, message, tmp_path):
    write_speculators_folder(tmp_path, make_drafter(input_embedding_scale=1.0), make_target())
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["transformer_layer_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(raw))

    with pytest.raises(ValueError, match=message):
        load_dflash(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("d2t"), r"Expected `d2t` with 20 integers in .* got \[0\] of torch.float32"),
        (lambda t: t.update(d2t=t["d2t"][:7]), r"Expected `d2t` with 20 integers in .* got \[7\] of torch.int64"),
        (lambda t: t["d2t"].add_(5), "Expected increasing token ids below 61 from `d2t`"),
        (lambda t: t["d2t"][3].sub_(6), "Expected increasing token ids below 61 from `d2t`"),
        (lambda t: t["t2d"].logical_not_(), "Expected `t2d` to choose the tokens of `d2t`"),
        (lambda t: t["lm_head.weight"].neg_(), "Expected `lm_head.weight` in .* to equal the target's own"),
    ],
    ids=["no-mapping", "short-mapping", "beyond-the-vocabulary", "not-increasing", "another-mask", "another-head"],
)
def test_a_draft_vocabulary_that_does_not_fit_is_refused(edit, message, tmp_path):
    target = make_target()
    write_speculators_folder(tmp_path, make_subset(), target)
    edit_tensors(tmp_path, edit)

    with pytest.raises(ValueError, match=message):
        load_dflash(tmp_path, target=target)


def test_copies_for_training_and_a_mapping_of_all_tokens_are_dropped(tmp_path):
    target = make_target()
    write_speculators_folder(tmp_path, make_drafter(input_embedding_scale=1.0), target)
    head = target.lm_head.weight.detach().clone()
    mapping = {"d2t": torch.zeros(61, dtype=torch.int64), "t2d": torch.ones(61, dtype=torch.bool)}
    edit_tensors(
        tmp_path,
        lambda t: t.update(mapping | {"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": head}),
    )

    assert load_dflash(tmp_path, target=target).config.draft_vocab_size is None


def make_speculators_folder(folder, target_folder, *, kind, **fields):
    """A random drafter of the package, as its own training saves one."""
    package = pytest.importorskip("speculators", reason="run `make test-all`, which installs speculators")
    from speculators.proposals import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    layers = Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
    )  # fmt: skip
    layers._attn_implementation = "eager"
    use = package.SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
        default_proposal_method="greedy",
        verifier=package.VerifierConfig.from_pretrained(str(target_folder)),
    )
    config_class, model_class = {
        "dflash": (package.DFlashSpeculatorConfig, package.DFlashDraftModel),
        "dspark": (package.DSparkSpeculatorConfig, package.DSparkDraftModel),
    }[kind]
    facts = {"draft_vocab_size": 61, "block_size": 5, "aux_hidden_state_layer_ids": [1, 3], "mask_token_id": 60}
    model = model_class(config_class(transformer_layer_config=layers, speculators_config=use, **(facts | fields)))
    if model.use_draft_vocab:
        ids = torch.arange(1, 61, 3)
        model.load_vocab_mappings(torch.zeros(61, dtype=torch.bool).index_fill(0, ids, True), ids - torch.arange(20))
    model.load_verifier_weights()
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)


@torch.no_grad()
def their_logits(folder, ids, states, anchor):
    """The package's logits of one block, ``[1, K, V]``, from its training pass with a single anchor."""
    package = pytest.importorskip("speculators", reason="run `make test-all`, which installs speculators")
    config = package.SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    model = package.SpeculatorModel.from_pretrained(str(folder), config=config).eval()
    features = torch.cat([states[i] for i in config.aux_hidden_state_layer_ids], dim=-1)
    only_anchor = torch.zeros(ids.shape).index_fill(1, torch.tensor([anchor]), 1.0)
    hidden, logits, *_ = model._backbone_forward(
        features, ids, only_anchor, torch.zeros(1, ids.shape[1], 32), torch.zeros_like(ids), max_anchors=1
    )
    first, size = (0 if config.sample_from_anchor else 1), config.block_size
    if type(model).__name__ == "DSparkDraftModel" and model.markov_head is not None:
        text = ids[:, anchor : anchor + size]
        before = text if first == 0 else torch.cat([text[:, :1], text[:, :-1]], dim=1)
        logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
    return logits[:, first:]


FORMS = [
    ("dflash", {}),
    ("dflash", {"draft_vocab_size": 20}),
    ("dflash", {"sample_from_anchor": True}),
    ("dspark", {"markov_rank": 6}),
    ("dspark", {"markov_rank": 6, "sample_from_anchor": False, "enable_confidence_head": False}),
    ("dspark", {"markov_rank": 6, "markov_head_type": "gated", "confidence_head_with_markov": False}),
    ("dspark", {"markov_rank": 6, "markov_head_type": "rnn", "draft_vocab_size": 20}),
    ("dspark", {"markov_rank": 0, "confidence_head_with_markov": False}),
]


@pytest.mark.all
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "fields"), FORMS, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "plain")
def test_a_folder_of_the_package_speculators_has_its_logits(kind, fields, tmp_path):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    make_speculators_folder(tmp_path / "drafter", tmp_path / "target", kind=kind, **fields)

    drafter = load_dflash(tmp_path / "drafter", target=target)

    block = a_block(target)
    theirs = their_logits(tmp_path / "drafter", *block)
    torch.testing.assert_close(block_logits(drafter, target, *block), theirs, rtol=1e-5, atol=1e-5)
