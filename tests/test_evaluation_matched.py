import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_carryover import CarryoverDrafterModel
from hf_carryover.evaluation.acceptance import summarize_matched
from hf_carryover.evaluation.matched import Matched, Probe, run_matched
from hf_carryover.evaluation.runs import decoding_options, run, systems_for
from tests.fakes import KINDS, VOCAB, make_drafter, make_target, plain, prompt

NEW_TOKENS = 9
# Which drafts are right where rows are carried, and where none are. The first never is: every round rejects all.
ON, OFF = (False, True, True, True), (False, True, False, False)


class TwoFacedDrafter(CarryoverDrafterModel):
    """Proposes right or wrong tokens by whether it sees carried rows; its slots' first number is the token."""

    def forward(self, **kwargs):
        output = super().forward(**kwargs)
        anchor = int(kwargs["position_ids"][0, -self.config.block_size])
        slots = torch.zeros_like(output.last_hidden_state)
        for k, right in enumerate(ON if kwargs["num_carried"] else OFF, 1):
            truth = self.truth[min(anchor + k, len(self.truth) - 1)]
            slots[0, k, 0] = truth if right else (truth + 1) % VOCAB
        return BaseModelOutputWithPast(slots, output.cache)

    def slot_logits(self, hidden, head):
        return torch.nn.functional.one_hot(hidden[..., 0].long(), VOCAB).float()


@pytest.fixture(scope="module")
def two_faced():
    """A greedy call of nine tokens with that drafter; its attention is uniform, because its queries are zero."""
    target, drafter = make_target(), make_drafter(cls=TwoFacedDrafter)
    for layer in drafter.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    drafter.truth = plain(target, input_ids=prompt())[0].tolist()
    return run_matched(drafter, target, prompt(), seed=0, **decoding_options(0.0, NEW_TOKENS))


def test_recall_on_and_off_is_what_the_drafter_was_told(two_faced):
    # The length left lets the seven rounds draft 4 4 4 4 3 2 1 tokens; the first of them carries nothing.
    found = summarize_matched([two_faced[1]])

    assert (found["anchors"], found["anchors_carrying"]) == (7, 6)
    assert found["recall_on"] == pytest.approx([0, 1, 4 / 5, 3 / 4])
    assert found["recall_off"] == [0, 1, 0, 0]
    assert found["recall_on_carrying"] == [0, 1, 1, 1]
    assert found["recall_off_carrying"] == [0, 1, 0, 0]


def test_reconvergence_is_the_share_of_later_rejected_drafts_that_stand(two_faced):
    # Of the rejected drafts after the first, the first round has one of three right, then all are; the last has none.
    found = summarize_matched([two_faced[1]])

    assert found["reconvergence"] == pytest.approx((1 / 3 + 1 + 1 + 1 + 1 + 1) / 6)


def test_attention_mass_of_uniform_attention_is_the_share_of_carried_rows(two_faced):
    # Committed are 7 rows of the prompt and one more each round; carried is what the round before drafted; B is 5.
    expected = [carried / (7 + i + carried + 5) for i, carried in enumerate([4, 4, 4, 4, 3, 2], 1)]

    assert two_faced[1].attention == pytest.approx(expected)


def test_attention_mass_is_read_where_the_carried_rows_lie(monkeypatch):
    # The key at place i gets a share in proportion to i, so that no other four keys have the same mass.
    drafter = make_drafter(cls=TwoFacedDrafter)
    drafter.truth = plain(make_target(), input_ids=prompt())[0].tolist()
    for layer in drafter.layers:
        attend = layer.self_attn.forward

        def uneven(block, memory, attend=attend, **kwargs):
            output, _ = attend(block, memory, **kwargs)
            shares = torch.arange(1.0, 1 + kwargs["cache"].get_seq_length())
            return output, (shares / shares.sum()).expand(1, 4, block.shape[1], -1)

        monkeypatch.setattr(layer.self_attn, "forward", uneven)

    _, matched = run_matched(drafter, make_target(), prompt(), seed=0, **decoding_options(0.0, 6))

    committed, carried, block = 8, 4, 5
    keys = committed + carried + block
    expected = sum(range(committed + 1, committed + carried + 1)) / sum(range(1, keys + 1))
    assert matched.attention[0] == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_measuring_does_not_change_what_is_measured(kind):
    target, drafter = make_target(), make_drafter(kind)
    system = next(s for s in systems_for(target, drafter, None) if s.name == "carry-on")
    decoding = decoding_options(0.0, 20)

    bare = run(system, target, prompt(), seed=0, **decoding)
    measured, _ = run_matched(drafter, target, prompt(), seed=0, **decoding)

    assert (measured.ids, measured.tokens, measured.drafts) == (bare.ids, bare.tokens, bare.drafts)
    assert drafter.config._attn_implementation == "sdpa"
    assert not drafter._forward_pre_hooks


@pytest.mark.parametrize("kind", KINDS)
def test_the_draft_without_carry_is_that_of_a_call_that_starts_at_its_anchor(kind):
    target, drafter = make_target(), make_drafter(kind)
    with Probe(drafter) as probe:
        drafter.carry_enabled = True
        text = target.generate(input_ids=prompt(), assistant_model=drafter, do_sample=False, max_new_tokens=12)
    rounds, length, seen = drafter.last_stats.rounds, 8, []
    drafter.carry_enabled = False
    drafter.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state))

    for slots, record in zip(probe.slots, rounds, strict=False):
        seen.clear()
        target.generate(input_ids=text[:, : length - 1], assistant_model=drafter, do_sample=False, max_new_tokens=3)
        length += record.num_accepted + 1
        assert slots is None or torch.allclose(slots, seen[0], atol=1e-4)
    assert sum(slots is not None for slots in probe.slots) >= 5


def test_attention_and_hooks_are_put_back_after_an_error(monkeypatch):
    drafter = make_drafter()
    mlp, forward = drafter.layers[1].mlp, drafter.layers[1].mlp.forward
    monkeypatch.setattr(
        mlp, "forward", lambda hidden: 1 / (drafter.config._attn_implementation != "eager") * forward(hidden)
    )

    with pytest.raises(ZeroDivisionError):
        run_matched(drafter, make_target(), prompt(), seed=0, **decoding_options(0.0, 5))

    assert drafter.config._attn_implementation == "sdpa"
    assert not drafter._forward_pre_hooks
    assert not any(layer.self_attn._forward_hooks for layer in drafter.layers)


def test_nothing_seen_gives_empty_lists():
    found = summarize_matched([Matched()])

    assert (found["anchors"], found["recall_on"], found["reconvergence"], found["attention_mass"]) == (
        0,
        [],
        None,
        None,
    )
