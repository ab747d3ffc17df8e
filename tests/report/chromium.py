"""A headless Chromium, driven through its DevTools protocol over a pair of pipes: no port, no driver program."""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

START_SECONDS = 60.0
ANSWER_SECONDS = 30.0
LINE_OF_PROGRAMS = 10_000  # more than any page has before them
FLAGS = [
    "--headless=new",
    "--no-sandbox",  # as root there is none; the pages are this repository's own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
]


class Page:
    """A page of the browser; all that it says and asks for is kept.

    Chromium compiles plotly.js, which takes a second, anew for each address and line at which it finds it. So a page is
    shown as a copy at one address, with empty lines before its programs.

    Attributes:
        address: that of each page, as the browser has it.
        errors: exceptions, and what the console shows as an error or a warning.
        requests: the addresses that the page asked for, its own first.
    """

    def __init__(self, reader: int, writer: int, copy: Path) -> None:
        self._reader, self._writer, self._copy = reader, writer, copy
        self.address = copy.resolve().as_uri()
        self._buffer, self._number = b"", 0
        self._session: str | None = None
        self._seen: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.requests: list[str] = []

    def open_tab(self) -> None:
        """Take a tab of the browser, once it answers."""
        target = self.send("Target.createTarget", url="about:blank", limit_s=START_SECONDS)["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def show(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a copy of a file, and wait until its program has run."""
        before, start, after = path.read_text(encoding="utf-8").partition("<script>")
        empty = "\n" * (LINE_OF_PROGRAMS - before.count("\n"))
        self._copy.write_text(f"{before}{empty}{start}{after}", encoding="utf-8")
        self.resize(width, height, dark=dark)
        self.errors.clear()
        self.requests.clear()
        self._seen.clear()
        self.send("Page.navigate", url=self.address)
        self._wait_for("Page.loadEventFired")

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Give the page a width and height in CSS pixels; one narrower than 600 is a phone's."""
        is_phone = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", media="", features=features)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, as JSON."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, by its DOM name such as ArrowRight, Tab or +."""
        codes = {"Tab": 9, "Escape": 27, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        text: dict[str, Any] = {"text": key} if len(key) == 1 else {}
        code = codes.get(key, ord(key[0]))
        for kind in ("keyDown", "keyUp"):
            given: dict[str, Any] = {
                "type": kind,
                "key": key,
                "windowsVirtualKeyCode": code,
                **(text if kind == "keyDown" else {}),
            }
            self.send("Input.dispatchKeyEvent", **given)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """A mouse event: mouseMoved, mousePressed or mouseReleased."""
        button = "none" if kind == "mouseMoved" else "left"
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=int(button == "left"))

    def screenshot(self, path: Path, *, beyond_viewport: bool = True) -> None:
        """The whole page as a PNG, for which it is resized; or what is in sight."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=beyond_viewport)
        path.write_bytes(base64.b64decode(answer["data"]))

    def print_pdf(self, path: Path) -> None:
        """The page as it is printed."""
        path.write_bytes(base64.b64decode(self.send("Page.printToPDF", printBackground=False)["data"]))

    def send(self, method: str, *, limit_s: float = ANSWER_SECONDS, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its answer."""
        self._number += 1
        number = self._number
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": number, "method": method, "params": parameters, **session}
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        answer = self._read_until(lambda found: found.get("id") == number, limit_s=limit_s, what=method)
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _wait_for(self, event: str) -> None:
        if not any(message.get("method") == event for message in self._seen):
            self._read_until(lambda found: found.get("method") == event, limit_s=ANSWER_SECONDS, what=event)

    def _read_until(self, is_it: Callable[[dict[str, Any]], bool], *, limit_s: float, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while True:
            while b"\0" in self._buffer:
                text, _, self._buffer = self._buffer.partition(b"\0")
                message = json.loads(text)
                self._note(message)
                if is_it(message):
                    return message
            readable, _, _ = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise TimeoutError(f"Chromium did not answer in {limit_s} s: {what}")
            data = os.read(self._reader, 2**20)
            if not data:
                raise AssertionError(f"Chromium ended: {what}")
            self._buffer += data

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method:
            self._seen.append(message)
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(parameters["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A browser of its own process group and profile, which ends with the block."""
    program = shutil.which("chromium")
    assert program, "no chromium: make setup-tests installs it"
    to_read, writer = os.pipe()
    reader, to_write = os.pipe()

    def place_pipes() -> None:  # the browser reads descriptor 3 and writes 4; those may be any of ours now
        read_copy, write_copy = os.dup(to_read), os.dup(to_write)
        for copy, place in ((read_copy, 3), (write_copy, 4)):
            os.dup2(copy, place)

    command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    environment = {**os.environ, "HOME": str(profile), "XDG_CONFIG_HOME": str(profile), "XDG_CACHE_HOME": str(profile)}
    with (profile.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            close_fds=False, preexec_fn=place_pipes,
        )  # fmt: skip
    os.close(to_read)
    os.close(to_write)
    page = Page(reader, writer, profile.parent / "page.html")
    try:
        page.open_tab()
        yield page
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        os.close(reader)
        os.close(writer)
