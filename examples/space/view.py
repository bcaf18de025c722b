"""How does an answer look? Its tokens, numbers and chart as HTML, and all of it once more as plain text."""

from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from operator import attrgetter

from hf_carryover import StreamedToken

# Stand for drafts without a shape of their own: special tokens such as the end of the turn, and line breaks.
SPECIAL, NEW_LINE = "\u00b7", "\u21b5"


@dataclass
class Answer:
    """An answer so far; ``num_drafts`` is the most that a round may hand over, 0 for plain decoding."""

    title: str
    num_drafts: int = 0
    tokens: list[StreamedToken] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(token.text for token in self.tokens)

    @property
    def seconds(self) -> float:
        """When the newest token came."""
        return self.tokens[-1].seconds if self.tokens else 0.0

    @property
    def rate(self) -> float:
        """Tokens a second so far."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def rounds(self) -> list[list[StreamedToken]]:
        """The tokens of each round; the prompt's pass is none."""
        return [list(tokens) for number, tokens in groupby(self.tokens, attrgetter("round")) if number]

    @property
    def accepted(self) -> list[int]:
        """Accepted drafts of each round."""
        return [sum(token.is_draft for token in tokens) for tokens in self.rounds]

    @property
    def accepted_length(self) -> float:
        """Tokens a round, the target's own included."""
        return sum(map(len, self.rounds)) / len(self.rounds) if self.rounds else 0.0

    @property
    def carried_rows(self) -> int:
        """Rejected rows that the round after them saw."""
        return sum(tokens[0].num_carried for tokens in self.rounds)


def message(sentence: str) -> str:
    """What goes on, for everybody: screen readers say it once, when it changes."""
    return f'<p class="message" role="status">{escape(sentence)}</p>'


def error(sentence: str) -> str:
    """What went wrong."""
    return f'<p class="message error" role="alert">{escape(sentence)}</p>'


def stage(plain: Answer, drafted: Answer | None, *, replay: bool = False) -> str:
    """Both panes side by side, and the chart below; with ``replay`` tokens appear at the pace they came at."""
    panes = _pane(plain, "plain") + (_pane(drafted, "drafted") if drafted else "")
    chart = _chart(drafted) if drafted else ""
    return f'<div class="stage{" replay" if replay else ""}"><div class="panes">{panes}</div>{chart}</div>'


def verdict(plain: Answer, drafted: Answer | None, *, greedy: bool) -> str:
    """What the two runs say, in two sentences."""
    if drafted is None:
        return f"Plain decoding: {plain.rate:.1f} tokens/s. There is no drafter here to compare it with."
    speed = f"{drafted.title} ran at {drafted.rate / plain.rate:.2f} times plain's speed on this machine."
    if not greedy:
        return f"{speed} Both texts are samples of the target's own distribution."
    ids, other = ([token.id for token in answer.tokens] for answer in (plain, drafted))
    shared = min(len(ids), len(other))
    if ids[:shared] != other[:shared]:
        first = next(place for place in range(shared) if ids[place] != other[place])
        return f"{speed} The texts part at token {first + 1}; in bf16 that happens where two tokens nearly tie."
    whole = "The same text, token for token." if len(ids) == len(other) else "The same text, cut at another place."
    return f"{speed} {whole}"


def as_plain_text(plain: Answer, drafted: Answer | None) -> str:
    """Answers, numbers and rounds without any colour."""
    parts = [f"{answer.title} ({_facts(answer)}):\n{answer.text}" for answer in (plain, drafted) if answer]
    if drafted:
        parts.append(
            "\n".join(["Round by round:", *map(_round_in_words, range(1, 1 + len(drafted.rounds)), drafted.rounds)])
        )
    return "\n\n".join(parts)


