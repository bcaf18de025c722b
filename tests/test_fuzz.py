import pytest

from tests import fuzz
from tests.fakes import make_drafter, make_target, plain

# The fuzz asks for impossible lengths, too, as users do; Transformers warns, with a drafter and without.
pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length constraints")


def test_two_seconds_of_fuzz_find_no_difference():
    said = []

    agreed, _, failed = fuzz.fuzz(2.0, 1_000_000, said.append)

    assert not failed, said
    assert agreed > 0


# 1000012: a warning about lengths, which only a fast machine reached in two seconds.
# 20032: a stop string inside a block, with a window: the cache keeps a row too many and refuses the next turn.
# 92, 550: a static cache, where targets with kinds of layers get a mask for each: the memory read the wrong one.
@pytest.mark.parametrize("seed", [1000012, 20032, 92, 550])
def test_seeds_that_once_differed_agree(seed):
    _, _, problem = fuzz.judge(seed)

    assert problem is None


def test_a_text_that_no_token_may_follow_ends_plain_generation_too():
    """Seed 408: seven tokens, no pair twice, and the library's TopH processor raises when all are banned."""
    target, dead_end = make_target(vocab_size=3), [0, 0, 1, 0, 2, 0]
    options = {"do_sample": True, "top_h": 0.6, "no_repeat_ngram_size": 2}

    _, _, problem = fuzz.judge(408)

    assert problem.startswith("skipped: Expected parameter logits")
    assert fuzz.ends_dead(target, dead_end, options)
    assert not fuzz.ends_dead(target, dead_end[:-1], options)


def test_the_fuzz_reports_a_difference_with_its_seed_and_settings(monkeypatch, capsys):
    """A fault made on purpose: the text with a drafter lacks its last token."""
    monkeypatch.setattr(fuzz, "plain", lambda target, **inputs: cut(plain(target, **inputs), inputs))
    monkeypatch.setattr(fuzz, "draw", lambda seed: simple_case(seed))

    status = fuzz.main(["--seconds", "0.01", "--seed", "2"])

    assert status == 1
    said = capsys.readouterr().out
    assert "seed 2, compare: the text differs" in said
    assert "architecture='llama'" in said
    assert "1 differ: [2]" in said


def cut(text, inputs):
    return text[:, :-1] if inputs.get("assistant_model") is not None else text


def simple_case(seed):
    drafter = {name: getattr(make_drafter().config, name) for name in ("block_size", "vocab_size", "draft_vocab_size")}
    return fuzz.Case(seed, "llama", 61, drafter, "random", True, None, 7, {}, {"max_new_tokens": 9})
