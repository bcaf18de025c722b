import copy
import importlib
import inspect
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import accelerate
import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    QuantizedCache,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

from hf_carryover import CarryoverDrafterModel, decoding, install, uninstall
from hf_carryover.cache_carryover import MEMORIES
from hf_carryover.decoding import MARK, PRIVATE_NAMES
from hf_carryover.modeling_carryover import CORE_FILES
from tests.fakes import (
    KINDS,
    TARGETS,
    VOCAB,
    ScriptedDrafter,
    drafter_config,
    make_drafter,
    make_target,
    plain,
    prompt,
)

EVERY_COUNT = [0, 1, 2, 3, 4, 5]


def scripted(kind, truth, counts, **overrides):
    drafter = make_drafter(kind, cls=ScriptedDrafter, **overrides)
    drafter.follow(truth, counts)
    return drafter


def accepted(drafter):
    """Accepted counts, without the last round, which the length limit may cut."""
    return [r.num_accepted for r in drafter.last_stats.rounds][:-1]


def counts_asked_for(drafter, counts=EVERY_COUNT):
    longest = drafter.config.num_drafts
    return [min(count, longest) for count in counts]


class Recorder(BaseStreamer):
    def __init__(self):
        self.puts, self.num_ends = [], 0

    def put(self, value):
        self.puts.append(value)

    def end(self):
        self.num_ends += 1


# Law 1: greedy output with any drafter equals the target's own.


