"""A headless Chromium driven over its DevTools pipe: loads a page, listens to its console and network, takes pictures."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.started import LIMIT

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "chrome")
HOW_TO_GET_ONE = (
    f"no Chromium that starts: none of {', '.join(NAMES)} is on PATH and answers --version, and CHROMIUM names none. "
    "Install one (Debian: apt-get install chromium; Fedora: dnf install chromium-headless), or set CHROMIUM to its path"
)


def find_chromium() -> str | None:
    """The path of a Chromium that starts; None where there is none. Ubuntu's `chromium-browser` may be a stub that does not."""
    named = os.environ.get("CHROMIUM")
    found = (path for name in ([named] if named else NAMES) if (path := shutil.which(name)))
    return next((path for path in found if _starts(path)), None)


def _starts(path: str) -> bool:
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=LIMIT).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


class Page:
    """One page. heard: what its console said and what failed. requested: addresses that it loaded."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._buffer, self._number = send, receive, b"", 0
        self.session: str | None = None
        self.heard: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._receive, 1 << 20)
            if not piece:
                raise EOFError("the browser has gone")
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        match message.get("method"):
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded":
                self.heard.append(json.dumps(message["params"])[:500])
            case "Network.requestWillBeSent":
                self.requested.append(message["params"]["request"]["url"])
        return message

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        os.write(self._send, json.dumps(command).encode() + b"\0")
        while (message := self._message()).get("id") != self._number:
            pass
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        result: dict[str, Any] = message["result"]
        return result

    def open(self, path: Path, width: int, scheme: str, media: str = "screen") -> None:
        """Loads a file in a window `width` wide, light or dark, and waits until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """What an expression gives on the page, as plain data."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def picture(self, path: Path) -> None:
        """Writes the whole page, as long as it is, as PNG."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def browser(chromium: str, profile: Path) -> Iterator[Page]:
    """A page of a browser that is ended at the end. profile: an empty directory of its own."""
    to_child, send = os.pipe()
    receive, from_child = os.pipe()

    def wire() -> None:
        low = os.dup(to_child), os.dup(from_child)  # 3 and 4 may be in use by the pipes themselves
        os.dup2(low[0], 3)
        os.dup2(low[1], 4)

    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage",
             "--remote-debugging-pipe", f"--user-data-dir={profile}")  # fmt: skip
    process = subprocess.Popen(
        [chromium, *flags, "about:blank"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, preexec_fn=wire, pass_fds=(3, 4, to_child, from_child),
    )  # fmt: skip
    os.close(to_child)
    os.close(from_child)
    try:
        yield Page(send, receive)
    finally:
        os.close(send)
        os.close(receive)
        process.terminate()
        try:
            process.wait(10)  # then less gently
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(LIMIT)
