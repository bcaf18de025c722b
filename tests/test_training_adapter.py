import pytest
import torch
from peft import PeftModel

from hf_carryover.training.adapter import adapter_of
from hf_carryover.training.interruption import MarkComplete, last_checkpoint
from tests.fakes import make_drafter, make_target, plain, prompt
from tests.test_training_trainer import answered, trainer_of


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def examples(target):
    return answered(target, count=8)


def block(drafter, target):
    """Last hidden states of a block that carries a row."""
    network = drafter.get_base_model() if isinstance(drafter, PeftModel) else drafter
    torch.manual_seed(5)
    memory = torch.randn(1, 6, network.config.feature_size)
    memory = torch.cat([memory, network.mark_rejected(torch.randn(1, 1, network.config.feature_size))], dim=1)
    return network(
        noise_embeds=network.embed_block(torch.tensor([[3]]), target.get_input_embeddings()),
        context_hidden_states=memory,
        position_ids=torch.tensor([[0, 1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10]]),
        num_carried=1,
    ).last_hidden_state


def test_an_adapter_and_the_carry_embedding_are_all_that_is_trained(target, examples, tmp_path):
    adapter = adapter_of(make_drafter(), 4)
    before = {name: p.clone() for name, p in adapter.named_parameters()}

    trainer_of(adapter, target, examples, tmp_path, stage="carryover").train()

    changed = {name for name, p in adapter.named_parameters() if not torch.equal(p, before[name])}
    assert {name for name in changed if "lora_" not in name} == {"base_model.model.carry_embedding"}
    assert any("lora_B" in name for name in changed)


def test_a_saved_adapter_loads_with_its_carry_embedding_and_merges_to_the_same(target, examples, tmp_path):
    adapter = adapter_of(make_drafter(), 4)
    trainer_of(adapter, target, examples, tmp_path / "run", stage="carryover").train()
    adapter.eval()
    trained = block(adapter, target)

    adapter.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(make_drafter(), tmp_path / "adapter").eval()
    found = block(loaded, target)
    merged = adapter.merge_and_unload()

    torch.testing.assert_close(found, trained)
    torch.testing.assert_close(block(merged, target), trained, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(block(type(merged).from_pretrained(tmp_path / "merged"), target), block(merged, target))
    ids = prompt()
    text = plain(target, input_ids=ids, attention_mask=torch.ones_like(ids), assistant_model=loaded)
    assert torch.equal(text, plain(target, input_ids=ids, attention_mask=torch.ones_like(ids)))


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_an_interrupted_adapter_ends_bit_equal(bf16, target, examples, tmp_path):
    settings = {"stage": "carryover", "max_steps": 6, "save_steps": 3, "bf16": bf16}
    straight, again = adapter_of(make_drafter(), 4), adapter_of(make_drafter(), 4)
    trainer_of(straight, target, examples, tmp_path, [MarkComplete()], **settings).train()
    (tmp_path / "checkpoint-6" / "complete").unlink()
    trainer_of(again, target, examples, tmp_path / "again", **settings).train(
        resume_from_checkpoint=last_checkpoint(tmp_path)
    )

    for name, tensor in straight.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_an_adapters_drafts_are_all_computed_in_the_dtype_of_the_one_that_learns(target, examples, tmp_path):
    # Else the loss with rows (bf16) and without (fp32) would not be a pair.
    drafter, dtypes = make_drafter(), []
    drafter.layers[0].self_attn.q_proj.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    adapter = adapter_of(drafter, 4)

    trainer_of(adapter, target, examples, tmp_path, stage="carryover", max_steps=2, bf16=True).train()

    assert len(dtypes) >= 6  # first draft, the one that learns, and the bare one of a logged step
    assert set(dtypes) == {torch.bfloat16}
