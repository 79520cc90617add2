"""A stand-in of the Hub on this machine: repositories are made, committed to, listed and read; nothing leaves it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

COMMIT = "c0ffee" * 6 + "abcd"
BIG = 1000
"""Bytes from which a file goes the way of large files."""


class Hub:
    """What the stand-in holds and was asked.

    Attributes:
        files: what was committed, by repository and path.
        large: objects that were put, by their SHA-256.
        created: the repositories made, with what was asked of them.
        authorizations: the header of each request.
        refuse: a status to answer every request with.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        self.created: dict[str, dict[str, Any]] = {}
        self.authorizations: list[str | None] = []
        self.refuse: int | None = None
        self.address = ""


@contextmanager
def hub() -> Iterator[Hub]:
    """A hub that runs in a thread until the block is left."""
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:
                self.close_connection = True

        def _body(self) -> bytes:
            if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _reply(self, content: Any, status: int = 200, **headers: str) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _answer(self) -> None:
            body = self._body()
            state.authorizations.append(self.headers.get("Authorization"))
            path = self.path.split("?")[0]
            if state.refuse is not None:
                return self._reply({"error": "no"}, state.refuse, X_Error_Message="no")
            if path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
                state.created[name] = asked
                state.files.setdefault(name, {})
                return self._reply({"url": f"{state.address}/{name}", "name": name})
            if path == "/api/whoami-v2":
                return self._reply({"name": "someone", "type": "user", "orgs": [], "auth": {}})
            if path == "/api/validate-yaml":
                return self._reply({"errors": [], "warnings": []})
            if "/preupload/" in path:
                files = [
                    {"path": f["path"], "uploadMode": "lfs" if f["size"] > BIG else "regular", "shouldIgnore": False}
                    for f in json.loads(body)["files"]
                ]
                return self._reply({"files": files})
            if path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {**each, "actions": {"upload": {"href": f"{state.address}/large/{each['oid']}"}}}
                    for each in json.loads(body)["objects"]
                ]
                return self._reply({"transfer": "basic", "objects": objects})
            if path.startswith("/large/"):
                state.large[path.rpartition("/")[2]] = body
                return self._reply({})
            if "/commit/" in path:
                name = path.removeprefix("/api/models/").partition("/commit/")[0]
                self._commit(name, body)
                address = f"{state.address}/{name}/commit/{COMMIT}"
                return self._reply({"success": True, "commitOid": COMMIT, "commitUrl": address, "hookOutput": ""})
            if "/resolve/" in path:
                name, _, rest = path.lstrip("/").partition("/resolve/")
                content = state.files.get(name, {}).get(rest.partition("/")[2])
                if content is None:
                    return self._reply({"error": "none"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
                etag = f'"{hashlib.sha256(content).hexdigest()}"'
                return self._reply(content, X_Repo_Commit=COMMIT, ETag=etag, Content_Type="application/octet-stream")
            name = path.removeprefix("/api/models/").partition("/revision/")[0].partition("/tree/")[0]
            if path.startswith("/api/models/") and name in state.files:
                if "/tree/" in path:
                    return self._reply([])
                files = [{"rfilename": each} for each in state.files[name]]
                facts = {"id": name, "modelId": name, "sha": COMMIT, "private": True, "siblings": files, "tags": []}
                return self._reply(facts)
            return self._reply({"error": "none"}, 404, X_Error_Code="RepoNotFound")

        def _commit(self, name: str, body: bytes) -> None:
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    state.files[name][value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    state.files[name][value["path"]] = state.large[value["oid"]]

        do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _answer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
