import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_carryover import cli
from hf_carryover.chat import render
from hf_carryover.targets import load_target
from hf_carryover.training.data import read_examples
from hf_carryover.training.datalog import DataArguments
from hf_carryover.training.selfchat import (
    Answer,
    TargetWriter,
    loops,
    make_data,
    user_prefix,
    why_bad,
)
from hf_carryover.training.server import ServerWriter
from tests.evaluation_fakes import make_tokenizer, write_prompts, write_target
from tests.fakes import make_target


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([1, 2], "answer too short"),
        ([1, 2, 3, 4], None),
        ([1] * 40, "answer loops"),
        ([9, 8, *[1, 2, 3] * 11, 0], "answer loops"),
        ([*range(9), *[*range(20, 40)] * 3, 0], None),
        ([*[5] * 20, 0], None),
        ([*[1, 2, 3] * 15, 4, 5, 0], None),
    ],
    ids=["short", "good", "one-token", "at-the-end", "three-times", "a-row-of-dashes", "left-again"],
)
def test_degenerate_answers_are_told_by_name(ids, reason):
    assert why_bad(Answer(ids, finished=True), keep_cut=False) == reason


def test_a_cut_answer_is_kept_only_if_asked():
    answer = Answer([1, 2, 3, 4], finished=False)

    assert why_bad(answer, keep_cut=False) == "answer cut by the length limit"
    assert why_bad(answer, keep_cut=True) is None
    assert not loops([1, 2, 3])


class Scripted:
    """Answers with a row of the prompt's last token; counts what it was asked, and stops at a batch."""

    def __init__(self, stop=None):
        self.asked, self.stop = [], stop

    def answer(self, ids, prompts, batch):
        if batch == self.stop:
            raise KeyboardInterrupt
        self.asked += [prompt[-1]["content"] for prompt in prompts]
        return [Answer([11, 12, 13, row[-1]], finished=True) for row in ids]


