import torch

from hf_carryover import CarryoverCache
from tests.fakes import visible


def append(cache, *values):
    """Append one row a value to both layers, as a drafter pass does."""
    rows = torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1)
    for layer in range(2):
        keys, _ = cache.update(rows, rows, layer)
    return keys.flatten().tolist()


def test_a_pass_sees_committed_carried_and_block_rows_in_this_order():
    cache = CarryoverCache()
    cache.commit(2)
    append(cache, 0, 1, 90, 91)

    cache.commit(1)
    cache.carry(2)
    seen = append(cache, 2, 70, 71, 92, 93)

    assert seen == [0, 1, 2, 70, 71, 92, 93]
    assert visible(cache, 1)[0].flatten().tolist() == [0, 1, 2, 70, 71]


def test_rows_carried_in_one_round_are_gone_in_the_next():
    cache = CarryoverCache()
    cache.commit(1)
    cache.carry(2)
    append(cache, 0, 70, 71, 90)

    cache.commit(1)
    seen = append(cache, 1, 91)

    assert seen == [0, 1, 91]
    assert (cache.num_committed, cache.num_carried) == (2, 0)
    assert visible(cache)[0].flatten().tolist() == [0, 1]


def test_memory_follows_the_text_not_the_rounds():
    cache = CarryoverCache()
    for _ in range(50):
        cache.commit(1)
        cache.carry(4)
        append(cache, *range(13))

    assert cache.layers[0].keys.shape[2] == 50 + 4 + 8
    assert visible(cache)[0].shape[2] == 50 + 4
