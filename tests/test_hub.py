import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub_server import TOKEN, Hub

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hub():
    with Hub() as running:
        yield running


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


def user(hub, home, *words, token=TOKEN, **more):
    """Run `tests.hub_user` against the Hub, with a cache of its own."""
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1",
                "HF_HUB_DISABLE_TELEMETRY": "1"}  # fmt: skip
    settings |= {"HF_TOKEN": token} if token else {}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | settings | more
    done = subprocess.run(
        [sys.executable, "-m", "tests.hub_user", *map(str, words)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def pushed(hub, home, tmp_path_factory):
    return user(hub, home, "online", tmp_path_factory.mktemp("drafter"))


def test_a_pushed_drafter_loads_by_its_name(pushed, hub):
    assert pushed["push"][0] == 0, pushed["push"]
    assert f"{hub.url}/owner/tiny" in pushed["push"][1]
    assert pushed["loaded"]
    assert pushed["by_method"]


def test_what_training_and_evaluation_leave_behind_is_not_pushed(pushed, hub):
    assert pushed["push"][0] == 0
    assert not [
        name
        for _, files in hub.repositories["owner/tiny"].commits
        for name in files
        if name.startswith(("visits", "train.log", "checkpoint-"))
    ]


def test_a_sharded_bf16_drafter_travels_whole(pushed, hub):
    files = hub.repositories["owner/tiny"].commits[-1][1]

    assert pushed["sharded"]
    assert pushed["dtype"] == "torch.bfloat16"
    assert "model.safetensors.index.json" in files
    assert "model.safetensors" not in files  # the old weights would win


def test_a_revision_loads_what_stood_there(pushed, hub, home):
    # Of the first push: the last commit before the sharded one.
    first = next(sha for sha, files in hub.repositories["owner/tiny"].commits if "model.safetensors" in files)

    assert user(hub, home, "revision", first)["first"]


def test_a_filled_cache_serves_without_the_hub(pushed, hub, home):
    online = user(hub, home, "load", "owner/tiny")

    offline = user(hub, home, "load", "owner/tiny", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")

    assert offline == online
    assert "sums" in offline


def test_a_private_drafter_without_a_token_is_told(pushed, hub, tmp_path):
    hub.repositories["owner/tiny"].private = True
    try:
        found = user(hub, tmp_path, "load", "owner/tiny", token=None)
    finally:
        hub.repositories["owner/tiny"].private = False

    assert "owner/tiny" in found["error"]
    assert "private" in found["error"]
    assert "token" in found["error"]


def test_an_interrupted_upload_changes_nothing_and_can_be_repeated(hub, home, tmp_path):
    user(hub, home, "push", tmp_path / "a", "owner/cut")
    before = list(hub.repositories["owner/cut"].commits)
    hub.fail_next = "/commit/"

    failed = user(hub, home, "push", tmp_path / "b", "owner/cut")["push"]
    unchanged = hub.repositories["owner/cut"].commits == before
    repeated = user(hub, home, "push", tmp_path / "b", "owner/cut")["push"]

    assert failed[0] == 1
    assert "Expected owner/cut to take the upload, got: " in failed[1]
    assert unchanged
    assert repeated[0] == 0


def test_a_folder_that_is_no_drafter_is_not_pushed(hub, home, tmp_path):
    (tmp_path / "config.json").write_text("{}")

    assert user(hub, home, "push", tmp_path, "owner/none")["push"][0] == 1
    assert "owner/none" not in hub.repositories


def test_a_private_push_does_not_go_to_a_public_repository(hub, home, tmp_path):
    new = user(hub, home, "push", tmp_path / "a", "owner/secret", "--private")["push"]
    user(hub, home, "push", tmp_path / "a", "owner/open")
    before = list(hub.repositories["owner/open"].commits)

    refused = user(hub, home, "push", tmp_path / "b", "owner/open", "--private")["push"]

    assert new[0] == 0
    assert hub.repositories["owner/secret"].private
    assert refused[0] == 1
    assert "Expected owner/open to be private, found it public" in refused[1]
    assert hub.repositories["owner/open"].commits == before
