import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The command, and what its process took at most.
MEASURED = """
import resource
from hf_carryover import cli
cli.app(standalone_mode=False)
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["--ce_weight", "1"], ["--ce_weight", "0.1", "--l1_weight", "0.9"]], ids=["ce", "l1"]
)
def test_the_estimate_printed_at_the_start_is_within_30_percent_and_smollm2_needs_less_than_8_gb(words, tmp_path):
    numbers = random.Random(0)
    texts = [{name: [numbers.randrange(20, 49000) for _ in range(count)]
              for name, count in (("prompt_ids", 80), ("answer_ids", 320))} for _ in range(10)]  # fmt: skip
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    command = ["train", "--data", tmp_path / "texts.jsonl", "--output_dir", tmp_path / "out", "--num_layers", "3"]
    command += ["--block_size", "5", "--draft_vocab", "8192", "--num_anchors", "48", "--max_steps", "2"]
    command += ["--validation_every", "9", "--eval_strategy", "no", "--save_strategy", "no", *words]

    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, command)], cwd=ROOT, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr[-2000:]
    estimate = float(re.search(r"^all +([0-9.]+) GB$", done.stderr, re.MULTILINE)[1])
    peak = int(re.search(r"^peak (\d+)$", done.stdout, re.MULTILINE)[1]) * 1024 / 1e9  # kilobytes on Linux
    assert estimate == pytest.approx(peak, rel=0.3)
    assert peak < 8
