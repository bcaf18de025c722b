"""Make the four drafters of SmolLM2: two baselines, and Carryover and control from each.

The Markov baseline starts where the DFlash one ended, after a stage that learns the first draft alone. Both
baselines are trained on after a first Carryover stage: so those of ``model_cards`` came about, on two cores.

    python examples/make_drafters.py --data smollm2_selfchat.jsonl.gz --out runs

The same call goes on where an interrupted one stopped. ``--share 0.01`` tries everything in a hundredth of the steps.
Further flags go to every training.
"""

import argparse
import subprocess
from pathlib import Path

import yaml

RECIPES = Path(__file__).parent / "recipes"
# Each with its recipe and what it starts from.
DRAFTERS = {
    "smollm2-dflash": ("smollm2-dflash", None),
    "smollm2-dflash-first": ("smollm2-dflash-first", "smollm2-dflash"),
    "smollm2-dflash-longer": ("smollm2-dflash-longer", "smollm2-dflash-first"),
    "smollm2-dflash-carryover": ("smollm2-longer-carryover", "smollm2-dflash-longer"),
    "smollm2-dflash-control": ("smollm2-longer-control", "smollm2-dflash-longer"),
    "smollm2-anchor": ("smollm2-anchor", "smollm2-dflash"),
    "smollm2-markov": ("smollm2-markov", "smollm2-anchor"),
    "smollm2-markov-first": ("smollm2-markov-first", "smollm2-markov"),
    "smollm2-markov-longer": ("smollm2-markov-longer", "smollm2-markov-first"),
    "smollm2-markov-carryover": ("smollm2-longer-carryover", "smollm2-markov-longer"),
    "smollm2-markov-control": ("smollm2-longer-control", "smollm2-markov-longer"),
}


def main() -> None:
    """Run the trainings that are not finished, in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=1.0, help="share of the recipes' steps")
    parser.add_argument("--only", nargs="*", default=list(DRAFTERS), help="some of: " + ", ".join(DRAFTERS))
    options, further = parser.parse_known_args()
    for name in options.only:
        out, (recipe_name, start) = options.out / name, DRAFTERS[name]
        if (out / "training.json").exists():
            print(f"{name} is finished: {out}")
            continue
        recipe = RECIPES / f"{recipe_name}.yaml"
        steps = max(1, round(yaml.safe_load(recipe.read_text())["max_steps"] * options.share))
        command = ["hf-carryover", "train", recipe, "--data", options.data, "--output_dir", out, "--max_steps", steps]
        command += ["--drafter", options.out / start] if start else []
        print(f"== {name} ==", flush=True)
        subprocess.run([*map(str, command), *further], check=True)


if __name__ == "__main__":
    main()
