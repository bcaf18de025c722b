import re

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.image import imread

from hf_carryover.evaluation import EvaluationArguments, evaluate
from hf_carryover.evaluation.plots import COLORS, INK, PARTS, draw_plots
from hf_carryover.evaluation.report import render_report
from tests.evaluation_fakes import make_tokenizer, write_prompts
from tests.fakes import make_drafter, make_target


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """An evaluation with a control, at two temperatures."""
    out = tmp_path_factory.mktemp("plots")
    prompts = [write_prompts(out / f"{name}.jsonl", ["1 2 3", "4 5 6"]) for name in ("here", "there")]
    arguments = EvaluationArguments(temperatures=(0.0, 1.0), max_new_tokens=6, prompts_per_set=(2, 1))
    models = make_target(), make_tokenizer(), make_drafter()
    summary = evaluate(*models, prompts=prompts, out=out, control=make_drafter(seed=3), arguments=arguments)
    return summary, out


def test_the_report_shows_every_plot_and_no_other(report):
    _, out = report

    shown = re.findall(r"!\[.*\]\((.*)\)", (out / "report.md").read_text())

    assert sorted(shown) == sorted(path.name for path in out.glob("*.png"))
    assert len(shown) == 9  # five greedy, and all but recall when sampling


def test_plots_have_no_ground_of_their_own(report):
    for path in report[1].glob("*.png"):
        image = imread(path)  # [rows, columns, RGBA]
        assert image[0, 0, 3] == 0
        assert image[..., 3].max() == 1


def luminance(color):
    channels = np.array(mpl.colors.to_rgb(color))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("color", sorted({INK, *COLORS.values(), *PARTS.values()}))
def test_every_color_stands_out_from_white_and_from_black(color):
    # The contrast of WCAG 2.1, which asks 3:1 of graphics.
    assert 1.05 / (luminance(color) + 0.05) >= 3
    assert (luminance(color) + 0.05) / 0.05 >= 3


def test_answers_of_one_token_can_be_reported(report, tmp_path):
    summary, _ = report
    no_rounds = [row | {"rounds": dict.fromkeys(row["rounds"])} for row in summary["speed"]]

    draw_plots(summary | {"speed": no_rounds}, tmp_path)

    assert "### Speed" in render_report(summary | {"speed": no_rounds})


def test_the_control_has_its_place_in_every_table(report):
    summary, out = report

    text = (out / "report.md").read_text()

    assert "| set | plain | lookup | library-dflash | carry-off | carry-on | control |" in text
    assert "carry-on minus control" in text
    # By set and by accepted drafts; by set, beside carry-on (three rows), and where the time goes.
    for section, count in (("### Accepted length", 2), ("### Speed", 5)):
        assert text.split(section)[1].split("\n### ")[0].count("control |") == count, section
    assert {row["minus"] for row in summary["differences"]} == {"carry-off", "control"}
