"""A Hub on loopback: the parts of its protocol that `huggingface_hub` uses to create, upload, list and download.

Repositories live in memory. `fail_next` makes the next request whose path contains a word fail once, as a lost
connection does; what was committed before stays.
"""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

TOKEN = "hf_owner"
# What is answered always alike.
FIXED: dict[str, Any] = {
    "/api/whoami-v2": {"name": "owner", "type": "user", "orgs": []},
    "/api/validate-yaml": {"errors": [], "warnings": []},
}


@dataclass
class Repository:
    """Commits, oldest first: a hash and all files of each."""

    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    def files(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit of a branch name or hash."""
        if revision == "main" and self.commits:
            return self.commits[-1]
        return next((commit for commit in self.commits if commit[0] == revision), None)


class Hub:
    """Use as a context manager; `url` is what goes into HF_ENDPOINT."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.uploads: dict[str, bytes] = {}
        self.fail_next: str | None = None
        handler = type("Bound", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def commit(self, name: str, changes: dict[str, Any]) -> str:
        repository = self.repositories[name]
        files = (repository.commits[-1][1] if repository.commits else {}) | changes
        sha = hashlib.sha1(f"{name}{len(repository.commits)}".encode()).hexdigest()
        repository.commits.append((sha, {path: data for path, data in files.items() if data is not None}))
        return sha


class Handler(BaseHTTPRequestHandler):
    """One request."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.hub.fail_next is not None and self.hub.fail_next in path:
            self.hub.fail_next = None
            self.close_connection = True
            return
        parts = path.strip("/").split("/")
        if path in FIXED:
            self.answer(FIXED[path])
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif parts[:2] == ["api", "models"]:
            self.models("/".join(parts[2:4]), parts[4:], body)
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.batch(json.loads(body))
        elif parts[0] == "lfs":
            self.hub.uploads[parts[1]] = body
            self.answer({})
        elif parts[2:3] == ["resolve"]:
            self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.answer({"error": f"no such path {path}"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted.get('organization') or 'owner'}/{wanted['name']}"
        if not self.is_owner():
            self.answer({"error": "Invalid credentials"}, 401)
        elif name in self.hub.repositories:
            self.answer({"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, 409)
        else:
            self.hub.repositories[name] = Repository(private=wanted.get("visibility", "public") == "private")
            self.hub.commit(name, {".gitattributes": b"*.safetensors filter=lfs\n"})
            self.answer({"url": f"{self.hub.url}/{name}", "id": name, "name": name})

    def models(self, name: str, rest: list[str], body: bytes) -> None:
        repository = self.repository(name)
        if repository is None:
            return
        match rest:
            case ["preupload", _]:
                self.answer({"files": [upload_mode(file["path"]) for file in json.loads(body)["files"]]})
            case ["commit", _]:
                sha = self.hub.commit(name, self.changes(body))
                url = f"{self.hub.url}/{name}/commit/{sha}"
                self.answer({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})
            case [] | ["revision", _]:
                self.describe(name, repository, rest[1] if rest else "main")
            case ["tree", revision, *_]:
                _, files = repository.files(revision) or ("", {})
                self.answer([{"type": "file", "path": path, "size": len(data), "oid": digest(data)}
                             for path, data in files.items()])  # fmt: skip
            case _:
                self.answer({"error": "not here"}, 404)

    def changes(self, body: bytes) -> dict[str, bytes | None]:
        """Files of a commit, those uploaded before among them; None: deleted."""
        changed: dict[str, bytes | None] = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                changed[value["path"]] = self.hub.uploads[value["oid"]]
            elif line["key"] == "deletedFile":
                changed[value["path"]] = None
        return changed

    def describe(self, name: str, repository: Repository, revision: str) -> None:
        found = repository.files(revision)
        if found is None:
            self.answer({"error": "Invalid rev id"}, 404, **{"X-Error-Code": "RevisionNotFound"})
            return
        sha, files = found
        self.answer({"id": name, "sha": sha, "private": repository.private, "tags": [], "downloads": 0, "likes": 0,
                     "siblings": [{"rfilename": path} for path in files]})  # fmt: skip

    def batch(self, wanted: dict[str, Any]) -> None:
        objects = [
            {"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{self.hub.url}/lfs/{o['oid']}"}}}
            for o in wanted["objects"]
        ]
        self.answer({"transfer": "basic", "objects": objects})

    def resolve(self, name: str, revision: str, path: str) -> None:
        repository = self.repository(name)
        if repository is None:
            return
        found = repository.files(revision)
        if found is None:
            self.answer({"error": "Invalid rev id"}, 404, **{"X-Error-Code": "RevisionNotFound"})
        elif path not in found[1]:
            self.answer(
                {"error": "Entry not found"}, 404, **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": found[0]}
            )
        else:
            data = found[1][path]
            self.send(data, 200, **{"ETag": f'"{digest(data)}"', "X-Repo-Commit": found[0], "Accept-Ranges": "bytes"})

    def repository(self, name: str) -> Repository | None:
        """The repository if it exists and may be seen; else the answer was given."""
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self.is_owner()):
            self.answer({"error": "Repository not found"}, 401, **{"X-Error-Code": "RepoNotFound"})
            return None
        return found

    def is_owner(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        if status >= 400 and isinstance(content, dict):
            headers["X-Error-Message"] = content["error"]
        self.send(json.dumps(content).encode(), status, **{"Content-Type": "application/json"} | headers)

    def send(self, data: bytes, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


def upload_mode(path: str) -> dict[str, Any]:
    mode = "lfs" if path.endswith(".safetensors") else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
