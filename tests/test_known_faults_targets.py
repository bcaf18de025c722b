"""What other software got wrong about the target's pass: positions, windows, adapters, features, packed weights."""

import copy
import pickle
import threading

import gguf
import pytest
import torch
from accelerate import dispatch_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache

from hf_carryover.cache_carryover import MEMORIES
from tests.fakes import KINDS, MASK, ScriptedDrafter, make_drafter, make_target, plain, prompt

MIXED = [2, 0, 9, 1, 5, 3, 0, 9, 9]


def scripted(truth, counts, **overrides):
    drafter = make_drafter(cls=ScriptedDrafter, **overrides)
    drafter.follow(truth, counts)
    return drafter


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_logits_of_blocks_equal_those_of_single_tokens_and_of_one_whole_pass(architecture):
    """huggingface/transformers#30413; z-lab/dflash#57 and #159: up to sixteen rows, behind a long prompt."""
    target, ids = make_target(architecture).double(), prompt(300)
    options = {"input_ids": ids, "max_new_tokens": 60, "return_dict_in_generate": True, "output_logits": True}
    stepwise = plain(target, **options)
    drafter = scripted(stepwise.sequences, [9, 3, 0, 15, 1, 15, 7], block_size=16)

    blocks = plain(target, **options, assistant_model=drafter)

    with torch.no_grad():
        whole = target(stepwise.sequences).logits[0, 299:-1].float()
    assert torch.equal(blocks.sequences, stepwise.sequences)
    assert {3, 9, 15} <= {r.num_accepted for r in drafter.last_stats.rounds}
    torch.testing.assert_close(torch.cat(blocks.logits), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(stepwise.logits), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", ["left-out", "of-ones", "with-zeros"])
def test_a_mask_may_be_left_out_or_all_ones_or_have_zeros(mask):
    """huggingface/transformers#49019."""
    target, ids = make_target(), prompt()
    ones = torch.ones_like(ids)
    ones[0, :2] = mask != "with-zeros"
    inputs = {"input_ids": ids} | ({} if mask == "left-out" else {"attention_mask": ones})
    truth = plain(target, **inputs)
    drafter = make_drafter(cls=ScriptedDrafter)
    drafter.follow(truth, MIXED, first_position=0 if mask != "with-zeros" else -2)

    assert torch.equal(plain(target, **inputs, assistant_model=drafter), truth)
    assert {r.num_accepted for r in drafter.last_stats.rounds} >= {0, 1, 4}


def test_positions_may_start_late_and_have_gaps():
    """TheTom/llama-cpp-turboquant#344; ggml-org/llama.cpp#27342: the block follows the last position."""
    target, ids = make_target(), prompt(6)
    inputs = {"input_ids": ids, "position_ids": torch.tensor([[100, 101, 102, 110, 111, 120]])}
    truth = plain(target, **inputs)
    drafter = make_drafter(cls=ScriptedDrafter)
    drafter.follow(truth, MIXED, first_position=115)

    assert torch.equal(plain(target, **inputs, assistant_model=drafter), truth)
    assert drafter.calls[0]["position_ids"][0].tolist() == [100, 101, 102, 110, 111, 120, *range(121, 126)]
    assert {r.num_accepted for r in drafter.last_stats.rounds} >= {0, 1, 4}


@pytest.mark.parametrize("length", [1, 3, 6, 7, 8, 9, 20])
@pytest.mark.parametrize("architecture", ["mistral", "gemma3_text"])
def test_a_window_is_crossed_at_every_offset_of_a_block(architecture, length):
    """raullenchai/Rapid-MLX#3605; ml-explore/mlx-swift-lm#505; huggingface/transformers#46629: windows of eight."""
    target, ids = make_target(architecture), prompt(length)
    truth = plain(target, input_ids=ids, max_new_tokens=20)
    for counts in ([0], [9], MIXED):
        drafter = scripted(truth, counts)

        assert torch.equal(plain(target, input_ids=ids, max_new_tokens=20, assistant_model=drafter), truth)
        found = [r.num_accepted for r in drafter.last_stats.rounds][:-1]  # the limit may cut the last
        assert found == [min(counts[min(i, len(counts) - 1)], 4) for i in range(len(found))]


def test_features_are_the_outputs_of_the_layers_named():
    """vllm-project/vllm#40727; microsoft/onnxruntime-genai#2538; Avarok-Cybersecurity/atlas#394: not their inputs."""
    target, outputs = make_target(), []
    for index in (0, 2):
        target.model.layers[index].register_forward_hook(lambda module, inputs, output: outputs.append(output))
    drafter = make_drafter(cls=ScriptedDrafter)
    drafter.follow(prompt(40), [0])

    plain(target, input_ids=prompt(), assistant_model=drafter, max_new_tokens=3)

    features = torch.cat(outputs[:2], dim=-1)  # of the prompt's pass
    torch.testing.assert_close(drafter.calls[0]["context_hidden_states"], features, rtol=0, atol=0)


def test_adapters_may_be_swapped_disabled_and_merged_between_calls():
    """kekzl/imp#571, predibase/lorax#570: also on the embedding and, as a whole copy, on the output head."""
    torch.manual_seed(3)
    base = {"r": 4, "init_lora_weights": False}
    target = get_peft_model(make_target(), LoraConfig(target_modules=["q_proj", "embed_tokens"], **base), "first")
    target.add_adapter("second", LoraConfig(target_modules=["v_proj"], modules_to_save=["lm_head"], **base))
    target.eval()
    drafter, texts = make_drafter(), []

    def compare():
        texts.append(plain(target, input_ids=prompt(), max_new_tokens=16))
        text = plain(target, input_ids=prompt(), max_new_tokens=16, assistant_model=drafter)
        assert torch.equal(text, texts[-1])

    for name in ("first", "second", "first"):
        target.set_adapter(name)
        compare()
    with target.disable_adapter():
        compare()
    target.merge_adapter(["first"])
    compare()

    assert torch.equal(texts[0], texts[2])
    assert len({tuple(text[0].tolist()) for text in texts}) >= 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_drafter_of_packed_weights_drafts():
    """vllm-project/vllm#52816."""
    whole = make_drafter("markov-gated")
    packed = torch.ao.quantization.quantize_dynamic(make_drafter("markov-gated"), {torch.nn.Linear}, torch.qint8)
    target, ids = make_target(), prompt()

    text = plain(target, input_ids=ids, assistant_model=packed)
    plain(target, input_ids=ids, assistant_model=whole)

    assert torch.equal(text, plain(target, input_ids=ids))
    assert len(packed.last_stats.rounds[0].drafted_ids) == len(whole.last_stats.rounds[0].drafted_ids)


def write_gguf(target, path):
    """A Llama as llama.cpp keeps it: matrices in 8 bit where they have whole blocks, rotary halves interleaved."""
    config, kind = target.config, gguf.GGMLQuantizationType.Q8_0
    writer, names = gguf.GGUFWriter(path, "llama"), gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in target.state_dict().items():
        values = tensor
        if "q_proj" in name or "k_proj" in name:
            values = tensor.view(-1, 2, config.head_dim // 2, config.hidden_size).transpose(1, 2).reshape(tensor.shape)
        packs = tensor.dim() == 2 and tensor.shape[1] % 32 == 0
        array = values.contiguous().numpy()
        array = gguf.quantize(array, kind) if packs else array
        writer.add_tensor(names.get_name(name, (".weight",)), array, raw_dtype=kind if packs else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_from_a_gguf_file_drafts_exactly(kind, tmp_path):
    """A drafter made for the whole model serves the packed one, whose text is its own."""
    whole, ids = make_target(), prompt()
    write_gguf(whole, tmp_path / "packed.gguf")
    packed = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="packed.gguf").eval()

    text = plain(packed, input_ids=ids, assistant_model=make_drafter(kind))

    assert 0 < (packed(ids).logits - whole(ids).logits).abs().max() < 0.5
    assert torch.equal(text, plain(packed, input_ids=ids))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("away", ["layers", "head", "layers and head"])
def test_a_target_that_is_split_over_places_drafts_exactly(kind, away, tmp_path):
    """Parts that are on no device until they run; a second GPU is such a place, too."""
    ids, places = prompt(), dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm"], "cpu")
    places |= {f"model.layers.{i}": "disk" if i > 1 and "layers" in away else "cpu" for i in range(4)}
    places["lm_head"] = "disk" if "head" in away else "cpu"
    split = dispatch_model(make_target(), places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    drafter = scripted(plain(split, input_ids=ids), [2, 0, 4]) if kind == "dflash" else make_drafter(kind)

    text = plain(split, input_ids=ids, assistant_model=drafter)

    assert {p.device.type for p in split.parameters()} == {"cpu", "meta"}
    assert torch.equal(text, plain(make_target(), input_ids=ids))
    assert drafter.last_stats.rounds[1].num_carried > 0


@pytest.mark.parametrize("what", ["drafter", "pickled drafter", "cache"])
def test_a_copy_in_mid_chat_has_the_right_text_and_the_original_goes_on(what):
    target, drafter, cache, first = make_target(), make_drafter(), DynamicCache(), prompt()
    told = plain(target, input_ids=first, cache=cache, assistant_model=drafter, max_new_tokens=9)
    ids = torch.cat([told, prompt(5)], dim=1)
    expected = plain(target, input_ids=ids, max_new_tokens=12)
    new, mask = ids[:, cache.get_seq_length() :], torch.ones_like(ids)
    copied = {
        "drafter": lambda: (copy.deepcopy(drafter), copy.deepcopy(cache)),
        "pickled drafter": lambda: (pickle.loads(pickle.dumps(drafter)), copy.deepcopy(cache)),
        "cache": lambda: (drafter, copy.deepcopy(cache)),
    }[what]()

    texts = [
        plain(target, input_ids=new, attention_mask=mask, cache=c, assistant_model=d, max_new_tokens=12)
        for d, c in (copied, (drafter, cache))
    ]

    for text in texts:
        assert torch.equal(text[:, new.shape[1] :], expected[:, ids.shape[1] :])
    assert MEMORIES[cache][drafter].num_committed > MEMORIES[copied[1]][copied[0]].num_committed


def test_a_text_longer_than_the_drafter_was_made_for_is_drafted_for():
    """spiritbuun/buun-llama-cpp#32; z-lab/dflash#66: it may accept less there, and the text is the target's."""
    target, ids = make_target(), prompt(200)
    drafter = make_drafter(max_position_embeddings=64)

    assert torch.equal(plain(target, input_ids=ids, assistant_model=drafter), plain(target, input_ids=ids))
    assert len(drafter.last_stats.rounds) > 5


@pytest.mark.parametrize("draft_length", [None, "auto"])
def test_one_drafter_in_two_threads_gives_each_its_own_text(draft_length):
    """sgl-project/sglang#36548: what a call remembers lives in the call; `last_stats` is the latest call's."""
    target, drafter, texts = make_target(), make_drafter(), {}
    drafter.draft_length = draft_length
    inputs = [prompt(7, seed=1), prompt(12, seed=2)]
    threads = [
        threading.Thread(
            target=lambda i=i: texts.update({i: plain(target, input_ids=inputs[i], assistant_model=drafter)})
        )
        for i in range(2)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for index, ids in enumerate(inputs):
        assert torch.equal(texts[index], plain(target, input_ids=ids))


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_that_proposes_the_mask_token_changes_no_text(kind):
    """ggml-org/llama.cpp#28158: every id is below the vocabulary size, and a mask token is only a wrong guess."""
    target, drafter = make_target(), make_drafter(kind, cls=ScriptedDrafter)
    drafter.follow(torch.full((1, 60), MASK), [99])

    assert torch.equal(plain(target, input_ids=prompt(), assistant_model=drafter), plain(target, input_ids=prompt()))
    assert {token for r in drafter.last_stats.rounds for token in r.drafted_ids} == {MASK}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_target_and_drafter_may_be_on_different_devices(kind, devices):
    """huggingface/transformers#47877, #35099, #35116, #27995, #31401 and #33257."""
    target, ids = make_target().to(devices[0]), prompt().to(devices[0])
    drafter = make_drafter(kind, draft_vocab_size=20).to(devices[1])

    text = plain(target, input_ids=ids, assistant_model=drafter)
    plain(target, input_ids=ids, assistant_model=drafter, do_sample=True)

    assert torch.equal(text, plain(target, input_ids=ids))