@pytest.mark.parametrize("carry", [False, True], ids=["carry-off", "carry-on"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", TARGETS)
def test_greedy_text_equals_the_targets_own_at_every_accepted_count(architecture, kind, carry):
    """Pushkinist/rMLX#513, huggingface/transformers#27540, #46790, #46629 and #47153."""
    target, ids = make_target(architecture), prompt()
    truth = plain(target, input_ids=ids)
    drafter = scripted(kind, truth, EVERY_COUNT)
    drafter.carry_enabled = carry

    text = plain(target, input_ids=ids, assistant_model=drafter)

    assert torch.equal(text, truth)
    assert accepted(drafter)[: len(EVERY_COUNT)] == counts_asked_for(drafter)
    assert (drafter.last_stats.carried_rows > 0) == carry


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_equals_the_targets_own_with_random_weights(kind, block_size):
    """huggingface/transformers#30042; sgl-project/sglang#34959."""
    target = make_target()
    for length in (1, 7, 90):
        ids = prompt(length)
        drafter = make_drafter(kind, block_size=block_size)

        text = plain(target, input_ids=ids, assistant_model=drafter)

        assert torch.equal(text, plain(target, input_ids=ids))
        assert len(drafter.last_stats.rounds) > 4


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations_give_the_same_text(attention):
    target, ids = make_target(), prompt()
    truth = plain(target, input_ids=ids)
    target.set_attn_implementation(attention)
    drafter = scripted("dflash", truth, EVERY_COUNT)
    drafter.set_attn_implementation(attention)

    assert torch.equal(plain(target, input_ids=ids, assistant_model=drafter), truth)
    assert accepted(drafter)[:6] == counts_asked_for(drafter)


@pytest.mark.parametrize(
    ("target_dtype", "drafter_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
@pytest.mark.parametrize("kind", ["dflash", "markov-rnn"])
def test_target_and_drafter_may_have_different_dtypes(kind, target_dtype, drafter_dtype):
    """z-lab/dflash#4; SafeAILab/EAGLE#75 and #212; vllm-project/vllm#55250; InternLM/lmdeploy#4991."""
    target, ids = make_target().to(target_dtype), prompt()
    truth = plain(target, input_ids=ids, max_new_tokens=30)
    drafter = scripted(kind, truth, EVERY_COUNT).to(drafter_dtype)
    unscripted = make_drafter(kind).to(drafter_dtype)

    text = plain(target, input_ids=ids, max_new_tokens=30, assistant_model=drafter)
    plain(target, input_ids=ids, max_new_tokens=20, assistant_model=unscripted, do_sample=True)

    assert drafter.fc.weight.dtype == drafter_dtype
    if target_dtype in (torch.bfloat16, torch.float16):
        # A block and single tokens round differently there: the texts may part at a near-tie, and only there.
        assert_parts_at_a_near_tie_only(target, text, truth)
        assert accepted(drafter)[:3] == [0, 1, 2]
    else:
        assert torch.equal(text, truth)
        assert accepted(drafter)[:6] == counts_asked_for(drafter)


def assert_parts_at_a_near_tie_only(target, text, truth):
    if not torch.equal(text, truth):
        first = int((text != truth).int().argmax())
        top = target(truth[:, :first]).logits[0, -1].float().topk(2).values
        assert top[0] - top[1] <= 4 * 2**-8 * top[0].abs()


def test_left_padding_holes_and_shifted_positions_leave_text_and_memory_right():
    """huggingface/transformers#46936, #46124 and #26892; ggml-org/llama.cpp#26884 and #27342."""
    target, ids = make_target(), prompt(9)
    mask = torch.ones_like(ids)
    mask[0, :2], mask[0, 4] = 0, 0
    positions = (100 + mask.cumsum(-1) - 1).clamp(min=100)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    truth = plain(target, **inputs)
    drafter = make_drafter(cls=ScriptedDrafter)
    # Nine ids, six of them text: the anchor stands at index 9 and position 106.
    drafter.follow(truth, EVERY_COUNT, first_position=97)

    assert torch.equal(plain(target, **inputs, assistant_model=drafter), truth)
    assert accepted(drafter)[:5] == counts_asked_for(drafter)[:5]
    assert drafter.calls[0]["position_ids"][0].tolist() == [100, 101, 102, 103, 104, 105, *range(106, 111)]
    with torch.no_grad():
        hidden = target(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True).hidden_states
    features = torch.cat([hidden[1], hidden[3]], dim=-1)[:, mask[0].bool()]
    torch.testing.assert_close(drafter.calls[0]["context_hidden_states"], features, rtol=1e-4, atol=1e-5)


def test_a_prompt_of_embeddings_gives_the_targets_text():
    target = make_target()
    embeds = target.get_input_embeddings()(prompt())
    truth = plain(target, inputs_embeds=embeds)
    drafter = make_drafter(cls=ScriptedDrafter)
    # The text returned starts after the prompt, whose seven rows the memory holds all the same.
    drafter.follow(truth, EVERY_COUNT, first_position=7)

    assert torch.equal(plain(target, inputs_embeds=embeds, assistant_model=drafter), truth)
    assert accepted(drafter)[:6] == counts_asked_for(drafter)
    assert drafter.calls[0]["position_ids"][0].tolist() == list(range(12))


def test_a_static_cache_gives_the_targets_text():
    """huggingface/transformers#30312, #32946 and #45745."""
    target, ids = make_target(), prompt()
    truth = plain(target, input_ids=ids)
    drafter = scripted("dflash", truth, EVERY_COUNT)

    text = plain(target, input_ids=ids, assistant_model=drafter, cache_implementation="static", disable_compile=True)

    assert torch.equal(text, truth)
    assert accepted(drafter)[:5] == counts_asked_for(drafter)[:5]


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 12, "eos_token_id": 1},
        {"min_length": 20, "eos_token_id": 1},
        {"suppress_tokens": [3, 4, 5]},
        {"bad_words_ids": [[48], [6, 54]]},
        {"forced_eos_token_id": 9},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("kind", ["dflash", "markov-vanilla"])
def test_logits_processors_see_what_they_see_without_a_drafter(kind, options):
    """sgl-project/sglang#28242; NVIDIA/TensorRT-LLM#17701; huggingface/transformers#40976 and #30263."""
    target, ids = make_target(), prompt()
    truth = plain(target, input_ids=ids, **options)
    drafter = scripted(kind, truth, [2, 4, 0, 5])

    assert torch.equal(plain(target, input_ids=ids, assistant_model=drafter, **options), truth)
    assert torch.equal(plain(target, input_ids=ids, assistant_model=make_drafter(kind), **options), truth)
    assert max(accepted(drafter)) >= 2


# Stopping and streaming.


@pytest.mark.parametrize("offset", range(1, 12))
@pytest.mark.parametrize("as_list", [False, True], ids=["one-eos", "two-eos"])
def test_end_of_text_stops_at_every_offset_inside_a_block(offset, as_list):
    """huggingface/transformers#47912, #47931, #48002, #48981 and #48039; intel/ipex-llm#11896."""
    target, ids = make_target(), prompt()
    truth = plain(target, input_ids=ids)
    end = int(truth[0, ids.shape[1] + offset])
    drafter, streamer = scripted("dflash", truth, [9]), Recorder()
    options = {"eos_token_id": [end, VOCAB - 1] if as_list else end}

    text = plain(target, input_ids=ids, assistant_model=drafter, streamer=streamer, **options)

    assert torch.equal(text, plain(target, input_ids=ids, **options))
    assert int(text[0, -1]) == end
    assert torch.cat([put.flatten() for put in streamer.puts]).tolist() == text[0].tolist()
    assert drafter.last_stats.num_tokens == text.shape[1] - ids.shape[1] - 1


class StopAfter(StoppingCriteria):
    """Stops at a token; remembers every text and the number of scores it was asked about."""

    def __init__(self, token):
        self.token, self.asked = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append((input_ids[0].tolist(), None if scores is None else len(scores)))
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("offset", range(1, 12))
def test_a_custom_criterion_is_asked_what_plain_generation_asks_and_stops_inside_a_block(offset, sample):
    target, ids = make_target(), prompt()
    truth = plain(target, input_ids=ids)
    token = int(truth[0, ids.shape[1] + offset])
    drafter, streamer = scripted("dflash", truth, [9]), Recorder()
    # Near-zero temperature: sampling takes its own path to the same text.
    options = {"do_sample": True, "temperature": 1e-6} if sample else {}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ours, theirs = StopAfter(token), StopAfter(token)

    out = plain(
        target,
        input_ids=ids,
        assistant_model=drafter,
        streamer=streamer,
        stopping_criteria=StoppingCriteriaList([ours]),
        **options,
    )
    expected = plain(target, input_ids=ids, stopping_criteria=StoppingCriteriaList([theirs]), **options)

    assert torch.equal(out.sequences, expected.sequences)
    assert ours.asked == theirs.asked
    assert len(out.scores) == len(out.logits) == len(expected.scores)
    assert out.cache.get_seq_length() == expected.cache.get_seq_length()
    assert torch.cat([put.flatten() for put in streamer.puts]).tolist() == out.sequences[0].tolist()
    assert drafter.last_stats.num_tokens == out.sequences.shape[1] - ids.shape[1] - 1


@pytest.mark.parametrize("offset", range(1, 6))
def test_hidden_states_and_attentions_end_with_the_text_inside_a_block(offset):
    target, ids = make_target(), prompt()
    target.set_attn_implementation("eager")
    truth = plain(target, input_ids=ids)
    stop = StopAfter(int(truth[0, ids.shape[1] + offset]))
    options = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}
    options["stopping_criteria"] = StoppingCriteriaList([stop])

    out = plain(target, input_ids=ids, assistant_model=scripted("dflash", truth, [9]), **options)

    expected = plain(target, input_ids=ids, **options)
    assert len(out.hidden_states) == len(out.attentions) == len(expected.hidden_states)
    torch.testing.assert_close(out.hidden_states[-1][-1], expected.hidden_states[-1][-1])


@pytest.mark.parametrize("offset", range(1, 12))
def test_bare_ids_end_at_the_stop_inside_a_block_and_the_users_cache_fits_them(offset):
    target, ids = make_target(), prompt()
    truth = plain(target, input_ids=ids)
    stop = StopAfter(int(truth[0, ids.shape[1] + offset]))
    cache = DynamicCache(config=target.config)

    text = plain(
        target,
        input_ids=ids,
        cache=cache,
        assistant_model=scripted("dflash", truth, [9]),
        stopping_criteria=StoppingCriteriaList([stop]),
    )

    assert torch.equal(text, plain(target, input_ids=ids, stopping_criteria=StoppingCriteriaList([stop])))
    assert cache.get_seq_length() == text.shape[1] - 1


def test_the_streamer_gets_the_prompt_then_one_token_at_a_time_then_one_end():
    """What plain generation streams: Blaizzy/mlx-vlm#1778; sawfwair/mere-run#438; Aryagm/dflash-mlx#1."""
    target, ids = make_target(), prompt()
    truth = plain(target, input_ids=ids)
    with_drafter, without = Recorder(), Recorder()

    plain(target, input_ids=ids, assistant_model=scripted("dflash", truth, EVERY_COUNT), streamer=with_drafter)
    plain(target, input_ids=ids, streamer=without)

    assert [put.tolist() for put in with_drafter.puts] == [put.tolist() for put in without.puts]
    assert with_drafter.num_ends == without.num_ends == 1


def test_a_streamer_hears_of_the_end_also_after_a_refusal():
    drafter, streamer = make_drafter(), Recorder()
    drafter.draft_length = 0

    with pytest.raises(ValueError, match="draft_length"):
        plain(make_target(), input_ids=prompt(), assistant_model=drafter, streamer=streamer)

    assert streamer.num_ends == 1


def test_a_streamer_hears_of_the_end_also_after_an_error():
    class Failing(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 5:
                raise RuntimeError("no reader")

    streamer = Failing()

    with pytest.raises(RuntimeError, match="no reader"):
        plain(make_target(), input_ids=prompt(), assistant_model=make_drafter(), streamer=streamer)

    assert streamer.num_ends == 1


# What generate returns.


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_returned_dictionary_is_plain_generations(attention):
    target, ids = make_target(attn_implementation=attention), prompt()
    truth = plain(target, input_ids=ids, max_new_tokens=16)
    options = {
        "max_new_tokens": 16,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": attention == "eager",
    }
    drafter = scripted("dflash", truth, EVERY_COUNT)

    ours = plain(target, input_ids=ids, assistant_model=drafter, **options)
    theirs = plain(target, input_ids=ids, **options)

    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.scores, theirs.scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.hidden_states, theirs.hidden_states, rtol=1e-4, atol=1e-4)
    assert len(ours.hidden_states[0]) == 5
    assert ours.cache.get_seq_length() == theirs.cache.get_seq_length()
    if attention == "eager":
        assert [a[0].shape[2] for a in ours.attentions] == [a[0].shape[2] for a in theirs.attentions]
    assert accepted(drafter)[:4] == counts_asked_for(drafter)[:4]


def test_only_the_feature_layers_are_kept_and_the_head_runs_on_few_rows():
    """huggingface/transformers#48081 and #34796."""
    target, ids = make_target(), prompt(50)
    drafter, kept, head_rows = make_drafter(), [], []
    target.register_forward_hook(
        lambda *args: kept.append([i for i, h in enumerate(args[2].hidden_states) if h is not None])
    )
    target.lm_head.register_forward_hook(lambda *args: head_rows.append(args[2].shape[1]))

    plain(target, input_ids=ids, assistant_model=drafter)

    assert {tuple(ids) for ids in kept} == {(1, 3)}
    assert max(head_rows) == drafter.config.num_drafts + 1


# Adapters, threads, state.


def test_an_adapted_target_drafts_with_its_own_states():
    """huggingface/transformers#23686; predibase/lorax#570; vllm-project/vllm#4872."""
    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False)
    target, ids = get_peft_model(make_target(), lora).eval(), prompt()
    truth = plain(target, input_ids=ids)
    with target.disable_adapter():
        assert not torch.equal(truth, plain(target, input_ids=ids))
    for kind in KINDS:
        drafter = scripted(kind, truth, EVERY_COUNT)

        assert torch.equal(plain(target, input_ids=ids, assistant_model=drafter), truth)
        assert accepted(drafter)[:6] == counts_asked_for(drafter)
        assert torch.equal(plain(target, input_ids=ids, assistant_model=make_drafter(kind)), truth)


def test_an_adapted_drafter_drafts():
    """vllm-project/vllm#11966; sgl-project/sglang#28395."""
    target, ids = make_target(), prompt()
    drafter = make_drafter()
    bare = plain(target, input_ids=ids, assistant_model=drafter)
    adapted = get_peft_model(drafter, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).eval()
    adapted.carry_enabled = False
    adapted.draft_length = 2

    text = plain(target, input_ids=ids, assistant_model=adapted)

    assert torch.equal(text, bare)
    assert adapted.last_stats.carried_rows == 0
    assert max(len(r.drafts) for r in adapted.last_stats.rounds) == 2


def test_named_adapters_of_a_drafter_may_be_switched_between_calls(tmp_path):
    """Each drafts as its merged copy does, also after saving and loading; the text is always the target's."""
    target, ids, lora = (
        make_target(),
        prompt(),
        {"r": 4, "target_modules": ["q_proj", "fc"], "init_lora_weights": False},
    )
    truth = plain(target, input_ids=ids)
    torch.manual_seed(5)
    adapted = get_peft_model(make_drafter(), LoraConfig(**lora), "first")
    adapted.add_adapter("second", LoraConfig(**lora))
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_drafter(), tmp_path / "first", "first")
    loaded.load_adapter(tmp_path / "second", "second")

    def drafts(assistant):
        assert torch.equal(plain(target, input_ids=ids, assistant_model=assistant), truth)
        return [r.drafted_ids for r in assistant.last_stats.rounds]

    found = {}
    for name in ("first", "second", "first"):
        for model in (adapted.eval(), loaded.eval()):
            model.set_adapter(name)
            found.setdefault(name, []).append(drafts(model))
    with adapted.disable_adapter():
        bare = drafts(adapted)

    assert all(one == found["first"][0] for one in found["first"])
    assert found["second"][0] == found["second"][1]
    assert found["first"][0] != found["second"][0] != bare == drafts(make_drafter())
    adapted.set_adapter("second")
    assert drafts(adapted.merge_and_unload()) == found["second"][0]