def _facts(answer: Answer) -> str:
    facts = f"{len(answer.tokens)} tokens in {answer.seconds:.1f} s, {answer.rate:.1f} tokens/s"
    if not answer.num_drafts:
        return facts
    return (
        f"{facts}, accepted length {answer.accepted_length:.2f} over {len(answer.rounds)} rounds, "
        f"{answer.carried_rows} carried rows"
    )


def _round_in_words(number: int, tokens: list[StreamedToken]) -> str:
    last = tokens[-1]
    words = [f"saw {last.num_carried} carried rows"] if last.num_carried else []
    words += [f"accepted {''.join(token.text for token in tokens if token.is_draft)!r}"] if tokens[0].is_draft else []
    words += [f"rejected {''.join(last.rejected)!r}"] if last.rejected else []
    words += [] if last.is_draft else [f"the target's own {last.text!r}"]
    return f"{number}. {', '.join(words)}."


def _pane(answer: Answer, kind: str) -> str:
    numbers = {"tokens/s": f"{answer.rate:.1f}", "tokens": len(answer.tokens), "seconds": f"{answer.seconds:.1f}"}
    if answer.num_drafts:
        numbers |= {"accepted length": f"{answer.accepted_length:.2f}", "carried rows": answer.carried_rows}
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in numbers.items())
    rounds = answer.rounds
    carried_on = [tokens[0].num_carried > 0 for tokens in rounds[1:]] + [False]
    text = "".join(_token(token) for token in answer.tokens if token.round == 0)
    text += "".join(map(_round, range(1, 1 + len(rounds)), rounds, carried_on))
    return (
        f'<section class="pane {kind}"><h3>{escape(answer.title)}</h3><dl>{cells}</dl>'
        f'<div class="pace"><i style="--took:{answer.seconds:.2f}s"></i></div>'
        f'<p class="text" aria-hidden="true">{text}</p></section>'
    )


def _round(number: int, tokens: list[StreamedToken], is_carried_on: bool) -> str:
    """A round's tokens, after the number of carried rows it saw; its rejected drafts may be carried on to the next."""
    carried, at = tokens[0].num_carried, tokens[0].seconds
    mark = f'<sup class="carry" style="--at:{at:.2f}s">\u21b7{carried}</sup>' if carried else ""
    title = f"Round {number}: {sum(token.is_draft for token in tokens)} drafts accepted, {carried} carried rows seen"
    body = "".join(_token(token, "kept" if is_carried_on else "lost") for token in tokens)
    return f'<span class="round" title="{title}">{mark}{body}</span>'


def _token(token: StreamedToken, fate: str = "lost") -> str:
    shown = [text.replace("\n", NEW_LINE) or SPECIAL for text in token.rejected]
    lost = "".join(_mark("del", fate, text, token.seconds) for text in shown)
    return lost + _mark("span", "draft" if token.is_draft else "own", token.text, token.seconds)


def _mark(tag: str, kind: str, text: str, seconds: float) -> str:
    """A token in its colours, which leave the space before a word out."""
    word = text.lstrip(" ")
    space = text[: len(text) - len(word)]
    return f'{space}<{tag} class="{kind}" style="--at:{seconds:.2f}s">{escape(word)}</{tag}>'


def _chart(answer: Answer) -> str:
    """Accepted drafts of each round as bars; a dot below marks a round that saw carried rows."""
    accepted, most = answer.accepted, max(answer.num_drafts, 1)
    bars = "".join(
        f'<i class="{"carries" if tokens[0].num_carried else ""}" style="--part:{count / most:.3f}" '
        f'title="Round {number}: {count} of {most}"></i>'
        for number, (count, tokens) in enumerate(zip(accepted, answer.rounds, strict=True), 1)
    )
    words = f"Accepted drafts in each of {len(accepted)} rounds, of {most} at most: {', '.join(map(str, accepted))}"
    return (
        f'<figure class="chart" role="img" aria-label="{words}"><figcaption>Accepted drafts per round'
        f'{f", of {most}" if accepted else ""}</figcaption><div class="bars">{bars}</div></figure>'
    )
