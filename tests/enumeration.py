"""What is the law of a sampled text, exactly? Every outcome of the chances in a call, and the target's own law."""

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList


class Tree:
    """Enumerates every outcome of a function that draws: replays it along each branch and adds up probabilities."""

    def __init__(self, monkeypatch):
        self.path, self.depth, self.probability = [], 0, 1.0
        monkeypatch.setattr(torch, "multinomial", self.multinomial)
        monkeypatch.setattr(torch, "rand_like", self.rand_like)

    def choose(self, weights):
        """The next outcome with a weight above zero, by the path so far."""
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        if self.depth == len(self.path):
            self.path.append([0, len(possible)])
        index = possible[self.path[self.depth][0]]
        self.depth += 1
        self.probability *= weights[index]
        return index

    def multinomial(self, probabilities, num_samples):
        assert probabilities.shape[0] == num_samples == 1
        return torch.tensor([[self.choose(probabilities[0].double().tolist())]])

    def rand_like(self, ratio):
        """Acceptance draws ``r <= ratio``: one outcome for each place of the first rejection."""
        accept = ratio.flatten().double().clamp(0, 1).tolist()
        ways = [torch.tensor(accept[:n]).prod().item() * (1 - accept[n]) for n in range(len(accept))]
        n = self.choose([*ways, torch.tensor(accept).prod().item()])
        draws = torch.where(torch.arange(len(accept)) < n, -1.0, 2.0)
        return draws.view_as(ratio)

    def run(self, function):
        law = {}
        while True:
            self.depth, self.probability = 0, 1.0
            outcome = function()
            law[outcome] = law.get(outcome, 0.0) + self.probability
            while self.path and self.path[-1][0] + 1 == self.path[-1][1]:
                self.path.pop()
            if not self.path:
                return law
            self.path[-1][0] += 1


def law_of_target(target, ids, num_tokens, *, criteria=None, processors=(), tokenizer=None, **options):
    """Probability of each continuation, from one plain pass a prefix, through Transformers' processors and stops."""
    config, kwargs = target._prepare_generation_config(
        None, do_sample=True, max_length=ids.shape[1] + num_tokens, **options
    )
    target._prepare_special_tokens(config, True, device="cpu")
    criteria = target._get_stopping_criteria(config, StoppingCriteriaList(criteria or []), tokenizer=tokenizer)
    custom = LogitsProcessorList(processors)
    processors = target._get_logits_processor(config, ids.shape[1], ids, None, custom, "cpu", kwargs)
    law, unfinished = {}, {(): 1.0}
    while unfinished:
        prefix, probability = unfinished.popitem()
        text = torch.cat([ids, torch.tensor([prefix], dtype=torch.long)], dim=1)
        if prefix and criteria(text, None).all():
            law[prefix] = probability
            continue
        scores = processors(text, target(text).logits[:, -1].float()).softmax(-1)[0].double()
        unfinished |= {(*prefix, token): probability * share for token, share in enumerate(scores.tolist()) if share}
    return law


def distance(one, other):
    """Total variation of two laws."""
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in one.keys() | other.keys()) / 2
