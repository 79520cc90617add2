"""Drives a headless Chromium over its debugging pipe, without any package: opens pages, runs scripts, takes pictures.

`tools/screenshots.py` and the tests of pages use it. The protocol is https://chromedevtools.github.io/devtools-protocol.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
"""Programs that are Chromium or its like."""
ANSWER_SECONDS = 60.0
"""How long the browser may take for one answer, on a busy machine."""


def find_browser() -> str | None:
    """Returns the program of a Chromium on this machine: `CHROMIUM` in the environment, or the first of `NAMES`."""
    named = os.environ.get("CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """A headless browser with one page. Use it as a context manager."""

    def __init__(self, *, width: int = 1280, height: int = 800, scale: float = 1.0, dark: bool = False) -> None:
        """Starts the browser with a window of `width` x `height` CSS pixels, each `scale` pixels of a picture.

        Raises:
            RuntimeError: there is no Chromium.
        """
        program = find_browser()
        if program is None:
            raise RuntimeError(f"no browser: expected one of {', '.join(NAMES)} (apt-get install chromium)")
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        read, theirs_out = os.pipe()
        theirs_in, write = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                 "--no-first-run", "--disable-extensions", "--force-color-profile=srgb", "--lang=en-US",
                 f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe"]  # fmt: skip
        # the browser reads commands at descriptor 3 and writes answers at descriptor 4
        shell = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "browser", program, *flags, "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(read, False)
        self._read, self._write, self._unread, self._number = read, write, b"", 0
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", {"targetId": page["targetId"], "flatten": True})
        self._session = attached["sessionId"]
        self.errors: list[str] = []
        """What scripts of the pages threw, and what the browser refused."""
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height, scale=scale)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [feature]})

    def __enter__(self) -> Self:
        """Returns the browser."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the browser."""
        self.close()

    def close(self) -> None:
        """Ends the browser and removes its profile."""
        os.close(self._write)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._profile.cleanup()

    def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        """Gives the window another size."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", metrics)

    def open(self, address: str | Path, *, timeout: float = ANSWER_SECONDS) -> None:
        """Opens an address or a file and waits until it is loaded."""
        url = address.resolve().as_uri() if isinstance(address, Path) else address
        answer = self.call("Page.navigate", {"url": url})
        if answer.get("errorText"):
            raise RuntimeError(f"{url}: {answer['errorText']}")
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'", timeout=timeout)

    def run(self, script: str) -> Any:
        """Returns the value of a JavaScript expression in the page; a promise is waited for.

        Raises:
            RuntimeError: the script threw.
        """
        answer = self.call("Runtime.evaluate", {"expression": script, "returnByValue": True, "awaitPromise": True})
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {_text_of(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    def wait_for(self, script: str, *, timeout: float = ANSWER_SECONDS) -> None:
        """Waits until the expression `script` is true in the page.

        Raises:
            TimeoutError: it did not become true in `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while not self.run(f"Boolean({script})"):
            if time.monotonic() > end:
                raise TimeoutError(f"not true after {timeout:.0f} s: {script}")
            time.sleep(0.05)

    def mouse(self, kind: str, x: float, y: float, *, clicks: int = 0) -> None:
        """Sends a mouse event at a place of the window, in CSS pixels: `moved`, `pressed` or `released`."""
        pressed = kind != "moved" or clicks
        event = {"type": f"mouse{kind.capitalize()}", "x": x, "y": y, "button": "left" if pressed else "none",
                 "buttons": 1 if clicks and kind != "released" else 0, "clickCount": clicks}  # fmt: skip
        self.call("Input.dispatchMouseEvent", event)

    def drag(self, start: tuple[float, float], stop: tuple[float, float]) -> None:
        """Presses the mouse at `start`, moves it to `stop` and releases it."""
        self.mouse("moved", *start)
        self.mouse("pressed", *start, clicks=1)
        for share in (0.25, 0.5, 0.75, 1.0):
            place = (start[0] + share * (stop[0] - start[0]), start[1] + share * (stop[1] - start[1]))
            self.mouse("moved", *place, clicks=1)
        self.mouse("released", *stop, clicks=1)

    def click(self, x: float, y: float, *, times: int = 1) -> None:
        """Clicks `times` times at a place of the window."""
        for number in range(1, times + 1):
            self.mouse("pressed", x, y, clicks=number)
            self.mouse("released", x, y, clicks=number)

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Returns left, top, width and height of the first element of `selector`, in CSS pixels of the window, after
        it was scrolled into view."""
        found = self.run(
            f"(() => {{ const each = document.querySelector({json.dumps(selector)}); "
            "each.scrollIntoView({block: 'center', behavior: 'instant'}); const box = each.getBoundingClientRect(); "
            "return [box.left, box.top, box.width, box.height]; })()"
        )
        return tuple(found)  # type: ignore[return-value]

    def picture(
        self, *, clip: tuple[float, float, float, float] | None = None, whole: bool = False, scale: float = 1.0
    ) -> bytes:
        """Returns a PNG of the window, of the `whole` page, or of left, top, width, height of the page in `clip`."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole or clip is not None}
        if clip is not None:
            options["clip"] = dict(zip(("x", "y", "width", "height"), clip, strict=True)) | {"scale": scale}
        elif whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": scale}
        return base64.b64decode(self.call("Page.captureScreenshot", options)["data"])

    def call(self, method: str, parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result.

        Raises:
            RuntimeError: the browser refused, ended, or did not answer.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": dict(parameters or {})}
        if self._session is not None:
            message["sessionId"] = self._session
        try:
            os.write(self._write, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise RuntimeError("the browser has ended") from None
        end = time.monotonic() + ANSWER_SECONDS
        while True:
            answer = self._next_message(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error'].get('message')}")
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(_text_of(answer["params"]["exceptionDetails"]))
            elif answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.errors.append(answer["params"]["entry"]["text"])

    def _next_message(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            try:
                piece = os.read(self._read, 1 << 20)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise RuntimeError(f"the browser did not answer in {ANSWER_SECONDS:.0f} s") from None
                time.sleep(0.005)
                continue
            if not piece:
                raise RuntimeError("the browser has ended")
            self._unread += piece
        message, self._unread = self._unread.split(b"\0", 1)
        parsed: dict[str, Any] = json.loads(message)
        return parsed


def _text_of(details: Mapping[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details.get("text"))
