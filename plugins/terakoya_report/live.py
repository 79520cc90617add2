"""`terakoya report --live`: serves the report of runs to this machine's browser, which keeps it up to date.

The server listens on the loopback address alone and answers two addresses: the page, and its changing part. It takes no
input but the folders that it was started with. To look from elsewhere: `ssh -L 8000:127.0.0.1:8000 HOST`.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from terakoya.errors import UserError
from terakoya.log import translated

HOST = "127.0.0.1"
OWN_NAMES = ("127.0.0.1", "localhost")
"""The names by which a browser on this machine calls the server. A page elsewhere that makes its own name point here
calls it by that name, and gets nothing."""


class LivePage:
    """The page of runs, rendered again when it is asked for and is too old.

    Attributes:
        render_page: returns the whole page.
        render_main: returns the part of it that changes.
    """

    def __init__(self, render_page: Callable[[], str], render_main: Callable[[], str], *, every: float) -> None:
        self.render_page = render_page
        self.render_main = render_main
        self.every = every
        self._lock = threading.Lock()
        self._main, self._tag, self._rendered = "", "", float("-inf")

    def main(self) -> tuple[str, str]:
        """Returns the changing part, at most `every` seconds old, and its ETag."""
        with self._lock:
            if time.monotonic() - self._rendered >= self.every:
                self._main = self.render_main()
                self._tag = f'"{hashlib.sha256(self._main.encode()).hexdigest()[:32]}"'
                self._rendered = time.monotonic()
            return self._main, self._tag


def create_server(page: LivePage, *, port: int, scripts: str) -> ThreadingHTTPServer:
    """Returns a server of `page` on the loopback address; port 0 is any that is free. `serve_forever` runs it.

    Args:
        scripts: the text of the page's script, the only one that its browser may run.

    Raises:
        OSError: the port is taken.
    """
    digest = base64.b64encode(hashlib.sha256(scripts.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "terakoya", ""

        def do_GET(self) -> None:
            name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if name not in OWN_NAMES:
                self._answer(HTTPStatus.FORBIDDEN, "only for a browser on this machine", kind="text/plain")
            elif self.path in ("/", "/body"):
                try:
                    self._answer_page()
                except UserError as error:  # a run's folder was moved away
                    self._answer(HTTPStatus.SERVICE_UNAVAILABLE, translated(str(error)), kind="text/plain")
            else:
                self._answer(HTTPStatus.NOT_FOUND, "there is nothing here but /", kind="text/plain")

        def _answer_page(self) -> None:
            if self.path == "/":
                self._answer(HTTPStatus.OK, page.render_page())
            else:
                text, tag = page.main()
                if self.headers.get("If-None-Match") == tag:
                    self._answer(HTTPStatus.NOT_MODIFIED, "", tag=tag)
                else:
                    self._answer(HTTPStatus.OK, text, tag=tag)

        def _answer(self, status: HTTPStatus, text: str, *, tag: str = "", kind: str = "text/html") -> None:
            body = text.encode()
            self.send_response(status)
            headers = {
                "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)),
                "Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer", "Cache-Control": "no-store", **({"ETag": tag} if tag else {}),
            }  # fmt: skip
            for header, value in headers.items():
                self.send_header(header, value)
            self.end_headers()
            if status != HTTPStatus.NOT_MODIFIED:
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Prints nothing: a browser asks every few seconds."""

    return _Server((HOST, port), Handler)


class _Server(ThreadingHTTPServer):
    """Ends with its program, and says nothing of a browser that leaves in the middle of an answer."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Reports an error of a request, unless it is that the browser is gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