def test_an_interrupted_run_gives_the_same_file(tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", [f"{i} {i + 1}" for i in range(10)])
    straight, cut, again = Scripted(), Scripted(stop=2), Scripted()
    settings = {"prompts": prompts, "arguments": DataArguments(batch_size=3)}

    counts = make_data(make_tokenizer(), tmp_path / "a.jsonl", answer=straight.answer, **settings)
    with pytest.raises(KeyboardInterrupt):
        make_data(make_tokenizer(), tmp_path / "b.jsonl", answer=cut.answer, **settings)
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write('{"prompt": "torn')
    make_data(make_tokenizer(), tmp_path / "b.jsonl", answer=again.answer, **settings)

    assert counts == {"kept": 10}
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert cut.asked + again.asked == straight.asked
    assert len(read_examples(tmp_path / "b.jsonl", make_tokenizer(), max_length=99).examples) == 10


def test_an_interrupted_run_goes_on_behind_a_text_with_other_line_breaks(tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", ["1\u20282", "3\x854", "5 6", "7 8"])
    settings = {"prompts": prompts, "arguments": DataArguments(batch_size=2)}
    with pytest.raises(KeyboardInterrupt):
        make_data(make_tokenizer(), tmp_path / "a.jsonl", answer=Scripted(stop=1).answer, **settings)

    counts = make_data(make_tokenizer(), tmp_path / "a.jsonl", answer=Scripted().answer, **settings)

    assert counts == {"kept": 4}
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().strip("\n").split("\n")]
    assert [row["prompt"] for row in rows] == ["1\u20282", "3\x854", "5 6", "7 8"]


def test_a_prompt_seen_before_is_dropped_and_counted(tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", ["1 2", "1  2", "3 4", "1 2"])

    counts = make_data(
        make_tokenizer(), tmp_path / "a.jsonl", answer=Scripted().answer, prompts=prompts,
        arguments=DataArguments(batch_size=2),
    )  # fmt: skip

    assert counts == {"kept": 2, "prompt seen before or empty": 2}


def test_prompts_that_differ_before_the_last_turn_are_not_the_same(tmp_path):
    rows = [[{"role": "system", "content": kind}, {"role": "user", "content": "1 2"}] for kind in ("3", "4", "3")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))

    counts = make_data(make_tokenizer(), tmp_path / "a.jsonl", answer=Scripted().answer, prompts=tmp_path / "p.jsonl")

    assert counts == {"kept": 2, "prompt seen before or empty": 1}


@pytest.mark.parametrize("counts", [[4, 10], [1, 2, 7, 10], [10, 10]])
def test_a_run_that_is_given_more_to_do_asks_every_prompt_once(tmp_path, counts):
    prompts, writer = write_prompts(tmp_path / "p.jsonl", [f"{i} {i + 1}" for i in range(10)]), Scripted()
    for count in counts:
        kept = make_data(
            make_tokenizer(), tmp_path / "a.jsonl", answer=writer.answer, prompts=prompts,
            arguments=DataArguments(count=count, batch_size=3),
        )  # fmt: skip
        assert kept == {"kept": count}

    assert writer.asked == [f"{i} {i + 1}" for i in range(10)]


def test_a_prompt_whose_answer_was_dropped_is_not_asked_again_after_an_interruption(tmp_path):
    class Short(Scripted):
        def answer(self, ids, prompts, batch):
            return [Answer([], finished=True) for _ in super().answer(ids, prompts, batch)]

    prompts = write_prompts(tmp_path / "p.jsonl", ["1 2", "3 4", "1 2", "5 6"])
    settings = {"prompts": prompts, "arguments": DataArguments(batch_size=2)}
    with pytest.raises(KeyboardInterrupt):
        make_data(make_tokenizer(), tmp_path / "a.jsonl", answer=Short(stop=1).answer, **settings)
    again = Short()

    counts = make_data(make_tokenizer(), tmp_path / "a.jsonl", answer=again.answer, **settings)

    assert again.asked == ["5 6"]
    assert counts == {"answer too short": 3, "prompt seen before or empty": 1}


def test_a_file_that_was_deleted_is_made_anew_and_one_that_lost_texts_is_told(tmp_path):
    prompts, out = write_prompts(tmp_path / "p.jsonl", ["1 2", "3 4"]), tmp_path / "a.jsonl"
    run = {"answer": Scripted().answer, "prompts": prompts}
    make_data(make_tokenizer(), out, **run)
    whole = out.read_text()

    out.write_text(whole.split("\n")[0] + "\n")
    with pytest.raises(ValueError, match=r"Expected the 2 texts written to .*a.jsonl, found 1; bring them back"):
        make_data(make_tokenizer(), out, **run)
    out.unlink()

    assert make_data(make_tokenizer(), out, **run) == {"kept": 2}
    assert out.read_text() == whole
    with pytest.raises(ValueError, match=r"got .*a.jsonl.gz; leave .gz out"):
        make_data(make_tokenizer(), tmp_path / "a.jsonl.gz", **run)


def test_a_file_that_an_older_version_began_or_an_editor_saved_goes_on(tmp_path):
    prompts, out = write_prompts(tmp_path / "p.jsonl", [f"{i} {i + 1}" for i in range(6)]), tmp_path / "a.jsonl"
    first, second = Scripted(), Scripted()
    settings = {"prompts": prompts, "tokenizer": make_tokenizer(), "out": out}
    make_data(answer=first.answer, arguments=DataArguments(count=4, batch_size=3), **settings)
    progress = json.loads((tmp_path / "a.jsonl.progress.json").read_text())
    assert progress["batches"] == 2  # of three and of one
    out.write_text(out.read_text().rstrip("\n"))

    counts = make_data(answer=second.answer, arguments=DataArguments(count=6, batch_size=3), **settings)

    assert counts == {"kept": 6}
    assert second.asked == ["4 5", "5 6"]
    assert len(read_examples(out, make_tokenizer(), max_length=99).examples) == 6


def test_texts_survive_a_stop_while_their_file_is_made_whole(tmp_path, monkeypatch):
    prompts, out = write_prompts(tmp_path / "p.jsonl", ["1 2", "3 4"]), tmp_path / "a.jsonl"
    run = {"answer": Scripted().answer, "prompts": prompts}
    make_data(make_tokenizer(), out, **run)
    with out.open("a") as file:
        file.write('{"torn')
    before, write_text = out.read_text(), Path.write_text

    def stop(path, text, **options):
        write_text(path, text[: len(text) // 2], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stop)
    with pytest.raises(KeyboardInterrupt):
        make_data(make_tokenizer(), out, **run)

    assert out.read_text() == before


def test_a_file_of_other_settings_is_not_continued(tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", ["1 2"])
    run = {"answer": Scripted().answer, "prompts": prompts}
    make_data(make_tokenizer(), tmp_path / "a.jsonl", **run)
    (tmp_path / "b.jsonl").write_text("{}\n")

    with pytest.raises(ValueError, match=r"Expected .*a.jsonl to be made with the same settings"):
        make_data(make_tokenizer(), tmp_path / "a.jsonl", arguments=DataArguments(temperature=0.5), **run)
    with pytest.raises(ValueError, match=r"Expected .*a.jsonl to be made with the same settings"):
        make_data(make_tokenizer(), tmp_path / "a.jsonl", writer="another model", **run)
    (tmp_path / "a.jsonl").unlink()  # as the message says
    assert make_data(make_tokenizer(), tmp_path / "a.jsonl", writer="another model", **run) == {"kept": 1}
    with pytest.raises(ValueError, match="Expected a new file or one that this command began"):
        make_data(make_tokenizer(), tmp_path / "b.jsonl", **run)
    with pytest.raises(ValueError, match="Expected prompts, or a target that invents them"):
        make_data(make_tokenizer(), tmp_path / "c.jsonl", answer=Scripted().answer)


def test_a_batch_answers_as_each_prompt_alone():
    target = make_target()
    target.generation_config.eos_token_id = target.generation_config.pad_token_id = 5
    writer = TargetWriter(target, make_tokenizer(), DataArguments(max_new_tokens=12))
    prompts = [[1, 2, 3], [4, 6, 7, 8, 9], [10, 11]]

    together = writer.answer(prompts, [], 0)

    assert together == [writer.answer([prompt], [], 0)[0] for prompt in prompts]
    for prompt, found in zip(prompts, together, strict=True):
        plain = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, len(prompt) :].tolist()
        assert found.ids == plain
        assert found.finished == (plain[-1] == 5)


def test_a_target_that_invents_nothing_is_told(tmp_path):
    writer = Scripted()

    with pytest.raises(ValueError, match=r"kept nothing of 8 batches in a row: .*'prompt seen before or empty': 24"):
        make_data(make_tokenizer(), tmp_path / "a.jsonl", answer=writer.answer, invent=lambda batch: ["", " ", ""])


@pytest.mark.slow
def test_smollm2_invents_prompts_and_answers_them(tmp_path):
    target, tokenizer = load_target("smollm2")
    arguments = DataArguments(count=3, batch_size=4, max_new_tokens=24, max_prompt_tokens=48, keep_cut=True)
    writer = TargetWriter(target, tokenizer, arguments)

    counts = make_data(
        tokenizer, tmp_path / "a.jsonl", answer=writer.answer, invent=writer.invent, arguments=arguments
    )

    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert counts["kept"] == len(rows) >= 3
    assert tokenizer.decode(user_prefix(tokenizer, "Be brief.")).endswith("Be brief.<|im_end|>\n<|im_start|>user\n")
    for row in rows:
        messages = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert row["prompt_ids"] == ids


class Server(BaseHTTPRequestHandler):
    """An OpenAI-compatible chat completion that says what it was asked."""

    asked: list[dict] = []  # noqa: RUF012

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body | {"path": self.path})
        if body["messages"][-1]["content"] == "40":
            self.send_error(400, "longer than the context")
            return
        message = {"role": "assistant", "content": "7 8 9 " + body["messages"][-1]["content"]}
        if body["messages"][-1]["content"] == "41":
            message["reasoning"] = "6 6 6"
        cut = body["messages"][-1]["content"] == "3 4"
        choice = {"index": 0, "message": message, "finish_reason": "length" if cut else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        given = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice],
                 "usage": usage, "system_fingerprint": ""}  # fmt: skip
        data = json.dumps(given).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Server.asked.clear()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_server_answers_and_the_target_is_not_loaded(endpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "load_model", lambda *given: pytest.fail("the weights are the server's"))
    target = write_target(tmp_path / "target")
    words = ["--target", target, "--out", tmp_path / "a.jsonl", "--endpoint", endpoint, "--endpoint-model", "m"]
    words += ["--prompts", write_prompts(tmp_path / "p.jsonl", ["1 2", "3 4"])]

    result = CliRunner().invoke(cli.app, ["data", *map(str, words)], catch_exceptions=False)

    assert "1 texts in" in result.output
    assert len(Server.asked) == 2


def test_a_server_answers_in_the_targets_stead(endpoint, tmp_path):
    tokenizer, arguments = make_tokenizer(), DataArguments(batch_size=2, max_new_tokens=9)
    writer = ServerWriter(endpoint, "m", tokenizer, arguments)
    prompts = write_prompts(tmp_path / "p.jsonl", ["1 2", "3 4", "5 6"])

    counts = make_data(tokenizer, tmp_path / "a.jsonl", answer=writer.answer, prompts=prompts, arguments=arguments)

    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert counts == {"kept": 2, "answer cut by the length limit": 1}
    assert [row["prompt"] for row in rows] == ["1 2", "5 6"]
    assert "7 8 9 1 2" in tokenizer.decode(rows[0]["answer_ids"])
    assert {(body["path"], body["model"], body["max_tokens"]) for body in Server.asked} == {
        ("/v1/chat/completions", "m", 9)
    }
    assert len({body["seed"] for body in Server.asked}) == 3


def ask(endpoint, tmp_path, *prompts, tokenizer=None):
    tokenizer, arguments = tokenizer or make_tokenizer(), DataArguments(batch_size=2, max_new_tokens=9)
    writer = ServerWriter(endpoint, "m", tokenizer, arguments)
    file = write_prompts(tmp_path / "p.jsonl", [*prompts])
    return make_data(tokenizer, tmp_path / "a.jsonl", answer=writer.answer, prompts=file, arguments=arguments)


def test_a_prompt_that_the_server_refuses_stops_no_other(endpoint, tmp_path):
    assert ask(endpoint, tmp_path, "1 2", "40", "5 6") == {"kept": 2, "prompt that the server refused": 1}


def test_a_server_that_refuses_everything_is_told_before_prompts_are_used_up(endpoint, tmp_path):
    with pytest.raises(OSError, match=r"(?s)but it refused all 1 prompts: .*longer than the context.*; mend"):
        ask(endpoint, tmp_path, "40")

    assert ask(endpoint, tmp_path, "1 2") == {"kept": 1}


def test_an_answer_that_does_not_come_after_its_prompt_stops_no_other(endpoint, tmp_path):
    tokenizer = make_tokenizer()
    # Without an answer the prompt is rendered otherwise, as where a line break melts into the one before it.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '58 ' if messages|length > 1 and '9 1' in messages[1].content else '59 ' }}"
        "{{ m.content }} {% endfor %}"
    )

    counts = ask(endpoint, tmp_path, "1 2", "5 6", tokenizer=tokenizer)

    assert counts == {"kept": 1, "answer that the chat template does not render after its prompt": 1}


def test_a_server_that_takes_the_reasoning_out_is_refused(endpoint, tmp_path):
    with pytest.raises(ValueError, match=re.escape("found their reasoning taken out; start the server without")):
        ask(endpoint, tmp_path, "41")


def test_a_server_that_is_not_there_is_told_in_a_sentence_and_the_texts_stay(endpoint, tmp_path):
    assert ask(endpoint, tmp_path, "1 2") == {"kept": 1}
    before = (tmp_path / "a.jsonl").read_bytes()

    with pytest.raises(OSError, match=r"Expected an answer of http://127.0.0.1:9/v1, got: .*What was made is kept"):
        ask("http://127.0.0.1:9/v1", tmp_path, "1 2", "3 4")

    assert (tmp_path / "a.jsonl").read_bytes() == before


def test_a_template_without_a_system_turn_gets_a_bare_user_turn():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        + tokenizer.chat_template
    )

    assert tokenizer.decode(user_prefix(tokenizer, "1 2")) == "59"
    with pytest.raises(ValueError, match=r"chat template takes, found \['system', 'user'\]: no system turn"):
        render([{"role": "system", "content": "1"}, {"role": "user", "content": "2"}], tokenizer)
