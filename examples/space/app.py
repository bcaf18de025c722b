"""Carryover Drafting in a browser: one prompt, answered plain and with a drafter, token by token.

    python examples/space/app.py

SPACE_DRAFTER names a drafter (folder or Hub id) beside those in `model_cards/`; SPACE_TARGET another target than the
embedded SmolLM2, for which those in `model_cards/` were made: then only SPACE_DRAFTER's is offered.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import gradio as gr
from torch import Tensor
from view import Answer, as_plain_text, error, message, stage, verdict

from hf_carryover import CarryoverDrafterModel, load_drafter, load_target, stream_tokens
from hf_carryover.targets import TARGETS

HERE = Path(__file__).parent
MOST_PROMPT_TOKENS, MOST_TOKENS = 256, 256
SECONDS_AN_ANSWER = 60
SECONDS_BETWEEN_LOOKS = 0.12
MOST_WAITING = 16
EXAMPLES = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate to French: The weather is beautiful today, and we are going to the park.",
)
PLAIN_FIRST = "Plain first, then with the drafter: both at once would slow each other."
DRAFTER_NEXT = "Now with the drafter. A replay of both, side by side, follows."
LEGEND = """<p class="legend"><span class="draft">accepted draft</span> <span class="own">the target's own</span>
<del>rejected draft</del> <del class="kept">rejected, its row carried on</del>
<span><sup class="carry">\u21b73</sup> carried rows that the round saw</span></p>"""
REPLAY = """() => {
    const stage = document.querySelector("#stage .stage");
    if (!stage) return;
    stage.classList.remove("replay");
    void stage.offsetWidth;
    stage.classList.add("replay");
}"""
SHOW_REJECTED = '(on) => { document.querySelector("#stage").classList.toggle("quiet", !on); }'


def drafter_sources() -> dict[str, str]:
    """Names of the drafters that can be chosen, and where each lies."""
    cards = next((path for path in (HERE / "model_cards", HERE.parents[1] / "model_cards") if path.is_dir()), HERE)
    found = {path.parent.name: str(path.parent) for path in sorted(cards.glob("*/config.json"))}
    named = os.environ.get("SPACE_DRAFTER")
    ours = {Path(named).name: named} if named else {}
    if os.environ.get("SPACE_TARGET", "smollm2") not in TARGETS:
        return ours
    return ours | {name: source for name, source in found.items() if name not in ours}


class StoppedError(Exception):
    """The reader wants no more of this answer."""


@dataclass
class Studio:
    """The target, the drafters by name, and whose session is answered: one at a time."""

    target: Any
    tokenizer: Any
    drafters: dict[str, CarryoverDrafterModel]
    session: str | None = None

    def warm_up(self, drafter: CarryoverDrafterModel | None) -> None:
        """Answer once, so that no measured answer pays for what only a first one does."""
        list(self.stream(self.encode("Hi"), drafter, {"do_sample": False, "max_new_tokens": 4}))

    def encode(self, prompt: str) -> dict[str, Tensor]:
        """The prompt's ids under the chat template."""
        chat = [{"role": "user", "content": prompt}]
        inputs = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return {name: inputs[name].to(self.target.device) for name in ("input_ids", "attention_mask")}

    def stream(self, inputs: dict[str, Tensor], drafter: CarryoverDrafterModel | None, options: dict[str, Any]) -> Any:
        """Tokens of one answer as they come."""
        return stream_tokens(
            self.target, self.tokenizer, inputs, drafter=drafter, max_time=SECONDS_AN_ANSWER, **options
        )

    def answer(
        self, prompt: str, name: str | None, carry: bool, temperature: float, length: int, request: gr.Request
    ) -> Iterator[tuple[Any, Any, Any]]:
        """Stream both answers in turn, then replay them: the message, the stage, and all of it as plain text."""
        self.session = request.session_hash
        try:
            yield from self._answer(prompt, name, carry, temperature, length)
        except StoppedError:
            yield message("Stopped."), gr.skip(), gr.skip()
        except (ValueError, RuntimeError, OSError) as problem:
            yield error(" ".join(str(problem).split())), gr.skip(), gr.skip()

    def _answer(
        self, prompt: str, name: str | None, carry: bool, temperature: float, length: int
    ) -> Iterator[tuple[Any, Any, Any]]:
        if not prompt.strip():
            raise ValueError("Expected a prompt, found none; type one, or choose an example.")
        inputs = self.encode(prompt)
        if (found := inputs["input_ids"].shape[1]) > MOST_PROMPT_TOKENS:
            raise ValueError(f"Expected a prompt of at most {MOST_PROMPT_TOKENS} tokens, found {found}; shorten it.")
        options: dict[str, Any] = {"max_new_tokens": int(length), "do_sample": temperature > 0}
        options |= {"temperature": temperature} if temperature > 0 else {}
        drafter = None if name is None else self.drafters[name]
        plain, drafted = Answer("Plain"), None
        if drafter is not None:
            # All drafts, so that there is something to see: by default few are handed over where they do not pay.
            drafter.carry_enabled, drafter.draft_length = carry, None
            drafted = Answer("Carryover" if carry else "Drafter without carry", drafter.config.num_drafts)
        for _ in self._grow(plain, inputs, None, options):
            yield message(PLAIN_FIRST), stage(plain, drafted), ""
        if drafted is not None:
            for _ in self._grow(drafted, inputs, drafter, options):
                yield message(DRAFTER_NEXT), stage(plain, drafted), ""
        says = verdict(plain, drafted, greedy=not options["do_sample"])
        if max(answer.seconds for answer in (plain, drafted) if answer) >= SECONDS_AN_ANSWER:
            says += f" An answer is stopped after {SECONDS_AN_ANSWER} seconds."
        yield message(says), stage(plain, drafted, replay=drafted is not None), as_plain_text(plain, drafted)

    def _grow(
        self,
        answer: Answer,
        inputs: dict[str, Tensor],
        drafter: CarryoverDrafterModel | None,
        options: dict[str, Any],
    ) -> Iterator[None]:
        """Fill an answer, with a stop every now and then to look at it."""
        looked, session = perf_counter(), self.session
        with closing(self.stream(inputs, drafter, options)) as tokens:
            for token in tokens:
                if self.session != session:
                    raise StoppedError
                answer.tokens.append(token)
                if perf_counter() - looked > SECONDS_BETWEEN_LOOKS:
                    yield
                    looked = perf_counter()
        yield

    def stop(self, request: gr.Request) -> None:
        """End the answer that this reader's session gets now."""
        if self.session == request.session_hash:
            self.session = None

    def carries(self, name: str) -> bool:
        """Whether a drafter learnt to read carried rows."""
        return bool(self.drafters[name].carry_embedding.any())