def test_two_threads_with_two_drafters_do_not_disturb_each_other():
    """sgl-project/sglang#36548; ggml-org/llama.cpp#28286 and #27117; Anbeeld/beellama.cpp#33."""
    target, texts = make_target(), {}
    inputs, drafters = [prompt(7, seed=1), prompt(12, seed=2)], [make_drafter(seed=index) for index in range(2)]

    def run(index):
        texts[index] = plain(target, input_ids=inputs[index], assistant_model=drafters[index])
        return [r.drafted_ids for r in drafters[index].last_stats.rounds]

    alone = [run(index) for index in range(2)]
    texts.clear()
    with ThreadPoolExecutor() as threads:
        together = list(threads.map(run, range(2)))

    # The text is the target's whatever is drafted; memory that is mixed up shows in the drafts.
    assert together == alone
    for index, ids in enumerate(inputs):
        assert torch.equal(texts[index], plain(target, input_ids=ids))


def test_new_ids_beside_a_filled_cache_continue_the_chat():
    target, ids = make_target(), prompt()
    options = {"return_dict_in_generate": True, "max_new_tokens": 10}
    texts = []
    for assistant in (None, make_drafter()):
        first = plain(target, input_ids=ids, assistant_model=assistant, **options)
        more = torch.cat([first.sequences[:, -1:], prompt(3, seed=9)], dim=1)
        mask = torch.ones(1, first.sequences.shape[1] + 3)
        texts.append(
            plain(target, input_ids=more, attention_mask=mask, cache=first.cache, assistant_model=assistant, **options)
        )

    assert torch.equal(texts[0].sequences, texts[1].sequences)


