"""The page of examples/space: what it shows, and how it behaves in a real browser on loopback."""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_carryover import StreamedToken, stream_tokens
from tests.evaluation_fakes import make_tokenizer, write_target
from tests.fakes import Letters, ScriptedDrafter, make_drafter, make_target, plain, prompt

ROOT = Path(__file__).parents[1]
SPACE = ROOT / "examples" / "space"
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_gradio = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None, reason="gradio is not installed; pip install '.[space]'"
)
needs_browser = pytest.mark.skipif(
    BROWSER is None or DRIVER is None or importlib.util.find_spec("selenium") is None,
    reason="no browser; apt-get install chromium chromium-driver, and pip install selenium",
)


@pytest.fixture
def view(monkeypatch):
    """The module that draws; it needs nothing but our package."""
    monkeypatch.syspath_prepend(str(SPACE))
    return importlib.import_module("view")


@pytest.fixture
def drafted(view):
    """A scripted answer of rounds with 2, 0, 4 and 1 accepted drafts, and its drafter."""
    target, ids = make_target(), prompt()
    drafter = make_drafter(cls=ScriptedDrafter)
    drafter.follow(plain(target, input_ids=ids, max_new_tokens=12), [2, 0, 4])
    answer = view.Answer("Carryover", drafter.config.num_drafts)
    answer.tokens += stream_tokens(
        target, Letters(), {"input_ids": ids}, drafter=drafter, do_sample=False, max_new_tokens=12
    )
    return answer, drafter


def token(text, **fields):
    return StreamedToken(**({"id": 0, "text": text, "is_draft": False, "round": 0, "seconds": 0.5} | fields))


def test_the_numbers_are_those_of_the_drafters_record(drafted):
    answer, drafter = drafted

    assert answer.accepted == [r.num_accepted for r in drafter.last_stats.rounds]
    assert answer.accepted_length == drafter.last_stats.accepted_length
    assert answer.carried_rows == drafter.last_stats.carried_rows


def test_each_token_is_marked_by_its_origin_and_fallen_drafts_are_struck_out(view, drafted):
    answer, _ = drafted

    drawn = view.stage(view.Answer("Plain"), answer)

    assert drawn.count('class="draft"') == sum(answer.accepted)
    assert drawn.count('class="own"') == 5
    # Rounds 1 and 2 lost 2 and 4 drafts, whose rows the next rounds saw.
    assert drawn.count('<del class="kept"') == 6
    assert re.findall(r"\u21b7(\d)", drawn) == ["2", "4"]
    assert 'aria-label="Accepted drafts in each of 4 rounds, of 4 at most: 2, 0, 4, 1"' in drawn


def test_plain_text_says_the_same_without_colour(view, drafted):
    answer, _ = drafted
    other = view.Answer("Plain", tokens=[token("Hi")])

    words = view.as_plain_text(other, answer)

    assert words.startswith("Plain (1 tokens in 0.5 s, 2.0 tokens/s):\nHi\n\nCarryover (12 tokens in ")
    assert "accepted length 2.75 over 4 rounds, 6 carried rows" in words
    assert answer.text in words
    assert re.search(r"2\. saw 2 carried rows, rejected '\w{4}', the target's own '\w'\.", words)


def test_text_is_shown_as_it_is(view):
    answer = view.Answer("<Plain>", tokens=[token(" <b>&"), token("x", rejected=("", "\n<i>"), round=1)])

    drawn = view.stage(answer, None) + view.error("<script>")

    assert ' <span class="own" style="--at:0.50s">&lt;b&gt;&amp;</span>' in drawn
    assert "\u00b7</del>" in drawn
    assert "\u21b5&lt;i&gt;</del>" in drawn
    assert "&lt;Plain&gt;" in drawn
    assert "&lt;script&gt;" in drawn


@pytest.mark.parametrize(
    ("ids", "greedy", "sentence"),
    [
        ([1, 2], True, "Carryover ran at 2.00 times plain's speed on this machine. The same text, token for token."),
        ([1, 3], True, "The texts part at token 2;"),
        ([1], True, "The same text, cut at another place."),
        ([1, 3], False, "Both texts are samples of the target's own distribution."),
    ],
    ids=["same", "other", "cut", "sampled"],
)
def test_the_verdict_compares_speed_and_text(view, ids, greedy, sentence):
    one = view.Answer("Plain", tokens=[token("", id=i, seconds=2.0) for i in (1, 2)])
    other = view.Answer("Carryover", 4, tokens=[token("", id=i, seconds=len(ids) / 2) for i in ids])

    assert sentence in view.verdict(one, other, greedy=greedy)


