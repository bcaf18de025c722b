"""What could carried rows add at best? What the target itself would say after each rejected draft.

    python benchmarks/rejected_rows.py --drafter model_cards/smollm2-dflash-carryover --data smollm2_selfchat.jsonl.gz

Rounds are rehearsed at random places of texts that training held out: draft, verify, and draft again, without and with
the rejected rows. A rejected row is the target's state at a place of the next block; its own likeliest token is the
one that a perfect reader of that row would draft for the place behind it. The table shows, by position in the next
block, how often that token is right, beside the draft without and with the rows, and how often it is right where the
draft without them is the first wrong one of its block: there, and only there, can a row make a round longer.
"""

import argparse

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_carryover.conversion import load_drafter
from hf_carryover.targets import load_target
from hf_carryover.training import read_examples
from hf_carryover.training.data import AnchoredTexts, collate
from hf_carryover.training.masks import Texts
from hf_carryover.training.rehearsal import Rehearsal, recorded

BATCH = 8  # texts


@torch.no_grad()
def rehearse(rehearsal: Rehearsal, texts: Texts, anchors: Tensor) -> dict[str, Tensor]:
    """Which drafts of the blocks after a round are right, ``[N, M, K]``: without rows, with them, and the rows' own.

    ``known`` marks the places whose token is recorded and whose row, one place before, was rejected.
    """
    target, seen = rehearsal.target, []
    reading = rehearsal.read(texts)
    drafts = rehearsal.propose(texts, anchors, rehearsal.draft(texts, reading, anchors))
    num_accepted = rehearsal.accept(texts, anchors, drafts)
    hook = target.get_decoder().register_forward_hook(lambda *call: seen.append(call[-1].last_hidden_state))
    rejected = rehearsal.verify(texts, reading, anchors, drafts, num_accepted)
    hook.remove()
    said = target.get_output_embeddings()(seen[0]).argmax(-1).view(drafts.shape)  # [N, M, K]
    following = rehearsal.next_anchors(texts, anchors, num_accepted)
    shift = num_accepted[..., None] + torch.arange(drafts.shape[2], device=drafts.device)  # row of each next draft
    label = recorded(texts, following, drafts.shape[2], first=1)
    return {
        "known": (shift < drafts.shape[2]) & (label >= 0),
        "without": rehearsal.propose(texts, following, rehearsal.draft(texts, reading, following)) == label,
        "with": rehearsal.propose(texts, following, rehearsal.draft(texts, reading, following, rejected)) == label,
        "row": said.gather(2, shift.clamp(max=drafts.shape[2] - 1)) == label,
    }


def main() -> None:
    """Rehearse and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--anchors", type=int, default=32, help="places of a text")
    options = parser.parse_args()
    target, tokenizer = load_target(options.target)
    drafter = load_drafter(options.drafter, target=target)
    _, held = read_examples(options.data, tokenizer, max_length=640).split(50)
    places = AnchoredTexts(held[: options.texts], num_anchors=options.anchors, seed=0)
    found = []
    for start in range(0, len(places), BATCH):
        items = collate([places[i] for i in range(start, min(start + BATCH, len(places)))])
        texts, anchors = Texts(items["input_ids"], items["ends"]), items["anchors"]
        found.append(rehearse(Rehearsal(drafter, target), texts, anchors))
    known, without, with_rows, row = (
        torch.cat([part[name].flatten(0, 1) for part in found]) for name in ("known", "without", "with", "row")
    )  # [rounds, K]
    first_wrong = known & ~without & (without.long().cumprod(-1).sum(-1, keepdim=True) == torch.arange(row.shape[1]))
    table = Table("draft", "places", "right without rows", "with rows", "row's own token right", "first wrong",
                  "row's own token right there")  # fmt: skip
    for k in range(row.shape[1]):
        here, wrong = known[:, k], first_wrong[:, k]
        shares = [f"{right[here, k].float().mean():.3f}" for right in (without, with_rows, row)]
        table.add_row(
            str(k + 1), str(int(here.sum())), *shares, str(int(wrong.sum())), f"{row[wrong, k].float().mean():.3f}"
        )
    console, rounds = Console(width=150), int(known[:, 0].sum())
    console.print(table)
    mended = (first_wrong & row).sum().item() / rounds
    console.print(f"A perfect reader would mend the first wrong draft of {mended:.1%} of {rounds} rounds.")


if __name__ == "__main__":
    main()