@pytest.mark.parametrize("fails", [False, True], ids=["a-good-call", "an-error-in-a-processor"])
def test_the_target_is_left_as_it_was_found(fails):
    """huggingface/transformers#28759, #40739 and #27833."""

    class Fails(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if fails and input_ids.shape[1] > 15:
                raise RuntimeError("processor")
            return scores

    target, drafter = make_target(), make_drafter()
    user_config = GenerationConfig(max_new_tokens=30, do_sample=False)
    target(prompt(), output_hidden_states=True)  # Transformers installs its own hooks for this once
    before = state_of(target), state_of(drafter), copy.deepcopy(user_config.to_dict())

    try:
        target.generate(
            prompt(),
            generation_config=user_config,
            assistant_model=drafter,
            logits_processor=LogitsProcessorList([Fails()]),
        )
    except RuntimeError:
        assert fails

    assert (state_of(target), state_of(drafter), user_config.to_dict()) == before


def state_of(model):
    ignored = {"_parameters", "_buffers", "_modules", "last_stats"}
    attributes = {name: repr(value) for name, value in vars(model).items() if name not in ignored}
    hooks = [(name, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()]
    tensors = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return attributes, hooks, tensors, model.config.to_dict()


# Every other kind of generation passes through untouched.


OTHER_WAYS = {
    "no-assistant": lambda target: {},
    "sampling": lambda target: {"do_sample": True},
    "beams": lambda target: {"num_beams": 2},
    "ordinary-assistant": lambda target: {"assistant_model": make_target(seed=8)},
    "prompt-lookup": lambda target: {"prompt_lookup_num_tokens": 3},
    "librarys-dflash": lambda target: {"assistant_model": make_drafter(), "speculation_type": "dflash"},
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_other_generation_behaves_as_if_we_were_not_installed(way):
    target, ids = make_target(), prompt()
    options = OTHER_WAYS[way](target) | {"return_dict_in_generate": True, "output_scores": True}
    results = []
    for setup in (uninstall, install):
        setup()
        torch.manual_seed(0)
        results.append(plain(target, input_ids=ids, **options))

    assert torch.equal(results[0].sequences, results[1].sequences)
    torch.testing.assert_close(results[0].scores, results[1].scores, rtol=0, atol=0)


UPDATES = {
    "by-place": lambda ask, self, outputs, kwargs, num_new: ask(self, outputs, kwargs, False, num_new),
    "by-name": lambda ask, self, outputs, kwargs, num_new: ask(
        self, outputs=outputs, model_kwargs=kwargs, is_encoder_decoder=False, num_new_tokens=num_new
    ),
    "not-the-librarys": lambda ask, *call: UPDATES["by-place"](vars(ask)[MARK], *call),
}


@pytest.mark.parametrize("way", UPDATES)
def test_targets_may_update_their_arguments_as_they_like(way, monkeypatch):
    """PaliGemma hands them on by place, Mllama by name; remote code may do without the library's method."""
    target, drafter, cache, ids = make_target(), make_drafter(), DynamicCache(), prompt()
    ask = vars(GenerationMixin)["_update_model_kwargs_for_generation"]

    def update(self, outputs, model_kwargs, is_encoder_decoder=False, num_new_tokens=1):
        return UPDATES[way](ask, self, outputs, model_kwargs, num_new_tokens)

    monkeypatch.setattr(type(target), "_update_model_kwargs_for_generation", update, raising=False)

    text = plain(target, input_ids=ids, assistant_model=drafter, attention_mask=torch.ones_like(ids), cache=cache)

    assert torch.equal(text, plain(target, input_ids=ids))
    assert (cache in MEMORIES) == (way != "not-the-librarys")


def test_ids_that_are_not_where_the_target_is_are_refused():
    options = {"generation_config": GenerationConfig(max_length=20), "stopping_criteria": [], "logits_processor": []}

    with pytest.raises(ValueError, match="expects ids on the target's device, cuda:0, got cpu; call"):
        decoding.check_inputs(prompt(), torch.device("cuda:0"), options)


@pytest.mark.parametrize("way", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 2}])
def test_our_drafter_under_another_chosen_way_is_not_touched(way):
    """These ignore the assistant; so must we."""
    target, drafter = make_target(), make_drafter()

    text = plain(target, input_ids=prompt(), assistant_model=drafter, **way)

    assert torch.equal(text, plain(target, input_ids=prompt()))
    assert drafter.last_stats is None


def test_candidates_equal_the_librarys_dflash_generator():
    """On a vocabulary of seven, where random drafts are accepted now and then."""
    target, ids, drafts = make_target(vocab_size=7), prompt() % 6, {}
    drafter = make_drafter(block_size=6, vocab_size=7, mask_token_id=6)
    drafter.carry_enabled = False
    head = target.lm_head.register_forward_hook(lambda *args: logits.append(args[2]))
    for way in ({}, {"speculation_type": "dflash"}):
        logits = []
        plain(target, input_ids=ids, assistant_model=drafter, max_new_tokens=90, **way)
        # The head runs on the prompt, then in turn on drafts and verified rows.
        drafts[bool(way)] = logits[1::2]
    head.remove()

    assert min(len(drafts[True]), len(drafts[False])) >= 20
    assert {r.num_accepted for r in drafter.last_stats.rounds} >= {0, 1}
    for ours, theirs in zip(drafts[False], drafts[True], strict=False):
        num_drafts = min(ours.shape[1], theirs.shape[1])
        torch.testing.assert_close(ours[:, :num_drafts], theirs[:, :num_drafts], rtol=1e-5, atol=1e-5)
        assert torch.equal(ours.argmax(-1)[:, :num_drafts], theirs.argmax(-1)[:, :num_drafts])


def test_the_seam_is_installed_once_and_taken_out_whole():
    uninstall()
    originals = [vars(GenerationMixin)[name] for name in PRIVATE_NAMES]
    install()
    install()
    wrappers = [vars(GenerationMixin)[name] for name in PRIVATE_NAMES]
    assert [vars(wrapper)[MARK] for wrapper in wrappers] == originals

    uninstall()

    assert [vars(GenerationMixin)[name] for name in PRIVATE_NAMES] == originals
    install()


def test_the_transformers_names_that_the_seam_relies_on_still_exist():
    uninstall()
    parameters = {name: set(inspect.signature(vars(GenerationMixin)[name]).parameters) for name in PRIVATE_NAMES}
    install()

    assert {"generation_mode", "generation_config", "generation_mode_kwargs"} <= parameters[
        "_validate_generation_mode"
    ]
    assert {
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "assistant_model",
        "streamer",
    } <= (parameters["_assisted_decoding"])
    assert "assistant_model" in parameters["_get_candidate_generator"]
    config = GenerationConfig()
    assert PreTrainedModel._is_stateful is False
    assert "_mask_length" in inspect.getsource(vars(vars(GenerationMixin)["generate"])["__wrapped__"])
    assert "_eos_token_tensor = " in inspect.getsource(GenerationMixin._prepare_special_tokens)
    for name in ("speculation_type", "prompt_lookup_num_tokens", "assistant_early_exit", "assistant_ensemble_weight",
                 "guidance_scale", "num_return_sequences"):  # fmt: skip
        assert getattr(config, name) is None
    assert not config.use_mtp


# Wrong pairs and options fail before the first token.

SYNTH_ID = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"vocab_size": 70}, "expects vocabulary size 70, got LlamaForCausalLM: 61"),
        ({"hidden_size": 16}, "expects hidden size 16, got LlamaForCausalLM: 32"),
        ({"num_target_layers": 9}, "expects 9 target layers, got LlamaForCausalLM: 4"),
        (
            {"target_layer_ids": [1, 3]},
            r"layers \[1, 3\] below the target's last, whose output is normalised, got 3",
        ),
        ({"target_layer_ids": [7]}, r"layers \[7\] below the target's last, whose output is normalised, got 3"),
    ],
    ids=["another-vocabulary", "another-width", "another-depth", "the-last-layer", "a-layer-out-of-range"],
)
def test_a_drafter_of_another_target_is_refused(overrides, message):
    """vllm-project/vllm#5203, #7252 and #13849; mlc-ai/mlc-llm#3212; sgl-project/sglang#24051."""
    streamer = Recorder()

    with pytest.raises(ValueError, match=message):
        plain(make_target(), input_ids=prompt(), assistant_model=make_drafter(**overrides), streamer=streamer)

    assert not streamer.puts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, r"expects greedy decoding or sampling \(num_beams=1\), got beam_search; leave that option"),
        ({"use_cache": False}, "got use_cache=False; leave that option or assistant_model out"),
        (
            {"assistant_ensemble_weight": 0.5},
            "got assistant_ensemble_weight; leave that option or assistant_model out",
        ),
        ({"dola_layers": "low"}, "got dola_layers; leave that option or assistant_model out"),
        ({"guidance_scale": 1.5}, "got guidance_scale; leave that option or assistant_model out"),
        (
            {"watermarking_config": SYNTH_ID, "do_sample": True},
            "got a SynthID watermarking_config; leave that option or assistant_model out",
        ),
        (
            {"num_return_sequences": 2, "do_sample": True},
            "got num_return_sequences; leave that option or assistant_model out",
        ),
        ({"input_ids": prompt().repeat(2, 1)}, r"expects one prompt at a time \(batch size 1\), got 2"),
    ],
    ids=["beams", "no-cache", "ensemble", "dola", "guidance", "synth-id", "several-sequences", "a-batch"],
)
def test_an_option_that_drafting_cannot_honour_is_refused(options, message):
    """Batches: huggingface/transformers#29769 and #32165; Blaizzy/mlx-vlm#1144; vllm-project/vllm#14645."""
    streamer = None if "num_beams" in options or "input_ids" in options else Recorder()

    with pytest.raises(ValueError, match=message):
        plain(make_target(), **({"input_ids": prompt()} | options), assistant_model=make_drafter(), streamer=streamer)

    assert streamer is None or not streamer.puts