def test_without_a_drafter_the_verdict_says_so(view):
    assert "There is no drafter here" in view.verdict(view.Answer("Plain"), None, greedy=True)


def test_the_folder_has_the_hubs_metadata():
    import yaml

    facts = yaml.safe_load((SPACE / "README.md").read_text().split("---")[1])

    assert facts["sdk"] == "docker"
    assert f"GRADIO_SERVER_PORT={facts['app_port']}" in (SPACE / "Dockerfile").read_text()
    assert len(facts["short_description"]) <= 60
    assert facts["license"] == "apache-2.0"


@pytest.fixture
def app(monkeypatch):
    """The program, not started."""
    monkeypatch.syspath_prepend(str(SPACE))
    return importlib.import_module("app")


READER = SimpleNamespace(session_hash="reader")


def last(answers):
    """What stands on the page in the end: message, stage, plain text."""
    return list(answers)[-1]


@pytest.mark.slow
@needs_gradio
def test_only_the_reader_who_asked_can_stop_an_answer(app, monkeypatch):
    studio = app.Studio(make_target(), make_tokenizer(), {"tiny": make_drafter()})
    monkeypatch.setattr(app, "SECONDS_BETWEEN_LOOKS", 0.0)
    answers = studio.answer("1 2", "tiny", True, 0.0, 200, READER)

    next(answers)
    studio.stop(SimpleNamespace(session_hash="somebody else"))
    next(answers)
    studio.stop(READER)

    assert "Stopped." in next(answers)[0]
    assert list(answers) == []


@pytest.mark.slow
@needs_gradio
def test_without_a_drafter_the_page_answers_plain(app):
    studio = app.Studio(make_target(), make_tokenizer(), {})

    says, drawn, words = last(studio.answer("1 2", None, True, 0.0, 16, READER))

    assert "There is no drafter here" in says
    assert "replay" not in drawn
    assert words.startswith("Plain (16 tokens in ")
    # Not here, since Gradio leaves an event loop open.
    script = "import app; app.page(app.Studio(None, None, {}))"
    subprocess.run([sys.executable, "-c", script], cwd=SPACE, check=True)


@pytest.mark.slow
@needs_gradio
def test_sampling_and_a_slow_answer_are_told(app, monkeypatch):
    studio = app.Studio(make_target(), make_tokenizer(), {"tiny": make_drafter()})
    monkeypatch.setattr(app, "SECONDS_AN_ANSWER", 0.001)

    says, drawn, _ = last(studio.answer("1 2", "tiny", True, 0.8, 200, READER))

    assert "Both texts are samples" in says
    assert "An answer is stopped after 0.001 seconds." in says
    assert "replay" in drawn


@pytest.mark.slow
@needs_gradio
def test_what_generate_refuses_is_told_in_a_sentence(app):
    studio = app.Studio(make_target(), make_tokenizer(), {"other": make_drafter(vocab_size=71)})

    says, _, _ = last(studio.answer("1 2", "other", True, 0.0, 16, READER))

    assert 'role="alert"' in says
    assert "vocabulary size 71" in says


@pytest.mark.slow
@needs_gradio
def test_drafters_are_those_of_model_cards_and_a_named_one(app, monkeypatch, tmp_path):
    make_drafter().save_pretrained(tmp_path / "model_cards" / "one")
    (tmp_path / "model_cards" / "README.md").touch()
    monkeypatch.setattr(app, "HERE", tmp_path)
    assert app.drafter_sources() == {"one": str(tmp_path / "model_cards" / "one")}

    monkeypatch.setenv("SPACE_DRAFTER", "someone/two")
    assert app.drafter_sources() == {"two": "someone/two", "one": str(tmp_path / "model_cards" / "one")}
    assert next(iter(app.drafter_sources())) == "two"

    monkeypatch.setenv("SPACE_TARGET", "someone/else")  # for which those of model_cards were not made
    assert app.drafter_sources() == {"two": "someone/two"}


