"""Who wrote each token, and what fell on the way? An answer token by token, as it comes, with its origin."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from queue import Queue
from threading import Event, Thread
from time import perf_counter
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_carryover.modeling_carryover import CarryoverDrafterModel

# Tokens before a rejected one that it is decoded with: more than a character can span.
CONTEXT = 16


@dataclass(frozen=True)
class StreamedToken:
    """One token of an answer.

    Attributes:
        id: The token.
        text: What it adds to the text; empty until a character of several tokens is whole.
        is_draft: Whether it is an accepted draft; else the target's own.
        round: Number of its round; 0 is the prompt's pass, and all of plain decoding.
        seconds: When it came, since ``generate`` began.
        rejected: Texts of the drafts that fell where this token of the target's own stands.
        num_carried: Rejected rows of the round before that this round's drafter saw.
    """

    id: int
    text: str
    is_draft: bool
    round: int
    seconds: float
    rejected: tuple[str, ...] = ()
    num_carried: int = 0


class TokenStreamer(BaseStreamer):
    """A streamer for ``generate`` that hands every token on with its origin, to ``on_token``."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        drafter: CarryoverDrafterModel | None,
        on_token: Callable[[StreamedToken], None],
    ) -> None:
        self.tokenizer, self.drafter, self.on_token = tokenizer, drafter, on_token
        self.ids: list[int] | None = None
        self.text, self.num_rounds, self.place = "", 0, 0

    def put(self, value: Tensor) -> None:
        """The prompt first, which is not handed on, then one token at a time."""
        if self.ids is None:
            self.ids, self.started = [], perf_counter()
            return
        seconds = perf_counter() - self.started
        for token in value.flatten().tolist():
            is_draft, before = self._is_draft(), self.ids[-CONTEXT:]
            self.ids.append(token)
            rounds = self._rounds()
            lost = rounds[-1].drafted_ids[rounds[-1].num_accepted :] if rounds and not is_draft else []
            carried = rounds[-1].num_carried if rounds else 0
            rejected = self._texts(before, lost)
            self.on_token(StreamedToken(token, self._new(), is_draft, len(rounds), seconds, rejected, carried))

    def end(self) -> None:
        """Nothing waits but what `rest` gives."""

    def rest(self) -> str:
        """The end of the text that still waits for the rest of its character."""
        return self._decode(self.ids or [])[len(self.text) :]

    def _new(self) -> str:
        """What the newest token adds: nothing while a character, which may span several tokens, is not whole."""
        new = self.rest()
        if new.endswith("\ufffd"):
            return ""
        self.text += new
        return new

    def _is_draft(self) -> bool:
        """Whether the newest token was drafted: of a round's tokens, the accepted drafts come first."""
        rounds = self._rounds()
        if len(rounds) != self.num_rounds:
            self.num_rounds, self.place = len(rounds), 0
        self.place += 1
        return bool(rounds) and self.place <= rounds[-1].num_accepted

    def _rounds(self) -> list[Any]:
        return self.drafter.last_stats.rounds if self.drafter is not None else []

    def _texts(self, before: list[int], ids: list[int]) -> tuple[str, ...]:
        """What each of these tokens would add after those before."""
        texts = [self._decode(before + ids[:count]) for count in range(len(ids) + 1)] if ids else []
        return tuple(longer[len(shorter) :] for shorter, longer in pairwise(texts))

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


class _ReaderLeftError(Exception):
    """The reader has left: ends a ``generate`` call from within."""


def stream_tokens(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Mapping[str, Tensor],
    *,
    drafter: CarryoverDrafterModel | None = None,
    **options: Any,
) -> Iterator[StreamedToken]:
    """Iterate over an answer while a thread generates it; leaving early stops the thread, and waits for it.

    Args:
        target: The model that answers.
        tokenizer: Its tokenizer.
        inputs: What the tokenizer returned for the prompt, on the target's device.
        drafter: None: plain decoding.
        options: Those of ``generate``.

    Raises:
        Exception: Whatever ``generate`` raised.
    """
    arrived: Queue[StreamedToken | BaseException | None] = Queue()
    has_left = Event()

    def hand_over(token: StreamedToken) -> None:
        if has_left.is_set():
            raise _ReaderLeftError
        arrived.put(token)

    def work() -> None:
        streamer = TokenStreamer(tokenizer, drafter, hand_over)
        try:
            target.generate(**inputs, assistant_model=drafter, streamer=streamer, **options)
            arrived.put(None)
        except BaseException as error:  # handed to the reader, whose thread it concerns
            arrived.put(error)

    worker = Thread(target=work, daemon=True)
    worker.start()
    try:
        while (item := arrived.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        has_left.set()
        worker.join()
