"""A web page on which a person says that an episode may start, and tells its success."""

from __future__ import annotations

import io
import json
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image

from rlinf.errors import ConfigError
from rlinf.robot.person import PersonTells

HTML = Path(__file__).with_name("page.html")
LOOK_EVERY_S = 0.2
"""Time between two images while the page waits for an answer."""
GONE_S = 1.0
"""Time without a request after which nobody looks at the page."""
MAX_ANSWER = 1000
"""Bytes of a request."""


class Page:
    """Serves the page from threads of this process, at an address that cannot be guessed.

    Args:
        person: Asks on the page from now on, and has the images.
        host, port: Where it listens; port 0 takes any that is free.

    Attributes:
        path, url: Address of the page.
        looked_s: When a browser has last asked, in seconds of the monotonic clock.

    Raise ConfigError if it cannot listen there.
    """

    def __init__(self, person: PersonTells, host: str, port: int) -> None:
        self.person, self.looked_s = person, 0.0
        self._answers: queue.Queue[str] = queue.Queue()
        self._lock = threading.Lock()
        self._asked = self._acting(0)
        self.path = f"/{secrets.token_urlsafe(16)}/"
        self._server = listening(host, port, partial(_Handler, self))
        person.ask, person.overlays = self.ask, False
        self.url = f"http://{host}:{self._server.server_address[1]}{self.path}"
        threading.Thread(target=self._server.serve_forever, name="page", daemon=True).start()

    def close(self) -> None:
        """Serve it no more."""
        self._server.shutdown()
        self._server.server_close()

    def ask(self, text: str, answers: Mapping[str, str]) -> str:
        """Show a question until the person answers it."""
        number = self._asked["number"] + 1
        self._asked = {"number": number, "text": text.strip(), "answers": dict(answers)}
        while True:
            self.person.look()  # by this thread: simulators and buses do not like others
            try:
                answer = self._answers.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                continue
            self._asked = self._acting(number)
            return answer

    def _acting(self, number: int) -> dict[str, Any]:
        """Return the state of the page after question ``number``."""
        return {"number": number, "text": f"{self.person.heading}\nthe robot acts".strip(), "answers": {}}

    def answer(self, given: Mapping[str, Any]) -> bool:
        """Take an answer to the question that is open, or who acts; return whether it was one, once."""
        if "takes_over" in given and self.person.takes_over is not None:
            self.person.takes_over = given["takes_over"] is True
            return True
        with self._lock:
            asked = self._asked
            if given.get("number") != asked["number"] or given.get("answer") not in asked["answers"]:
                return False
            self._asked = {**asked, "answers": {}}
        self._answers.put(given["answer"])
        return True

    def content(self, name: str) -> tuple[str, bytes] | None:
        """Return type and content of a file of the page; None: it has no such file."""
        person = self.person
        if name == "":
            return "text/html; charset=utf-8", HTML.read_bytes()
        if name == "state":
            self.looked_s = time.monotonic()
            state = {**self._asked, "wanted": person.start is not None, "takes_over": person.takes_over}
            return "application/json", json.dumps(state).encode()
        seen, start = person.seen, person.start
        if name == "now" and seen is not None:
            content = io.BytesIO()
            Image.fromarray(seen).save(content, "JPEG", quality=90)
            return "image/jpeg", content.getvalue()
        if name == "wanted" and start is not None:
            return "image/png", start.read_bytes()
        return None


def listening(host: str, port: int, handler: Callable[..., BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    """Return a server that listens there; raise ConfigError if it cannot."""
    try:
        return ThreadingHTTPServer((host, port), handler)
    except OSError as error:
        raise ConfigError(
            f"page_host={host} page_port={port}: the page cannot listen there ({error}); required: an address of this machine and a "
            "free port. Set page_port=0 for any"
        ) from error


class OnPage:
    """A teleoperator of lerobot without a button (a ``Teleoperator``), such as a leader arm: its person takes over on the page.

    It is gone if no browser shows the page, because then nobody could take over. It is not told to follow the robot.
    """

    def __init__(self, teleoperator: Any, page: Page) -> None:
        self.teleoperator, self.page = teleoperator, page
        page.person.takes_over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.teleoperator, name)

    def get_teleop_events(self) -> dict[str, bool]:
        if time.monotonic() - self.page.looked_s > GONE_S:
            raise TimeoutError(f"no browser shows {self.page.url}")
        return {"is_intervention": bool(self.page.person.takes_over)}

    def send_feedback(self, feedback: dict[str, Any]) -> None:
        """Do nothing."""


class _Handler(BaseHTTPRequestHandler):
    """Answers a browser that knows the page's path."""

    timeout = 5.0  # seconds: connections that say nothing hold a thread no longer

    def __init__(self, page: Page, *args: Any) -> None:
        self.page = page
        with suppress(ConnectionError):  # a browser that goes away harms nobody
            super().__init__(*args)

    def do_GET(self) -> None:
        name = self._name()
        self._reply(None if name is None else self.page.content(name))

    def do_POST(self) -> None:
        taken = False
        if self._name() == "answer":
            with suppress(TypeError, ValueError, AttributeError):  # no answer, and no JSON map
                taken = self.page.answer(
                    json.loads(self.rfile.read(max(0, min(MAX_ANSWER, int(self.headers["Content-Length"])))))
                )
        self._reply(("application/json", b"{}") if taken else None)

    def _name(self) -> str | None:
        """Return the part of the address after the page's path; None: this is another one."""
        folder, _, name = self.path.partition("?")[0].rpartition("/")
        return name if secrets.compare_digest(f"{folder}/".encode(), self.page.path.encode()) else None

    def _reply(self, found: tuple[str, bytes] | None) -> None:
        kind, content = found or ("text/plain", b"not here")
        self.send_response(404 if found is None else 200)
        for header in (("Content-Type", kind), ("Content-Length", str(len(content))), ("Cache-Control", "no-store")):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests."""