IS_FROM_WHEEL = """
import sys, hf_carryover, hf_carryover.model_card
assert hf_carryover.__file__.startswith(sys.prefix), hf_carryover.__file__
assert hf_carryover.model_card.TEMPLATE.is_file()
"""


# -- in a browser


class Page:
    """A browser on the page, in the words of a person."""

    def __init__(self, url):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = BROWSER
        for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1280,1000"):
            options.add_argument(f"--{flag}")
        self.browser = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.browser.get(url)
        self.wait(lambda: self.all("#run"))

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def text(self, selector):
        """Text of the first match, hidden or not, at one moment: the page redraws while it streams."""
        script = "const found = document.querySelector(arguments[0]); return found ? found.textContent : '';"
        return self.browser.execute_script(script, selector)

    def number(self, name, pane=".drafted"):
        """A number of a pane."""
        script = (
            "return [...document.querySelectorAll(arguments[0] + ' dl div')]"
            ".find(d => d.querySelector('dt').textContent === arguments[1])?.querySelector('dd').textContent;"
        )
        return float(self.browser.execute_script(script, f"#stage {pane}", name) or 0)

    def wait(self, condition, seconds=60):
        until = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < until, self.text("body")[-2000:]
            time.sleep(0.1)
        return found

    def ask(self, prompt):
        box = self.all("#prompt textarea")[0]
        box.clear()
        box.send_keys(prompt)
        self.all("#run")[0].click()

    def finished(self):
        return self.all("#stage .stage.replay") and "times plain's speed" in self.text("#says")


# The page in fp32, whatever the processor: in bf16 the texts of random weights part at near-ties.
IN_FP32 = """
import os, runpy, torch
from hf_carryover import targets
targets.default_dtype = lambda device: torch.float32
runpy.run_path(os.path.abspath("app.py"), run_name="__main__")
"""


def serve(target, drafter, log, *, folder=SPACE, python=sys.executable, words=("app.py",)):
    """Start the page as its README says; returns process and address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"SPACE_TARGET": target, "SPACE_DRAFTER": drafter, "GRADIO_SERVER_PORT": port}
    environment = os.environ | {name: str(value) for name, value in names.items()}
    if python != sys.executable:  # its packages only
        environment.pop("PYTHONPATH", None)
    environment |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_SERVER_NAME": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        process = subprocess.Popen([python, *words], cwd=folder, env=environment, stdout=output, stderr=output)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).read()
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        else:
            return process, url


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The page on a tiny random target whose words are numbers."""
    folder = tmp_path_factory.mktemp("space")
    write_target(folder / "target")
    make_drafter().save_pretrained(folder / "tiny-drafter")
    process, url = serve(folder / "target", folder / "tiny-drafter", folder / "log", words=("-c", IN_FP32))
    yield url
    process.terminate()
    process.wait()


@pytest.fixture(scope="module")
def browser(url):
    page = Page(url)
    yield page
    page.browser.quit()


@pytest.fixture
def page(browser, url):
    browser.browser.get(url)
    browser.wait(lambda: browser.all("#run"))
    return browser


