"""Web pages for a human: a server at an unguessable address, and the page on which episodes are started and labelled."""

import io
import json
import queue
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rlinf.errors import ConfigError
from rlinf.files import Json
from rlinf.robot.human import HumanLabelledRobot

HTML = Path(__file__).with_name("page.html")
LOOK_EVERY_S = 0.2
"""Time between two images while a question is open."""
BROWSER_TIMEOUT_S = 1.0
"""Time without a request after which the page is considered closed."""
MAX_REQUEST_BYTES = 1000


Content = tuple[str, bytes]
"""Type and content of a reply."""


class ServedPage(ABC):
    """Serves a page from threads of this process, at an unguessable address.

    Attributes:
        path, url: Address of the page.

    Raise ConfigError if the server cannot listen at the address.
    """

    def __init__(self, host: str, port: int) -> None:
        # The only protection: the page has no password, and starts a robot.
        self.path = f"/{secrets.token_urlsafe(16)}/"
        self._server = listening(host, port, partial(_Handler, self))
        self.url = f"http://{host}:{self._server.server_address[1]}{self.path}"
        threading.Thread(target=self._server.serve_forever, name="page", daemon=True).start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    @abstractmethod
    def take(self, message: Json) -> Json | None:
        """Process a message from a browser; return the reply, or None if the message is invalid."""

    @abstractmethod
    def content(self, name: str) -> Content | None:
        """Return one of the page's files, or None if it does not exist."""


class Page(ServedPage):
    """The page on which a human starts episodes and labels their success.

    Args:
        robot: Provides the images, and from now on asks its questions on the page.

    Attributes:
        last_seen_s: Time of the last browser request, on the monotonic clock.
    """

    def __init__(self, robot: HumanLabelledRobot, host: str, port: int) -> None:
        self.robot, self.last_seen_s = robot, 0.0
        self._replies: queue.Queue[str] = queue.Queue()
        self._lock = threading.Lock()
        self._question = self._no_question(0)
        super().__init__(host, port)
        robot.ask, robot.overlays = self.ask, False

    def ask(self, text: str, choices: Mapping[str, str]) -> str:
        """Show a question until the human chooses."""
        number = self._question["number"] + 1
        self._question = {"number": number, "text": text.strip(), "choices": dict(choices)}
        while True:
            # Read images in this thread: simulators and buses must not be used from the server's threads.
            self.robot.look()
            try:
                choice = self._replies.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                continue
            self._question = self._no_question(number)
            return choice

    def _no_question(self, number: int) -> dict[str, Any]:
        """Return the page's state after question ``number`` has been closed."""
        return {"number": number, "text": f"{self.robot.heading}\nthe robot acts".strip(), "choices": {}}

    def take(self, message: Json) -> Json | None:
        """Process a choice for the open question, or a take-over."""
        if "takes_over" in message and self.robot.takes_over is not None:
            self.robot.takes_over = message["takes_over"] is True
            return {}
        # Two browsers may choose simultaneously: the first choice closes the question.
        with self._lock:
            question = self._question
            if message.get("number") != question["number"] or message.get("choice") not in question["choices"]:
                return None
            self._question = {**question, "choices": {}}
        self._replies.put(message["choice"])
        return {}

    def content(self, name: str) -> Content | None:
        robot = self.robot
        if name == "":
            return "text/html; charset=utf-8", HTML.read_bytes()
        if name == "state":
            self.last_seen_s = time.monotonic()
            state = {**self._question, "wanted": robot.start is not None, "takes_over": robot.takes_over}
            return as_json(state)
        seen, start = robot.seen, robot.start
        if name == "now" and seen is not None:
            return as_jpeg(seen)
        if name == "wanted" and start is not None:
            return "image/png", start.read_bytes()
        return None


def as_json(values: Json) -> Content:
    """Return a reply with JSON values."""
    return "application/json", json.dumps(values).encode()


def as_jpeg(image: np.ndarray) -> Content:
    """Return a reply with an image, uint8 ``[H, W, 3]``."""
    content = io.BytesIO()
    Image.fromarray(image).save(content, "JPEG", quality=90)
    return "image/jpeg", content.getvalue()


def listening(host: str, port: int, handler: Callable[..., BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    """Return a server that listens on ``host:port``; raise ConfigError if it cannot."""
    try:
        return ThreadingHTTPServer((host, port), handler)
    except OSError as error:
        raise ConfigError(
            f"page_host={host} page_port={port}: the page cannot listen there ({error}); expected an address of this machine and a "
            "free port. Set page_port=0"
        ) from error


class PageTeleoperator:
    """A lerobot teleoperator whose take-over button is on the page; lost while no browser shows the page, and without feedback."""

    def __init__(self, teleoperator: Any, page: Page) -> None:
        self.teleoperator, self.page = teleoperator, page
        page.robot.takes_over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.teleoperator, name)

    def get_teleop_events(self) -> dict[str, bool]:
        if time.monotonic() - self.page.last_seen_s > BROWSER_TIMEOUT_S:
            raise TimeoutError(f"no browser shows {self.page.url}")
        return {"is_intervention": bool(self.page.robot.takes_over)}

    def send_feedback(self, feedback: dict[str, Any]) -> None:
        """Ignore feedback."""


class _Handler(BaseHTTPRequestHandler):
    """HTTP handler for browsers that know the page's path."""

    timeout = 5.0  # seconds after which a silent connection frees its thread
    # One connection for many requests; with Nagle's algorithm, replies would wait 40 ms for an acknowledgement.
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def __init__(self, page: ServedPage, *args: Any) -> None:
        self.page = page
        with suppress(ConnectionError):  # a browser may close its connection at any time
            super().__init__(*args)

    def do_GET(self) -> None:
        self._reply(self.page.content)

    def do_POST(self) -> None:
        self._reply(self._take)

    def _take(self, name: str) -> Content | None:
        with suppress(TypeError, ValueError, AttributeError, LookupError):  # malformed: not JSON, or not such an object
            length = max(0, min(MAX_REQUEST_BYTES, int(self.headers["Content-Length"])))
            reply = self.page.take(json.loads(self.rfile.read(length)))
            return None if reply is None else as_json(reply)
        return None

    def _reply(self, respond: Callable[[str], Content | None]) -> None:
        """Send the response to the part of the address after the page's path: 403 for a wrong path, 404 for None."""
        folder, _, name = self.path.partition("?")[0].rpartition("/")
        # Compare in constant time, so that the duration does not reveal how much of a guess is right.
        is_known = secrets.compare_digest(f"{folder}/".encode(), self.page.path.encode())
        body = respond(name) if is_known else None
        kind, content = body or ("text/plain", b"not here")
        # A rejected request may have content that was not read, and would be taken for the next request.
        self.close_connection |= body is None
        self.send_response(200 if body is not None else 404 if is_known else 403)
        for header in (("Content-Type", kind), ("Content-Length", str(len(content))), ("Cache-Control", "no-store")):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""