def page(studio: Studio) -> gr.Blocks:
    """The page: prompt, settings, stage, plain text."""
    names = list(studio.drafters)
    chosen = names[0] if names else None
    with gr.Blocks(title="Carryover Drafting", analytics_enabled=False) as blocks:
        gr.HTML(
            '<header class="top"><h1>Carryover Drafting</h1><p>A small drafter guesses, the target checks, and what '
            "it rejects is shown to the next guess. The text stays the target's own.</p></header>"
        )
        with gr.Row(equal_height=False):
            with gr.Column(scale=6, min_width=300):
                prompt = gr.Textbox(EXAMPLES[0], label="Prompt", lines=3, max_lines=8, elem_id="prompt")
                gr.Examples([[text] for text in EXAMPLES], inputs=prompt, label="Examples")
            with gr.Column(scale=5, min_width=300):
                drafter = gr.Dropdown(names, value=chosen, label="Drafter", interactive=True, visible=bool(names))
                with gr.Row():
                    carry = gr.Checkbox(
                        bool(chosen and studio.carries(chosen)),
                        label="Carry rejected rows",
                        elem_id="carry",
                        min_width=140,
                    )
                    show = gr.Checkbox(True, label="Show rejected drafts", elem_id="show", min_width=140)
                with gr.Row():
                    temperature = gr.Slider(0, 1.5, 0, step=0.1, label="Temperature", min_width=140)
                    length = gr.Slider(
                        16,
                        MOST_TOKENS,
                        64,
                        step=16,
                        label="New tokens",
                        elem_id="length",
                        min_width=140,
                    )
        with gr.Row(elem_id="actions"):
            run = gr.Button("Run", variant="primary", elem_id="run", scale=3, min_width=100)
            stop = gr.Button("Stop", elem_id="stop", min_width=60)
            again = gr.Button("Replay", elem_id="replay", min_width=60)
        says = gr.HTML(message("Run it: both answers appear here."), elem_id="says")
        empty = stage(Answer("Plain"), Answer("Carryover", 1) if names else None)
        shown = gr.HTML(empty, elem_id="stage")
        gr.HTML(LEGEND)
        with gr.Accordion("Both answers as plain text", open=False, elem_id="words"):
            words = gr.Textbox(label="Plain text", lines=12, max_lines=40, interactive=False, show_label=False)
        gr.on(
            [run.click, prompt.submit], studio.answer,
            inputs=[prompt, drafter, carry, temperature, length], outputs=[says, shown, words],
            show_progress="minimal", show_progress_on=says, concurrency_limit=1, api_visibility="private",
        )  # fmt: skip
        stop.click(studio.stop, queue=False, api_visibility="private")
        again.click(None, js=REPLAY)
        show.change(None, inputs=show, js=SHOW_REJECTED)
        drafter.change(studio.carries, drafter, carry, queue=False, show_progress="hidden", api_visibility="private")
    return blocks.queue(max_size=MOST_WAITING, default_concurrency_limit=1)


def main() -> None:
    """Load the target, then serve the page."""
    target, tokenizer = load_target(os.environ.get("SPACE_TARGET", "smollm2"))
    sources = drafter_sources()
    drafters = {name: load_drafter(source, target=target) for name, source in sources.items()}
    studio = Studio(target, tokenizer, drafters)
    for drafter in (None, *drafters.values()):
        studio.warm_up(drafter)
    theme = gr.themes.Base(primary_hue="teal", neutral_hue="slate", radius_size="lg", font=["system-ui", "sans-serif"])
    page(studio).launch(theme=theme, css_paths=HERE / "style.css", ssr_mode=False, show_error=True, footer_links=[])


if __name__ == "__main__":
    main()
