"""How does a server that runs the target answer in its stead? Texts of messages, many requests at a time."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from huggingface_hub import InferenceClient
from huggingface_hub.errors import BadRequestError, HTTPError  # type: ignore[attr-defined]
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from hf_carryover.chat import Conversation
from hf_carryover.targets import target_source
from hf_carryover.training.data import answers_of
from hf_carryover.training.datalog import DataArguments
from hf_carryover.training.selfchat import Answer

REFUSED = "prompt that the server refused"


@dataclass
class ServerWriter:
    """Writes through an OpenAI-compatible server that runs the target, many requests at a time."""

    endpoint: str
    model: str
    tokenizer: PreTrainedTokenizerBase
    arguments: DataArguments
    ends: Sequence[int] = ()
    has_answered: bool = False
    refusal: str = ""

    @classmethod
    def of(cls, target: str, endpoint: str, model: str, arguments: DataArguments) -> "ServerWriter":
        """For a target by its name, of which the tokenizer and what ends its turns are read, not the weights."""
        source = target_source(target)
        try:
            ends = GenerationConfig.from_pretrained(source).eos_token_id
        except OSError:  # it has no such file: the tokenizer's own end
            ends = None
        found = ends if isinstance(ends, list) else [] if ends is None else [ends]
        return cls(endpoint, model, AutoTokenizer.from_pretrained(source), arguments, found)

    def answer(self, _: Sequence[list[int]], prompts: Sequence[Conversation], batch: int) -> list[Answer]:
        """Answers to prompts, given as messages; their ids come from rendering the whole conversation."""
        with ThreadPoolExecutor(self.arguments.batch_size) as pool:
            answers = list(pool.map(self._ask, prompts, self._seeds(batch)))
        if answers and not self.has_answered and all(answer.problem == REFUSED for answer in answers):
            raise OSError(f"Expected answers of {self.endpoint}, but it refused all {len(answers)} prompts: "
                          f"{self.refusal}; mend its settings, or the prompts.")  # fmt: skip
        self.has_answered |= bool(answers)
        return answers

    def _seeds(self, batch: int) -> Iterator[int]:
        first = self.arguments.seed * 1_000_003 + batch * self.arguments.batch_size
        return iter(range(first, first + self.arguments.batch_size))

    def _ask(self, prompt: Conversation, seed: int) -> Answer:
        client = InferenceClient(base_url=self.endpoint, timeout=600)
        try:
            given = client.chat_completion(
                prompt, model=self.model, max_tokens=self.arguments.max_new_tokens,
                temperature=self.arguments.temperature, seed=seed,
            ).choices[0]  # fmt: skip
        except BadRequestError as error:  # longer than its context, for one
            self.refusal = f"{error} {error.response.text[:500]}"
            return Answer([], False, REFUSED)
        except HTTPError as error:
            raise OSError(f"Expected an answer of {self.endpoint}, got: {error}. What was made is kept; start the "
                          "server, and the same command goes on.") from error  # fmt: skip
        message: Any = given.message
        if message.get("reasoning") or message.get("reasoning_content"):
            raise ValueError(f"Expected answers of {self.endpoint} as the target writes them, found their reasoning "
                             "taken out; start the server without a reasoning parser.")  # fmt: skip
        turns = [*prompt, {"role": "assistant", "content": message.content or ""}]
        try:
            (example,) = answers_of(turns, self.tokenizer, "the server's answer", ends=self.ends)[-1:]
        except ValueError:  # a line break at its start can melt into the prompt's last token
            return Answer([], False, "answer that the chat template does not render after its prompt")
        finished = given.finish_reason != "length"
        ids = example.answer_ids if finished else example.answer_ids[:-1]
        return Answer(ids, finished)
