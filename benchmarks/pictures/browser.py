"""A headless Chromium driven over its DevTools protocol: open a page, run JavaScript in it, take a picture.

The browser reads commands from file descriptor 3 and answers on 4, JSON with a zero byte at each end
(`--remote-debugging-pipe`), so neither a driver nor a WebSocket package is needed.
Protocol: https://chromedevtools.github.io/devtools-protocol/.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900"]
SECONDS = 30  # for anything to happen


class Tab:
    """One open page.

    Args:
        commands, answers: file descriptors of the browser's pipe.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer, self._number, self._session = b"", 0, {}
        self.errors: list[str] = []  # exceptions of the page's scripts, and what it logged as an error
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self._send(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Go to a page."""
        self._send("Page.navigate", url=url)
        self.wait("document.readyState == 'complete'")

    def run(self, script: str) -> object:
        """The value of a JavaScript expression in the page, awaited if it is a promise."""
        answer = self._send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + SECONDS
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"it did not become true in time: {script}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """The text of the first element that a CSS selector finds."""
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent.trim()")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def fill(self, selector: str, value: object) -> None:
        """Write into a field."""
        self.run(f"document.querySelector({json.dumps(selector)}).value = {json.dumps(str(value))}")

    def screenshot(self) -> bytes:
        """The page as a PNG."""
        return base64.b64decode(self._send("Page.captureScreenshot", format="png")["data"])

    def _send(self, method: str, **params: object) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict) -> None:
        if event["method"] == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])

    def _read(self) -> dict:
        while b"\0" not in self._buffer:
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def open_tab(profile: Path) -> Iterator[Tab]:
    """A new browser with one tab; ended when the block is left.

    Args:
        profile: an empty folder for its files.
    """
    (its_commands, commands), (answers, its_answers) = os.pipe(), os.pipe()
    command = [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    shell = f'exec "$@" 3<&{its_commands} 4>&{its_answers}'
    browser = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command], pass_fds=(its_commands, its_answers),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(its_commands)
    os.close(its_answers)
    try:
        yield Tab(commands, answers)
    finally:
        os.close(commands)  # it ends with its pipe
        try:
            browser.wait(SECONDS)
        finally:
            browser.kill()
            os.close(answers)
