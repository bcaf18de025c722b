import pytest
import torch

from hf_carryover.evaluation.exactness import find_difference, in_float64
from hf_carryover.evaluation.runs import System, decoding_options, generate, systems_for
from tests.fakes import make_drafter, make_target, prompt

DECODING = decoding_options(0.0, 12)
PLAIN = System("plain", {})


def new_ids(target, system=PLAIN):
    return generate(system, target, prompt(), seed=0, **DECODING)[0, 7:].tolist()


def difference(target, ids, system=None):
    system = system or systems_for(make_target(), make_drafter(), None)[-1]
    return find_difference(system, target, prompt(), plain_ids=new_ids(target), ids=ids, **DECODING)


def ranked(target, position):
    """The target's tokens, likeliest first, where its plain text has this position; and its logits there."""
    text = generate(PLAIN, target, prompt(), seed=0, **DECODING)
    logits = target(input_ids=text[:, : 7 + position]).logits[0, -1].float()
    return logits.argsort(descending=True).tolist(), logits


def test_equal_texts_have_no_difference():
    target = make_target()

    assert difference(target, new_ids(target)) is None


def test_in_fp32_a_difference_that_float64_does_not_repeat_is_explained():
    target = make_target()
    ids = new_ids(target)
    ids[4] = ranked(target, 4)[0][1]

    found = difference(target, ids)

    assert (found.position, found.explained) == (4, True)


def test_in_fp32_a_difference_that_float64_repeats_is_a_failure():
    target = make_target()
    broken = System("carry-on", {"suppress_tokens": [new_ids(target)[0]]})

    found = difference(target, new_ids(target, broken), broken)

    assert (found.system, found.position, found.explained) == ("carry-on", 0, False)


def test_the_librarys_generator_can_be_checked_in_float64_too():
    target = make_target()
    library = next(s for s in systems_for(make_target(), make_drafter(), None) if s.name == "library-dflash")

    assert difference(target, [0, *new_ids(target)[1:]], library).explained


def with_top_two_apart(gap):
    """A bf16 target that everywhere gives one token a logit of 64 and another one 64 minus the gap."""
    target = make_target("gpt2", tie_word_embeddings=False).bfloat16()
    with torch.no_grad():
        target.transformer.ln_f.weight.zero_()
        target.transformer.ln_f.bias.zero_()[0] = 1.0
        target.lm_head.weight.zero_()
        target.lm_head.weight[5, 0], target.lm_head.weight[6, 0] = 64.0, 64.0 - gap
    return target


@pytest.mark.parametrize(
    ("gap", "explained"),
    [pytest.param(1.0, True, id="4-steps-of-the-type"), pytest.param(1.5, False, id="6-steps-of-the-type")],
)
def test_in_bf16_a_difference_is_explained_by_a_gap_of_at_most_four_steps(gap, explained):
    target = with_top_two_apart(gap)

    found = difference(target, [5, 5, 6] + [5] * 9)

    assert (found.position, found.gap, found.explained) == (2, gap, explained)


def rounding(gap, moved):
    """`with_top_two_apart` by this gap, whose passes of several rows give the second token so much more."""
    target = with_top_two_apart(gap + moved)

    def move(module, args, output):
        if output.logits.shape[1] > 1:
            output.logits[..., 6] += moved

    target.register_forward_hook(move)
    return target


@pytest.mark.parametrize(("moved", "explained"), [(2.0, True), (1.0, False)])
def test_in_bf16_a_larger_gap_is_explained_if_rounding_is_seen_to_move_as_much(moved, explained):
    target = rounding(1.5, moved)

    found = difference(target, [5, 5, 6] + [5] * 9)

    assert (found.position, found.gap, found.explained) == (2, 1.5, explained)


def test_in_bf16_what_rounding_moves_explains_nothing_that_float64_repeats():
    target = rounding(1.5, 2.0)
    broken = System("carry-on", {"suppress_tokens": [5]})

    found = difference(target, new_ids(target, broken), broken)

    assert (found.position, found.gap, found.explained) == (0, 1.5, False)


def test_in_bf16_a_token_that_is_not_among_the_top_two_is_a_failure():
    found = difference(with_top_two_apart(0.25), [5, 5, 7] + [5] * 9)

    assert (found.gap, found.explained) == (64.0, False)


def test_in_bf16_a_text_that_stops_too_early_is_a_failure():
    found = difference(with_top_two_apart(0.0), [5] * 11)

    assert (found.position, found.explained) == (11, False)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_what_float64_has_no_memory_for_is_not_explained_and_does_not_end_the_evaluation(error, monkeypatch):
    target = make_target()
    ids = new_ids(target)
    ids[4] = ranked(target, 4)[0][1]

    def half_way():
        target.lm_head.weight.data = target.lm_head.weight.data.double()
        raise error

    monkeypatch.setattr(target, "double", half_way)

    assert not difference(target, ids).explained
    assert {parameter.dtype for parameter in target.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_comes_back_from_float64_bit_by_bit_also_after_an_error(dtype):
    target = make_target()
    for parameter in target.parameters():  # its buffers stay in fp32, as in a target that is loaded in 16 bit
        parameter.data = parameter.data.to(dtype)
    before = {name: tensor.clone() for name, tensor in (*target.named_parameters(), *target.named_buffers())}

    with pytest.raises(ZeroDivisionError), in_float64(target):
        1 / (target.dtype != torch.float64)

    after = dict((*target.named_parameters(), *target.named_buffers()))
    assert target.dtype == dtype
    assert any(tensor.dtype == torch.float32 for tensor in after.values())
    assert all(tensor.dtype == before[name].dtype for name, tensor in after.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