@pytest.mark.slow
@needs_gradio
@needs_browser
class TestInChromium:
    def test_a_prompt_is_answered_twice_with_the_same_text_and_numbers(self, page):
        page.ask("1 2 3")
        page.wait(page.finished)

        assert "The same text, token for token." in page.text("#says")
        own = page.browser.execute_script(
            "return [...document.querySelectorAll('#stage .plain .text span.own')].map(s => s.textContent).join(' ')"
        )
        drafted = page.browser.execute_script(
            "return [...document.querySelectorAll('#stage .drafted .text span.own, #stage .drafted .text span.draft')]"
            ".map(s => s.textContent).join(' ')"
        )
        assert own == drafted
        assert len(own.split(" ")) == page.number("tokens", ".plain") == page.number("tokens") > 10
        assert page.number("tokens/s") > 0
        assert page.number("accepted length") >= 1
        assert page.number("carried rows") > 0
        assert page.all("#stage .chart .bars i")
        assert page.all("#stage del.kept")
        assert page.all("#stage .carry")

    def test_the_answers_are_there_as_plain_text_too(self, page):
        page.ask("4 5")
        page.wait(page.finished)
        page.all("#words button")[0].click()

        words = page.wait(lambda: page.all("#words textarea"))[0].get_property("value")

        assert words.startswith("Plain (")
        assert "Round by round:\n1. " in words

    def test_carry_can_be_switched_off(self, page):
        page.all("#carry input")[0].click()
        page.ask("1 2 3")
        page.wait(page.finished)

        assert "Drafter without carry" in page.text("#stage .drafted h3")
        assert page.number("carried rows") == 0
        assert page.all("#stage del.lost")
        assert not page.all("#stage .carry")

    def test_a_replay_shows_every_token_at_its_moment(self, page):
        page.ask("7 8")
        page.wait(page.finished)
        delays = page.browser.execute_script(
            "return [...document.querySelectorAll('#stage .drafted .text span.own')]"
            ".map(s => parseFloat(getComputedStyle(s).animationDelay))"
        )
        page.all("#replay")[0].click()

        assert delays == sorted(delays)
        assert delays[-1] > 0
        assert page.all("#stage .stage.replay")

    @pytest.mark.parametrize(
        ("prompt", "sentence"),
        [
            ("7 " * 300, "Expected a prompt of at most 256 tokens, found 301; shorten it."),
            (" ", "Expected a prompt, found none; type one, or choose an example."),
        ],
        ids=["too-long", "empty"],
    )
    def test_a_prompt_that_does_not_fit_gets_a_clear_sentence(self, page, prompt, sentence):
        page.ask(prompt)

        page.wait(lambda: page.all("#says .message.error"))

        assert page.text("#says [role=alert]") == sentence

    def test_two_users_at_once_are_both_answered(self, page, url):
        other = Page(url)
        try:
            page.ask("1 2 3")
            other.ask("9 8 7")
            page.wait(page.finished)
            other.wait(other.finished)
            said = [user.text("#says") for user in (page, other)]
            texts = [user.text("#stage .plain .text") for user in (page, other)]
        finally:
            other.browser.quit()

        assert all("The same text, token for token." in sentence for sentence in said)
        assert texts[0] != texts[1]

    def test_nothing_is_cut_off_on_a_phone_and_no_error_is_logged(self, page):
        page.browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        )
        try:
            page.ask("1 2 3")
            page.wait(page.finished)
            width = page.browser.execute_script("return document.documentElement.scrollWidth")
        finally:
            page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

        assert width == 390
        assert [line for line in page.browser.get_log("browser") if line["level"] == "SEVERE"] == []


@pytest.mark.slow
@needs_gradio
@needs_browser
def test_smollm2_answers_in_the_browser_and_can_be_stopped(smollm2, tmp_path):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from exactness import random_drafter

    target, _ = smollm2
    random_drafter(target, sample_from_anchor=False).save_pretrained(tmp_path / "random-drafter")
    process, url = serve("smollm2", tmp_path / "random-drafter", tmp_path / "log")
    page = Page(url)
    try:
        page.ask("Tell a long story.")
        page.wait(lambda: page.number("tokens", ".plain") > 3)
        page.all("#stop")[0].click()
        page.wait(lambda: page.text("#says .message") == "Stopped.")
        time.sleep(1)  # Gradio takes the next click once the call before it is closed
        page.browser.execute_script(
            "const box = document.querySelector('#length input[type=number]'); box.value = 16;"
            "box.dispatchEvent(new Event('input', {bubbles: true})); box.dispatchEvent(new Event('blur'));"
        )
        page.ask("Name three rivers in Europe.")
        page.wait(page.finished, seconds=240)
        shown, tokens = page.text("#stage .plain .text"), page.number("tokens")
    finally:
        page.browser.quit()
        process.terminate()
        process.wait()

    assert len(shown) > 20
    assert tokens == 16


@pytest.mark.all
def test_the_folder_that_make_space_puts_together_makes_a_running_environment(tmp_path):
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(["make", "space"], cwd=ROOT, check=True)
    folder = Path(shutil.copytree(ROOT / "build" / "space", tmp_path / "space"))
    make_drafter().save_pretrained(tmp_path / "drafter")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"

    subprocess.run([python, "-m", "pip", "install", "-q", "-r", "requirements.txt"], cwd=folder, check=True, env=clean)
    subprocess.run([python, "-c", IS_FROM_WHEEL], cwd=folder, check=True, env=clean)
    process, _ = serve(
        write_target(tmp_path / "target"), tmp_path / "drafter", tmp_path / "log", folder=folder, python=python
    )
    process.terminate()
    process.wait()
