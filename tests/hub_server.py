"""A small Hub on loopback: what the real `huggingface_hub` client needs to download, upload and search models."""

import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Repository:
    """Commits, newest last, and names for them."""

    commits: list = field(default_factory=list)  # (sha, {path: bytes})
    names: dict = field(default_factory=dict)  # branch or tag -> sha
    private: bool = False
    downloads: int = 0

    def commit(self, files, branch="main"):
        before = self.files(branch) or {}
        content = {**before, **files}
        sha = hashlib.sha1(repr(sorted(content.items())).encode() + bytes([len(self.commits)])).hexdigest()
        self.commits.append((sha, content))
        self.names[branch] = sha
        return sha

    def find(self, revision):
        sha = self.names.get(revision, revision)
        return next(((name, files) for name, files in self.commits if name == sha), None)

    def files(self, revision):
        found = self.find(revision)
        return found and found[1]

    def tags(self):
        """As the Hub does: the card's tags, and one for each base model."""
        card = (self.files("main") or {}).get("README.md", b"").decode()
        header = card.split("---")[1] if card.startswith("---") else ""
        lists = {key: re.findall(r"^- (.+)$", body, re.M) for key, body in re.findall(r"(\w+):\n((?:- .+\n)+)", header)}
        return [*lists.get("tags", []), *(f"base_model:{name}" for name in lists.get("base_model", []))]


class LoopbackHub:
    """Repositories behind HTTP. Faults are switched on by name.

    Attributes:
        repositories: by id.
        token: writes and private repositories need it.
        cut_after: hang up after this many bytes of a weights file.
        requests: `(method, path)` of everything asked.
    """

    def __init__(self):
        self.repositories, self.token, self.cut_after, self.requests = {}, "secret", None, []
        self.connections = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, repo_id, folder=None, **settings):
        repository = self.repositories.setdefault(repo_id, Repository(**settings))
        if folder is not None:
            repository.commit({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})
        return repository

    @contextlib.contextmanager
    def running(self):
        thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            self.server.server_close()
            for connection in self.connections:  # clients keep them open, and a thread waits for each
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            thread.join()


def _handler(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self):
            super().setup()
            hub.connections.append(self.connection)

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.answer_get(body=False)

        def do_GET(self):
            self.answer_get(body=True)

        def do_POST(self):
            url = urlsplit(self.path)
            hub.requests.append(("POST", url.path))
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if not self.allowed():
                return self.refuse(401, "", "Invalid credentials in Authorization header")
            if url.path == "/api/repos/create":
                wanted = json.loads(content)
                repo_id = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
                if repo_id in hub.repositories:
                    return self.refuse(409, "", "You already created this model repo")
                hub.add(repo_id, private=bool(wanted.get("private")))
                return self.send_json({"url": f"{hub.url}/{repo_id}", "name": repo_id, "id": repo_id})
            if url.path == "/api/validate-yaml":
                return self.send_json({"warnings": [], "errors": []})
            match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/(.+)", url.path)
            if not match or match[1] not in hub.repositories:
                return self.refuse(404, "RepoNotFound", "no such repository")
            if match[2] == "preupload":
                paths = [entry["path"] for entry in json.loads(content)["files"]]
                modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
                return self.send_json({"files": modes})
            entries = [json.loads(line) for line in content.splitlines()]
            files = {e["value"]["path"]: base64.b64decode(e["value"]["content"]) for e in entries if e["key"] == "file"}
            sha = hub.repositories[match[1]].commit(files, unquote(match[3]))
            address = f"{hub.url}/{match[1]}/commit/{sha}"
            return self.send_json({"commitUrl": address, "commitOid": sha, "success": True})

        def answer_get(self, body):
            url = urlsplit(self.path)
            hub.requests.append((self.command, url.path))
            if url.path == "/api/models":
                return self.send_json(self.listing(parse_qs(url.query)))
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", url.path):
                return self.describe(match[1], unquote(match[2] or "main"))
            match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path)
            repository = hub.repositories.get(match[1]) if match else None
            if repository is None or (repository.private and not self.allowed()):
                return self.refuse(401 if not self.allowed() else 404, "RepoNotFound", "no such repository")
            found = repository.find(unquote(match[2]))
            if found is None:
                return self.refuse(404, "RevisionNotFound", "no such revision")
            if match[3] not in found[1]:
                return self.refuse(404, "EntryNotFound", "no such file")
            return self.send_file(found[0], match[3], found[1][match[3]], body)

        def send_file(self, sha, path, content, body):
            first = int(re.match(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
            self.send_response(206 if first else 200)
            self.send_header("X-Repo-Commit", sha)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content) - first))
            if first:
                self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if not body:
                return
            if hub.cut_after is not None and path.endswith(".safetensors"):
                self.wfile.write(content[first : first + hub.cut_after])
                self.close_connection = True
                return
            self.wfile.write(content[first:])

        def listing(self, query):
            wanted = query.get("filter", [])
            return [
                {
                    "id": repo_id,
                    "modelId": repo_id,
                    "tags": repository.tags(),
                    "downloads": repository.downloads,
                    "likes": 0,
                    "sha": repository.names.get("main"),
                    "private": repository.private,
                    "siblings": [],
                }
                for repo_id, repository in hub.repositories.items()
                if set(wanted) <= set(repository.tags()) and not repository.private
            ]

        def describe(self, repo_id, revision):
            repository = hub.repositories.get(repo_id)
            if repository is None:
                return self.refuse(404, "RepoNotFound", "no such repository")
            sha = repository.names.get(revision)
            siblings = [{"rfilename": name} for name in repository.files(revision) or {}]
            return self.send_json({"id": repo_id, "sha": sha, "tags": repository.tags(), "siblings": siblings})

        def allowed(self):
            return self.headers.get("Authorization") == f"Bearer {hub.token}"

        def refuse(self, status, code, message):
            self.send_json({"error": message}, status, {"X-Error-Code": code, "X-Error-Message": message})

        def send_json(self, record, status=200, headers=None):
            content = json.dumps(record).encode()
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    return Handler
