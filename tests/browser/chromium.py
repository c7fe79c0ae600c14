"""A browser without a window, driven over a pipe by the DevTools protocol, and pages in it."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# A machine that does much else at the same time.
ANSWER_S = 25.0


def found() -> str:
    """The browser on this machine; empty where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), "")


class Browser:
    """A running browser. It reads commands from its file descriptor 3, and answers on 4, a NUL after each."""

    def __init__(self, program: str, profile: Path) -> None:
        reads, self._commands = os.pipe()
        self._answers, writes = os.pipe()

        def give() -> None:
            # Out of the way first: one of them may be 3 or 4 itself.
            for number, kept in ((3, os.dup(reads)), (4, os.dup(writes))):
                kept = os.dup(kept) if kept <= 4 else kept
                os.dup2(kept, number)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=give,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self._number = 0
        self._unread = b""
        self.events: list[dict[str, Any]] = []
        # One tab for all pages: each of its own would take a process of its own, which costs more than the page.
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", self._session)

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Runs a command, and gives its result; what happens meanwhile is kept in ``events``."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (message := self._next()).get("id") != self._number:
            self.events.append(message)
        assert "error" not in message, (method, message["error"])
        return dict(message["result"])

    def wait_for(self, method: str, session: str) -> None:
        """Until something has happened in a page, also if it has already."""
        while not any(event.get("method") == method and event.get("sessionId") == session for event in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        give_up = time.monotonic() + ANSWER_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(give_up - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has ended"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))

    def close(self) -> None:
        try:
            self.call("Browser.close")
        finally:
            os.close(self._commands)
            os.close(self._answers)
            try:
                self._process.wait(ANSWER_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @contextmanager
    def page(
        self, path: Path, width: int, height: int = 844, *, dark: bool = False, scale: int = 1
    ) -> Iterator["Page"]:
        """Opens a file in a window of this size, and leaves it at the end; ``scale`` is that of screenshots."""
        session = self._session
        page = Page(browser=self, session=session)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            session,
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        page.emulate("screen", dark=dark)
        self.call("Page.navigate", session, url=path.as_uri())
        self.wait_for("Page.loadEventFired", session)
        try:
            yield page
        finally:
            self.events.clear()
            self.call("Page.navigate", session, url="about:blank")
            self.wait_for("Page.loadEventFired", session)
            self.events.clear()


@dataclass(frozen=True)
class Page:
    """A page that has been loaded."""

    browser: Browser
    session: str
    _: Any = field(default=None, repr=False)

    def evaluate(self, expression: str) -> Any:
        """What a line of JavaScript gives, as plain data."""
        call = self.browser.call
        done = call("Runtime.evaluate", self.session, expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def click(self, selector: str) -> None:
        """As a mouse does, in the middle of the first element that fits."""
        box = self.evaluate(
            f"(one => {{ one.scrollIntoView({{block: 'nearest'}}); const box = one.getBoundingClientRect();"
            f" return [box.left + Math.min(box.width, 100) / 2, box.top + Math.min(box.height, 40) / 2]; }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            at = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            self.browser.call("Input.dispatchMouseEvent", self.session, type=kind, **at)

    def emulate(self, media: str, *, dark: bool = False) -> None:
        """On screen or on paper, with the user's wish for dark or light."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.call("Emulation.setEmulatedMedia", self.session, media=media, features=[scheme])

    def requests(self) -> list[str]:
        """Everything that it has asked for."""
        return [event["params"]["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    def complaints(self) -> list[str]:
        """What the browser says on its console: errors, warnings, violations of the policy."""
        said = (*self._events("Log.entryAdded"), *self._events("Runtime.exceptionThrown"))
        return [json.dumps(event["params"]) for event in (*said, *self._events("Runtime.consoleAPICalled"))]

    def _events(self, method: str) -> list[dict[str, Any]]:
        events = self.browser.events
        return [event for event in events if event.get("method") == method and event.get("sessionId") == self.session]

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """For people to look at."""
        made = self.browser.call("Page.captureScreenshot", self.session, captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(made["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.browser.call("Page.printToPDF", self.session, printBackground=True)["data"])
