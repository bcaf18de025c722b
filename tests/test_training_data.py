import gzip
import json

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from transformers import PreTrainedTokenizerFast

from hf_carryover.targets import load_target
from hf_carryover.training.data import Draw, Example, LikeLengths, most_used_tokens, read_examples
from tests.evaluation_fakes import make_tokenizer


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_ids_are_taken_as_they_stand_and_drops_are_counted(tmp_path):
    # sgl-project/SpecForge#555: nearly all samples skipped without a word.
    file = tmp_path / "data.jsonl.gz"
    rows = [([1, 2], [3, 4, 5]), ([1], [2]), ([1] * 9, [2, 3]), ([1], [])]
    with gzip.open(file, "wt") as lines:
        lines.writelines(json.dumps({"prompt_ids": p, "answer_ids": a}) + "\n" for p, a in rows)

    found = read_examples(file, make_tokenizer(), max_length=10)

    assert found.examples == [Example([1, 2], [3, 4, 5])]
    assert found.dropped == {"answer shorter than two tokens": 2, "longer than 10 tokens": 1}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "a"}, r"found \['prompt'\]; let the target answer: `hf-carryover data`"),
        ({"messages": [{"role": "user", "content": "a"}]}, "Expected an assistant turn in line 1"),
        ({"messages": [{"from": "human", "value": "a"}]}, "`messages` with a `role` each, or .* in line 1"),
        ({"prompt_ids": [1], "answer_ids": [2]}, "Expected texts with answers of two tokens or more"),
        ([], "Expected `prompt_ids` and `answer_ids`"),
    ],
    ids=["no-answer", "no-assistant", "other-names", "all-too-short", "no-object"],
)
def test_data_without_answers_is_refused(row, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        read_examples(write(tmp_path / "data.jsonl", row), make_tokenizer(), max_length=10)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Expected training data at .*make it with `hf-carryover data`"):
        read_examples(tmp_path / "none.jsonl", make_tokenizer(), max_length=10)


@pytest.fixture(scope="module")
def smollm2():
    return load_target("smollm2")[1]


@pytest.mark.slow
def test_prompt_and_answer_are_the_whole_conversations_tokens(smollm2, tmp_path):
    # PRIME-RL/THUDM slime#330 and NVIDIA-NeMo/Megatron-Bridge#3359: message-wise templating, masks of all ones.
    turns = [("user", "Hi"), ("assistant", "Hello!"), ("user", "2+2?"), ("assistant", "4\n\nThat is four.")]
    messages = [{"role": role, "content": text} for role, text in turns]
    whole = smollm2.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]

    first, second = read_examples(write(tmp_path / "a.jsonl", {"messages": messages}), smollm2, max_length=99).examples
    (pair,) = read_examples(
        write(tmp_path / "b.jsonl", {"prompt": "Hi", "answer": "Hello!"}), smollm2, max_length=99
    ).examples

    assert smollm2.decode(first.answer_ids) == "Hello!<|im_end|>"
    assert smollm2.decode(second.answer_ids) == "4\n\nThat is four.<|im_end|>"
    assert whole[: second.length] == second.prompt_ids + second.answer_ids
    assert first.answer_ids[-1] == smollm2.eos_token_id
    assert pair == first


def test_an_answer_ends_with_what_ends_the_targets_turns(tmp_path):
    # Gemma's turns do not end with the tokenizer's own end; what the template puts behind them is never generated.
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} 57 58 {% endfor %}"
    path = write(tmp_path / "a.jsonl", {"prompt": "1 2", "answer": "3 4"})

    (found,) = read_examples(path, tokenizer, max_length=99, ends=[57]).examples

    assert found.answer_ids == [3, 4, 57]


@pytest.mark.slow
def test_a_template_that_rewrites_history_still_gives_each_answer_its_own_prompt(smollm2, tmp_path):
    # THUDM/slime#330: reasoning of earlier turns is dropped from history, not from the turn itself.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=smollm2.backend_tokenizer, eos_token="<|im_end|>",
        chat_template="{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )  # fmt: skip
    turns = [("user", "a"), ("assistant", "<think>b</think>c"), ("user", "d"), ("assistant", "<think>e</think>f")]
    messages = [{"role": role, "content": text} for role, text in turns]

    first, second = read_examples(
        write(tmp_path / "a.jsonl", {"messages": messages}), tokenizer, max_length=99
    ).examples

    assert tokenizer.decode(first.answer_ids) == "<think>b</think>c<|im_end|>"
    assert "b" not in tokenizer.decode(second.prompt_ids).replace("<|im", "")
    assert tokenizer.decode(second.answer_ids) == "<think>e</think>f<|im_end|>"


