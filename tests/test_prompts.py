import json
import sys
from types import SimpleNamespace

import pytest

from hf_carryover.prompts import evenly_spaced, read_prompts


def user(text):
    return [{"role": "user", "content": text}]


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"turns": ["first", "second"]}, id="first-of-two-turns"),
        pytest.param({"prompt": "first"}, id="prompt"),
        pytest.param(
            {"messages": [*user("first"), {"role": "assistant", "content": "no"}, *user("no")]}, id="messages"
        ),
    ],
)
def test_a_row_gives_what_stands_before_the_first_answer(tmp_path, row):
    found = read_prompts(write(tmp_path / "chat.jsonl", row))

    assert found.prompts == [user("first")]


def test_a_system_message_stays_before_the_users(tmp_path):
    messages = [{"role": "system", "content": "be brief"}, *user("first")]

    assert read_prompts(write(tmp_path / "chat.jsonl", {"messages": messages})).prompts == [messages]


def test_a_set_is_named_after_its_file_and_keeps_its_order(tmp_path):
    found = read_prompts(write(tmp_path / "two_lines.txt", " one ", "", "two"))

    assert found.name == "two_lines"
    assert found.prompts == [user("one"), user("two")]


def test_a_line_separator_inside_a_json_text_does_not_end_the_line(tmp_path):
    found = read_prompts(write(tmp_path / "set.jsonl", '{"prompt": "one\u2028two"}'))

    assert found.prompts == [user("one\u2028two")]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        pytest.param(3, [0, 3, 6], id="3-of-10"),
        pytest.param(4, [0, 2, 5, 7], id="4-of-10"),
        pytest.param(1, [0], id="one"),
        pytest.param(99, list(range(10)), id="more-than-there-are"),
    ],
)
def test_fewer_prompts_are_evenly_spaced(count, expected):
    assert evenly_spaced(range(10), count) == expected


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        pytest.param([], "Expected at least one prompt in .*set.jsonl, found none", id="empty"),
        pytest.param(["{", {"prompt": "a"}], "one JSON object in line 1 of .*set.jsonl, found '{'", id="not-json"),
        pytest.param(
            [{"prompt": "a"}, "[1]"], r"one JSON object in line 2 of .*set.jsonl, found '\[1\]'", id="a-list"
        ),
        pytest.param(
            [{"text": "a"}], r"`turns`, `prompt` or `messages` in line 1 .*, found \['text'\]", id="no-column"
        ),
        pytest.param([{"prompt": 3}], "Expected text in `prompt` of line 1 of .*, found '3'", id="a-number"),
        pytest.param([{"prompt": " "}], "Expected text in `prompt` of line 1 of .*, found ' '", id="blank"),
        pytest.param([{"turns": []}], r"Expected text in `turns` of line 1 of .*, found '\[\]'", id="no-turn"),
        pytest.param(
            [{"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}],
            "Expected text in `messages`",
            id="no-role",
        ),
        pytest.param([{"messages": [{"role": "user", "content": "a"}, 3]}], "text in `messages`", id="no-message"),
        pytest.param(
            [{"messages": [{"role": "assistant", "content": "a"}]}], "Expected text in `messages`", id="answer-first"
        ),
    ],
)
def test_a_file_that_holds_no_prompts_is_told_in_a_sentence(tmp_path, rows, sentence):
    path = write(tmp_path / "set.jsonl", *rows)

    with pytest.raises(ValueError, match=sentence):
        read_prompts(path)


def test_text_that_is_not_utf8_is_told_in_a_sentence(tmp_path):
    path = tmp_path / "set.txt"
    path.write_bytes(b"\xff\xfe")

    with pytest.raises(ValueError, match=r"Expected UTF-8 text in .*set.txt"):
        read_prompts(path)


@pytest.mark.parametrize("source", ["/no/such/file.jsonl", "no/file.txt", "no_file"])
def test_a_missing_file_is_told_in_a_sentence(source):
    with pytest.raises(
        ValueError, match=f"Expected a prompt file or a Hub data set .*found no {source}; check the path"
    ):
        read_prompts(source)


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package `datasets`, with one data set; returns the list of what was asked for."""
    asked = []

    def load_dataset(name, config):
        asked.append((name, config))
        if name != "owner/chats":
            raise FileNotFoundError(f"{name} is not on the Hub")
        return {"train": [{"prompt": "a"}], "test": [{"prompt": "b"}], "odd": [{"text": "c"}]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


@pytest.mark.parametrize(
    ("source", "config", "text"),
    [
        pytest.param("owner/chats", None, "b", id="test-split-by-default"),
        pytest.param("owner/chats:main", "main", "b", id="named-config"),
        pytest.param("owner/chats:main:train", "main", "a", id="named-split"),
        pytest.param("owner/chats::train", None, "a", id="named-split-only"),
    ],
)
def test_a_data_set_is_read_from_the_split_that_was_asked_for(hub, source, config, text):
    found = read_prompts(source)

    assert (found.name, found.prompts) == ("chats", [user(text)])
    assert hub == [("owner/chats", config)]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        pytest.param("owner/none", "Hub data set owner/none that can be loaded, got: owner/none is not", id="unknown"),
        pytest.param("owner/chats::dev", r"a split `dev` in owner/chats, found \['odd', 'test'", id="no-such-split"),
        pytest.param("owner/chats::odd", r"in owner/chats, found \['text'\]", id="no-known-column"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_told_in_a_sentence(hub, source, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_prompts(source)


def test_missing_datasets_package_names_its_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(ImportError, match="pip install datasets"):
        read_prompts("owner/chats")
