"""A web server on loopback that gives a few files and counts what it is asked for."""

import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class FileServer:
    """Serves from a thread while it is entered.

    Args:
        files: The content by path.
        missing_bytes: How much of each answer is left out, as when a connection breaks off.
        before_answer: Called before each answer.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        *,
        missing_bytes: int = 0,
        before_answer: Callable[[], None] = lambda: None,
    ) -> None:
        self.requests: list[str] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append(self.path)
                before_answer()
                if self.path not in files:
                    self.send_error(404)
                    return
                content = files[self.path]
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) - missing_bytes])

            def log_message(self, *args: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}{path}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