@pytest.mark.parametrize("num_new", [None, 3], ids=["all-ids", "new-ids-without-a-mask"])
def test_ids_beside_a_filled_cache_that_would_be_misread_are_refused(num_new):
    target = make_target()
    first = plain(target, input_ids=prompt(), max_new_tokens=5, return_dict_in_generate=True)
    ids = torch.cat([first.sequences, prompt(2)], dim=1)
    ids = ids if num_new is None else ids[:, -num_new:]

    message = f"beside a filled cache, got {ids.shape[1]} ids, a mask of {ids.shape[1]} and 11 cached rows"
    with pytest.raises(ValueError, match=message):
        plain(target, input_ids=ids, cache=first.cache, assistant_model=make_drafter())


def test_embeddings_beside_a_filled_cache_which_the_loop_would_feed_twice_are_refused():
    target = make_target()
    first = plain(target, input_ids=prompt(), max_new_tokens=5, return_dict_in_generate=True)
    embeds = target.get_input_embeddings()(torch.cat([first.sequences, prompt(2)], dim=1))

    with pytest.raises(ValueError, match="expects ids beside a filled cache, got embeddings"):
        plain(target, inputs_embeds=embeds, cache=first.cache, assistant_model=make_drafter())


def test_a_mask_with_holes_that_the_library_would_cut_is_refused():
    target = make_target()
    embeds, mask = target.get_input_embeddings()(prompt()), torch.tensor([[0, 0, 0, 1, 1, 1, 1]])

    with pytest.raises(ValueError, match="a mask with holes to cover the 0 ids and no more, got 7"):
        plain(target, inputs_embeds=embeds, attention_mask=mask, assistant_model=make_drafter())