@pytest.mark.parametrize("world", [1, 2])
def test_every_text_is_drawn_once_an_epoch_and_repeats_stay_with_their_process(world):
    lengths = [(7 * i) % 50 for i in range(64)]
    sampler = LikeLengths(lengths, batch_size=4, repeats=2, world=world, seed=0, epoch=lambda: 0)

    batches = list(sampler)

    assert len(batches) == len(sampler) == 32
    for rank in range(world):
        mine = batches[rank::world]
        for first, second in zip(mine[::2], mine[1::2], strict=True):
            assert [draw.example for draw in first] == [draw.example for draw in second]
            assert {draw.number for draw in first} == {0}
            assert {draw.number for draw in second} == {1}
    assert sorted(draw.example for batch in batches for draw in batch) == sorted([*range(64)] * 2)
    spread = [max(ls) - min(ls) for ls in ([lengths[draw.example] for draw in batch] for batch in batches)]
    assert sum(spread) / len(spread) < 5


def test_epochs_have_their_own_order_and_anchors():
    epoch = 0
    sampler = LikeLengths([5] * 8, batch_size=4, repeats=2, world=1, seed=0, epoch=lambda: epoch)
    first = list(sampler)

    epoch = 1

    assert list(sampler) != first
    assert {draw.number for batch in sampler for draw in batch} == {2, 3}


def test_a_process_that_goes_on_in_a_later_epoch_reads_that_epoch():
    # Accelerate's wrappers do not pass an epoch on to a sampler two layers down.
    sampler = LikeLengths([5] * 32, batch_size=4, repeats=2, world=2, seed=0, epoch=lambda: 3)
    shard = BatchSamplerShard(sampler, num_processes=2, process_index=1)

    assert list(SkipBatchSampler(shard, skip_batches=3)) == list(sampler)[1::2][3:]
    assert {draw.number for batch in shard for draw in batch} == {6, 7}


@pytest.mark.parametrize("size", [2, 4, 7])
def test_what_fills_no_batch_is_another_text_in_each_epoch(size):
    lengths, seen = [*range(10, 25)], set()
    for epoch in range(40):
        sampler = LikeLengths(lengths, batch_size=size, repeats=1, world=1, seed=0, epoch=lambda e=epoch: e)
        drawn = [draw.example for batch in sampler for draw in batch]
        assert len(set(drawn)) == len(drawn) == 15 // size * size
        seen |= set(drawn)

    assert seen == {*range(15)}  # the longest, too


@pytest.mark.parametrize("num_texts", [7, 15])
def test_processes_that_would_get_no_batch_each_are_refused(num_texts):
    with pytest.raises(ValueError, match=f"at least 16 texts to train on, .* 2 processes, got {num_texts}; give more"):
        LikeLengths([5] * num_texts, batch_size=8, repeats=2, world=2, seed=0, epoch=lambda: 0)


@pytest.mark.parametrize("num_texts", [16, 17, 31, 40])
def test_processes_get_as_many_batches_as_are_announced(num_texts):
    sampler = LikeLengths([5] * num_texts, batch_size=8, repeats=2, world=2, seed=0, epoch=lambda: 0)
    shards = [list(BatchSamplerShard(sampler, num_processes=2, process_index=rank)) for rank in range(2)]

    assert [len(shard) for shard in shards] == [len(sampler) // 2] * 2
    assert len(sampler) == num_texts // 16 * 4


def test_fewer_texts_than_a_batch_still_make_one():
    sampler = LikeLengths([5] * 3, batch_size=8, repeats=1, world=1, seed=0, epoch=lambda: 0)

    batches = list(sampler)

    assert len(batches) == 1
    assert all(sorted(draw.example for draw in batch) == [0, 1, 2] for batch in batches)
    assert isinstance(batches[0][0], Draw)


def test_a_draft_vocabulary_holds_the_most_used_tokens_and_the_end_of_turn():
    """sgl-project/SpecForge#76, vllm-project/speculators#1081: a vocabulary larger than the tokens seen."""
    examples = [Example([9, 9, 9], [4, 4, 4, 5, 5, 6]), Example([1], [4, 7])]

    chosen, covered = most_used_tokens(examples, 3, always=[2])
    padded, whole = most_used_tokens(examples, 6, always=[2])

    assert chosen.tolist() == [2, 4, 5]
    assert covered == 6 / 8
    assert padded.tolist() == [0, 2, 4, 5, 6, 7]
    assert whole == 1
    assert chosen.dtype == torch.int64
