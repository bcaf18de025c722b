import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from hf_carryover import CarryoverDrafterConfig
from tests.fakes import MASK, VOCAB, drafter_config

REQUIRED = (
    "block_size", "mask_token_id", "target_layer_ids", "sample_from_anchor", "vocab_size", "hidden_size",
    "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rope_parameters",
)  # fmt: skip


def fields(**overrides):
    return {name: value for name in REQUIRED if (value := getattr(drafter_config(), name)) is not None} | overrides


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_an_error_that_names_it(name):
    """z-lab/dflash#156 and #157; sgl-project/sglang#37475; NVIDIA-NeMo/Automodel#2461."""
    incomplete = fields()
    del incomplete[name]

    with pytest.raises(TypeError, match=f"Missing required field - '{name}'"):
        CarryoverDrafterConfig(**incomplete)


def test_a_misspelt_field_is_an_error_that_names_it_and_the_right_one():
    with pytest.raises(ValueError, match=r"got also \['markov_rnk'\]; did you mean \['markov_rank'\]\?"):
        CarryoverDrafterConfig(**fields(markov_rnk=4))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_size": 1}, r"`block_size` must be at least 2 \(one anchor, one draft\), got 1"),
        (
            {"block_size": 0, "sample_from_anchor": True},
            r"`block_size` must be at least 1 \(the anchor drafts\), got 0",
        ),
        ({"block_size": "5"}, "Field 'block_size' expected int, got str"),
        ({"mask_token_id": VOCAB}, f"`mask_token_id` must be in 0..{VOCAB - 1}, got {VOCAB}"),
        ({"target_layer_ids": []}, "`target_layer_ids` must be increasing"),
        ({"target_layer_ids": [2, 2]}, r"`target_layer_ids` must be increasing .* got \[2, 2\]"),
        ({"target_layer_ids": [-2]}, "`target_layer_ids` must be increasing layer ids from -1 on"),
        ({"target_layer_ids": [1, 3], "num_target_layers": 4}, r"below the target's last layer .* 3, got \[1, 3\]"),
        ({"hidden_size": 0}, "`hidden_size` must be at least 1, at most 262144, got 0"),
        ({"num_attention_heads": 3}, "`num_attention_heads` must be a multiple of 2 key/value heads, got 3"),
        ({"draft_vocab_size": VOCAB + 1}, f"`draft_vocab_size` must be in 1..{VOCAB}"),
        ({"layer_types": ["full_attention"]}, "`layer_types` must name"),
        (
            {"layer_types": ["sliding_attention"] * 2},
            "`sliding_window` must be at least 1 with sliding layers, got None",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "`partial_rotary_factor` must be 1.0",
        ),
        (
            {"markov_head_type": "gru", "markov_rank": 4},
            "`markov_head_type` must be None, vanilla, gated, rnn, got 'gru'",
        ),
        ({"markov_head_type": "rnn"}, "`markov_rank` must be positive with a Markov head, 0 without, got 0"),
        ({"markov_rank": 4}, "`markov_rank` must be positive with a Markov head, 0 without, got 4"),
        ({"confidence_head_with_markov": True}, "`confidence_head_with_markov` must come with"),
    ],
)
def test_a_wrong_value_is_an_error_that_says_expected_and_found(wrong, message):
    with pytest.raises(StrictDataclassError, match=message):
        CarryoverDrafterConfig(**fields(**wrong))


def test_the_layout_decides_how_many_drafts_a_block_holds():
    """vllm-project/speculators#456."""
    assert drafter_config("dflash", block_size=8).num_drafts == 7
    assert drafter_config("markov-vanilla", block_size=8).num_drafts == 8


@pytest.mark.parametrize("kind", ["dflash", "markov-rnn"])
def test_config_survives_a_save_and_is_found_by_its_model_type(kind, tmp_path):
    """vllm-project/vllm#51655; jundot/omlx#2587."""
    config = drafter_config(kind, enable_confidence_head=True, eos_token_id=[3, 4])

    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)

    assert type(loaded) is CarryoverDrafterConfig
    assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}


def test_a_field_that_someone_edited_into_the_file_is_refused(tmp_path):
    drafter_config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sinks": True}))

    with pytest.raises(ValueError, match=r"got also \['sinks'\]; remove them"):
        AutoConfig.from_pretrained(tmp_path)


def test_a_mask_token_that_is_also_end_of_text_is_warned_about(caplog):
    from transformers.utils import logging

    logging.enable_propagation()
    drafter_config(eos_token_id=[5, MASK])
    logging.disable_propagation()

    assert f"`mask_token_id` {MASK} is also bos, eos or pad" in caplog.text


def test_a_config_that_was_made_wrong_is_not_saved(tmp_path):
    config = CarryoverDrafterConfig(**fields())
    config.block_size = 0

    with pytest.raises(StrictDataclassError, match="block_size"):
        config.save_pretrained(tmp_path)

    assert not (tmp_path / "config.json").exists()


def test_whole_numbers_in_public_files_fit_fields_of_fractions(tmp_path):
    whole = dict.fromkeys(("attention_dropout", "initializer_range"), 0) | {"rms_norm_eps": 1, "output_multiplier": 2}
    whole |= {"input_embedding_scale": 3, "final_logit_softcapping": 30}
    CarryoverDrafterConfig(**fields(**whole)).save_pretrained(tmp_path)

    loaded = CarryoverDrafterConfig.from_pretrained(tmp_path)

    assert {name: getattr(loaded, name) for name in whole} == whole