@pytest.mark.parametrize("kind", ["guidance", "synth-id"])
def test_processors_that_count_their_calls_are_refused_as_objects_too(kind):
    target = make_target()
    processor, name = {
        "guidance": (UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, target), "guidance_scale"),
        "synth-id": (SynthIDTextWatermarkLogitsProcessor(3, [1, 2, 3], 16, 0, 8, "cpu"), "a SynthID watermark"),
    }[kind]
    options = {"logits_processor": LogitsProcessorList([processor]), "do_sample": True}

    with pytest.raises(ValueError, match=f"can honour and undo, got {name}; call"):
        plain(target, input_ids=prompt(), assistant_model=make_drafter(), **options)


@pytest.mark.parametrize("block_size", [5, 24])
def test_the_targets_settings_for_other_assistants_cut_no_draft(block_size):
    """Transformers fills in 20 tokens and a threshold of 0.4, so what was set cannot be told from what was not."""
    target, ids = make_target(), prompt()
    truth = plain(target, input_ids=ids, max_new_tokens=60)
    drafter = make_drafter(cls=ScriptedDrafter, block_size=block_size)
    drafter.follow(truth[:, 7:], [99], first_position=7)
    target.generation_config.num_assistant_tokens = 1
    target.generation_config.assistant_confidence_threshold = 0.99

    text = plain(target, input_ids=ids, assistant_model=drafter, max_new_tokens=60)

    assert torch.equal(text, truth)
    assert len(drafter.last_stats.rounds[0].drafts) == block_size - 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_librarys_dflash_way_gives_the_targets_text_with_every_layout(kind):
    """It reads slots 1 on, and no head: of other layouts than DFlash's a poor drafter, never another text."""
    target, drafter = make_target(), make_drafter(kind)

    text = plain(target, input_ids=prompt(), assistant_model=drafter, speculation_type="dflash")

    assert torch.equal(text, plain(target, input_ids=prompt()))
    assert drafter.last_stats is None


