import io

import pytest
import torch
from rich.console import Console

from hf_carryover import demo
from hf_carryover.demo import OriginStreamer, compare_texts, encode, pass_seconds, run_demo
from hf_carryover.evaluation.runs import decoding_options
from tests.fakes import Letters, ScriptedDrafter, make_drafter, make_target, plain, prompt


def recorded_console():
    return Console(file=io.StringIO(), record=True, width=200, force_terminal=True, highlight=False, soft_wrap=True)


def test_accepted_drafts_and_own_tokens_are_coloured_by_their_origin():
    target, ids, console = make_target(), prompt(), recorded_console()
    truth = plain(target, input_ids=ids, max_new_tokens=12)
    drafter = make_drafter(cls=ScriptedDrafter)
    drafter.follow(truth, [2, 0, 4])
    styles = []

    class Noting(OriginStreamer):
        def _is_draft(self):
            styles.append(super()._is_draft())
            return styles[-1]

    streamer = Noting(Letters(), drafter, console)
    target.generate(ids, do_sample=False, max_new_tokens=12, assistant_model=drafter, streamer=streamer)

    # The prompt's pass gives one own token; then 2 drafts + own, 0 + own, 4 + own, 1 + own.
    assert styles == [False, True, True, False, False, True, True, True, True, False, True, False]
    assert console.export_text().strip() == Letters().decode(truth[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("text", ["f():\n\treturn 1", ":smile:", "[bold]x[/]", "x\ufffd"])
def test_the_text_is_printed_as_it_is(text):
    class Whole:
        def decode(self, ids, **kwargs):
            return "".join(text[i] for i in ids)

    out = io.StringIO()
    streamer = OriginStreamer(Whole(), None, Console(file=out, highlight=False, soft_wrap=True))
    for ids in ([0], *([i] for i in range(len(text)))):
        streamer.put(torch.tensor(ids))
    streamer.end()

    assert out.getvalue() == text + "\n"


def test_a_character_of_several_tokens_is_printed_whole():
    console = recorded_console()
    streamer = OriginStreamer(Letters(), None, console)

    for token in ([9, 9], [0], [50], [50], [1]):
        streamer.put(torch.tensor(token))
    streamer.end()

    assert console.export_text() == "aüb\n"


def test_the_demo_compares_both_systems_and_says_what_limits_the_speed():
    target, console = make_target(), recorded_console()

    is_right = run_demo(target, Letters(), make_drafter(), max_new_tokens=10, console=console)

    text = console.export_text()
    assert is_right
    assert text.count("Identical token ids.") == 3
    assert "A round took" in text
    assert "breaks even; it was 1." in text
    assert text.count("│") > 20


@pytest.mark.parametrize(
    ("block", "setting", "advised"), [(0.16, None, True), (0.16, "AVX2", False), (0.14, None, False)]
)
def test_a_dear_block_on_a_processor_is_told_with_what_makes_it_cheaper(monkeypatch, block, setting, advised):
    monkeypatch.setattr(demo, "pass_seconds", lambda target, ids, num_rows: 0.1 if num_rows == 1 else block)
    monkeypatch.delenv("MKL_CBWR", raising=False)
    if setting is not None:
        monkeypatch.setenv("MKL_CBWR", setting)
    target, console = make_target(), recorded_console()

    run_demo(target, Letters(), make_drafter(), max_new_tokens=4, console=console)

    assert ("export MKL_CBWR=AVX2" in console.export_text()) == advised


def test_the_demo_without_a_drafter_is_plain():
    console = recorded_console()

    assert run_demo(make_target(), Letters(), None, max_new_tokens=10, console=console)

    assert "drafter" not in console.export_text().replace("drafter, tokens/s", "")


@pytest.mark.parametrize("rank", [0, 40], ids=["the-targets-own", "far-off"])
def test_a_text_that_rounding_does_not_explain_is_called_wrong(rank):
    target, drafter, ids = make_target().bfloat16(), make_drafter().bfloat16(), prompt()
    text = plain(target, input_ids=ids)
    other = text.clone()
    other[0, 12] = target(text[:, :12]).logits[0, -1].float().topk(41).indices[rank]

    is_right, sentence = compare_texts(target, drafter, ids, text, other, **decoding_options(0.0, 40))

    assert is_right == (rank == 0)
    told = "Identical token ids." if rank == 0 else "THE TEXTS DIFFER at token 5 of the answer, where the target's"
    assert sentence.startswith(told)


def test_a_text_that_rounding_explains_is_not_called_wrong():
    target, drafter, ids = make_target(), make_drafter(), prompt()
    text = plain(target, input_ids=ids)
    other = text.clone()
    other[0, 12] += 1  # float64 writes the same texts, so it was rounding

    is_right, sentence = compare_texts(target, drafter, ids, text, other, **decoding_options(0.0, 40))

    assert is_right
    assert sentence.startswith("The texts part at token 5 of the answer")
    assert sentence.endswith("; that is rounding.")


def test_pass_seconds_leaves_the_model_as_it_was_and_takes_time():
    target, ids = make_target(), prompt(20)
    before = target(ids).logits

    cached = []
    hook = target.register_forward_pre_hook(
        lambda module, args, kwargs: cached.append(kwargs["cache"].get_seq_length() if "cache" in kwargs else 0),
        with_kwargs=True,
    )

    assert pass_seconds(target, ids, 8) > 0

    hook.remove()
    assert cached == [0, *[12] * 6]  # every repeat is of the same rows, behind the same text
    assert torch.equal(target(ids).logits, before)


def test_a_prompt_is_put_under_the_chat_template_unless_raw():
    class Chatty(Letters):
        chat_template = "x"

        def apply_chat_template(self, chat, **kwargs):
            assert chat == [{"role": "user", "content": "hi"}]
            return {"input_ids": [1, 2, 3]}

    assert encode(Chatty(), "hi", torch.device("cpu"))["input_ids"].tolist() == [[1, 2, 3]]
    assert encode(Chatty(), "hi", torch.device("cpu"), raw=True)["input_ids"].shape == (1, 2)


def test_the_default_drafter_is_the_first_in_model_cards_and_for_the_embedded_target_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "checkout" / "src" / "hf_carryover" / "demo.py"))
    assert demo.default_drafter("smollm2") is None

    for name in ("b-drafter", "a-drafter"):
        card = tmp_path / "checkout" / "model_cards" / name
        card.mkdir(parents=True)
        (card / "config.json").touch()
    assert demo.default_drafter("smollm2") == card
    assert demo.default_drafter("someone/else") is None  # it would not fit