@pytest.mark.parametrize("offset", [2, 3, 6, 9])
@pytest.mark.parametrize("kind", ["length", "end-of-text", "subclass"])
def test_a_users_own_criterion_of_a_stock_kind_stops_inside_a_block(kind, offset):
    class Early(MaxLengthCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= 7 + offset])

    target, ids = make_target(), prompt()
    truth = plain(target, input_ids=ids)
    end = int(truth[0, ids.shape[1] + offset])
    criterion = {
        "length": MaxLengthCriteria(7 + offset),
        "end-of-text": EosTokenCriteria(end),
        "subclass": Early(40),
    }[kind]
    options = {"stopping_criteria": StoppingCriteriaList([criterion]), "pad_token_id": VOCAB - 1}

    text = plain(target, input_ids=ids, assistant_model=scripted("dflash", truth, [9]), **options)

    assert torch.equal(text, plain(target, input_ids=ids, **options))
    assert text.shape[1] <= 8 + offset


def test_a_length_criterion_beyond_the_limit_is_refused():
    criteria = StoppingCriteriaList([MaxLengthCriteria(60)])

    with pytest.raises(ValueError, match="no length criterion above max_length 47, got 60"):
        plain(make_target(), input_ids=prompt(), stopping_criteria=criteria, assistant_model=make_drafter())


def test_a_prompt_without_any_text_row_is_drafted_for():
    target, ids = make_target(), torch.tensor([[3]])
    options = {"pad_token_id": 3, "eos_token_id": 50}
    truth = plain(target, input_ids=ids, **options)
    drafter = make_drafter(cls=ScriptedDrafter)
    drafter.follow(truth, EVERY_COUNT, first_position=0)

    assert torch.equal(plain(target, input_ids=ids, assistant_model=drafter, **options), truth)
    assert drafter.calls[0]["context_hidden_states"].shape[1] == 0
    assert max(r.num_carried for r in drafter.last_stats.rounds) > 0


def test_wrapped_methods_take_their_parameters_by_name(monkeypatch):
    """Targets' own methods may call the library's by them."""
    install()
    target = make_target()
    monkeypatch.setattr(target, "_supported_generation_modes", ["none"], raising=False)

    with pytest.raises(ValueError, match=r"only supports \['none'\], but got generation mode 'some'"):
        target._validate_generation_mode(
            generation_mode="some", generation_config=GenerationConfig(), generation_mode_kwargs={}
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_target_of_packed_weights_is_drafted_for():
    """Its activations are quantised by the pass, so that blocks and single tokens differ; it runs all the same."""
    target = torch.ao.quantization.quantize_dynamic(make_target(), {torch.nn.Linear}, dtype=torch.qint8)
    drafter = make_drafter(draft_vocab_size=9, input_embedding_scale=1.0)

    assert plain(target, input_ids=prompt(), assistant_model=drafter).shape == (1, 47)
    assert len(drafter.last_stats.rounds) > 5


def test_a_target_of_offloaded_weights_is_refused():
    target = accelerate.cpu_offload(make_target(), execution_device="cpu")

    with pytest.raises(ValueError, match="a target whose first weights are in memory, got LlamaForCausalLM with offl"):
        plain(target, input_ids=prompt(), assistant_model=make_drafter())


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
def test_a_target_with_virtual_tokens_is_refused():
    target = get_peft_model(make_target(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()

    with pytest.raises(
        ValueError, match=r"leave prompt tuning \(virtual tokens\) or assistant_model out|mask with holes"
    ):
        plain(target, input_ids=prompt(), assistant_model=make_drafter())


def test_an_encoder_decoder_target_is_refused():
    """huggingface/transformers#32370 and #48000."""
    config = AutoConfig.for_model(
        "t5", vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip

    with pytest.raises(ValueError, match=r"expects a decoder-only target .* got T5ForConditionalGeneration"):
        plain(AutoModelForSeq2SeqLM.from_config(config), input_ids=prompt(), assistant_model=make_drafter())


HYBRID = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": None, "bos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize("counts", [[0], [9], [2, 0, 4, 1]], ids=["all-wrong", "oracle", "mixed"])
def test_a_hybrid_target_that_can_take_back_rejected_drafts_gives_its_own_text(counts):
    """ggml-org/llama.cpp#26695 and #25682; huggingface/transformers#45513."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("lfm2", **HYBRID, full_attn_idxs=[1, 3], initializer_range=0.3)
    target, ids = AutoModelForCausalLM.from_config(config).eval(), prompt()
    truth = plain(target, input_ids=ids)
    drafter = scripted("dflash", truth, counts)

    assert torch.equal(plain(target, input_ids=ids, assistant_model=drafter), truth)
    assert accepted(drafter)[:4] == [min(counts[min(i, len(counts) - 1)], 4) for i in range(4)]


def test_a_refusal_on_a_hybrid_target_keeps_its_own_sentence():
    """Such a cache says before the prompt's pass that it cannot be cropped, which is not what is wrong here."""
    config = AutoConfig.for_model("lfm2", **HYBRID, full_attn_idxs=[1, 3])
    drafter = make_drafter()
    drafter.draft_length = 0

    with pytest.raises(ValueError, match=r"`drafter.draft_length` must be None"):
        plain(AutoModelForCausalLM.from_config(config).eval(), input_ids=prompt(), assistant_model=drafter)


def test_a_target_with_a_running_state_is_refused():
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **HYBRID)).eval()

    with pytest.raises(ValueError, match=r"a decoder-only target without a running state .* got MambaForCausalLM"):
        plain(target, input_ids=prompt(), assistant_model=make_drafter())


@pytest.mark.parametrize("architecture", ["mistral", "lfm2"])
def test_a_lossy_cache_that_a_criterion_stopped_inside_a_block_refuses_the_next_turn(architecture):
    torch.manual_seed(0)
    if architecture == "lfm2":
        config = AutoConfig.for_model("lfm2", **HYBRID, full_attn_idxs=[1, 3], initializer_range=0.3)
        target = AutoModelForCausalLM.from_config(config).eval()
    else:
        target = make_target(architecture)
    truth = plain(target, input_ids=prompt())
    # The prompt has 7 ids, and rounds end after 8, 13, 18, 23.
    stop = StoppingCriteriaList([lambda ids, scores, **_: torch.tensor([ids.shape[1] >= 20])])
    options = {"stopping_criteria": stop, "return_dict_in_generate": True}
    out = plain(target, input_ids=prompt(), assistant_model=scripted("dflash", truth, [9]), **options)
    expected = plain(target, input_ids=prompt(), **options)
    assert torch.equal(out.sequences, expected.sequences)

    more = torch.cat([out.sequences[:, -1:], prompt(3, seed=9)], dim=1)
    mask = torch.ones(1, out.sequences.shape[1] + 3)
    with pytest.raises(RuntimeError, match="Expected a whole cache, got one that lost rows"):
        plain(target, input_ids=more, attention_mask=mask, cache=out.cache, assistant_model=make_drafter())


def test_several_positions_a_token_are_refused():
    """M-RoPE: TheTom/llama-cpp-turboquant#344; huggingface/transformers#37471."""
    positions = torch.arange(7).expand(3, 1, 7)

    with pytest.raises(ValueError, match="expects one position a token, got several"):
        plain(make_target(), input_ids=prompt(), position_ids=positions, assistant_model=make_drafter())


def test_a_target_whose_cache_cannot_be_cropped_is_refused_before_its_first_token(monkeypatch):
    monkeypatch.setattr(DynamicLayer, "is_croppable", False)
    streamer = Recorder()

    with pytest.raises(
        ValueError, match=r"expects a cache that can be cropped, got DynamicCache.*; leave assistant_model out"
    ):
        plain(make_target(), input_ids=prompt(), assistant_model=make_drafter(), streamer=streamer)

    assert len(streamer.puts) == 1


@pytest.mark.parametrize("kind", ["quantized", "static-with-a-window"])
def test_real_caches_that_cannot_be_cropped_are_refused(kind):
    is_static = kind == "static-with-a-window"
    target, streamer = make_target("mistral" if is_static else "llama"), Recorder()
    options = {"cache_implementation": "static", "disable_compile": True}
    if not is_static:
        options = {"cache": QuantizedCache("fp8", config=target.config)}

    with pytest.raises(ValueError, match=r"expects a cache that can be cropped, got .*; leave assistant_model out"):
        plain(target, input_ids=prompt(), assistant_model=make_drafter(), streamer=streamer, **options)

    assert len(streamer.puts) == 1


def test_two_copies_of_the_code_share_one_seam(tmp_path, monkeypatch):
    """As when a drafter loaded with remote code meets this package."""
    package = tmp_path / "another_copy"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in CORE_FILES:
        shutil.copy(Path(decoding.__file__).with_name(name), package)
    monkeypatch.syspath_prepend(tmp_path)
    install()
    originals = [vars(vars(GenerationMixin)[name])[MARK] for name in PRIVATE_NAMES]
    theirs = importlib.import_module("another_copy.modeling_carryover")
    torch.manual_seed(1)
    drafter = theirs.CarryoverDrafterModel(drafter_config()).eval()
    target, ids = make_target(), prompt()

    text = plain(target, input_ids=ids, assistant_model=drafter)

    assert type(drafter) is not CarryoverDrafterModel
    assert torch.equal(text, plain(target, input_ids=ids))
    assert drafter.last_stats.rounds
    assert [vars(vars(GenerationMixin)[name])[MARK] for name in PRIVATE_NAMES] == originals
    AutoConfig.register("carryover_drafter", type(drafter_config()), exist_ok=True)
    AutoModel.register(type(drafter_config()), CarryoverDrafterModel, exist_ok=True)
