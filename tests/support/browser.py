"""Chromium without a window, by its DevTools protocol: what a page asks for, says on the console, and how wide it is."""

import base64
import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import websocket

INSTALL = (
    "chromium is not installed; as root: apt-get update && apt-get install -y chromium (tests/run.sh does so where it can)"
)
_PATIENCE = 60  # seconds for its start, and for a page


@dataclass
class Seen:
    """A page that was shown: its requests, its console's messages, and the widths in pixels of its content and its window."""

    requests: list[str]
    messages: list[str]
    content: int
    window: int
    png: bytes


class Browser:
    """A running Chromium; use it in a `with` block."""

    def __init__(self, profile: Path):
        program = shutil.which("chromium")
        assert program, INSTALL
        # without a sandbox of its own, because the tests may run as root
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
        options += ["--remote-allow-origins=*", "--no-first-run", f"--user-data-dir={profile}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": os.environ | {"HOME": str(profile)}}
        self._process = subprocess.Popen([program, *options, "about:blank"], **quiet)
        self._number, self._events = 0, []
        try:
            self._socket = websocket.create_connection(self._address(profile / "DevToolsActivePort"), timeout=_PATIENCE)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        self._process.wait(_PATIENCE)

    def show(self, page: Path | str, width: int, height: int = 900, dark: bool = False, media: str = "") -> Seen:
        """Shows a file, or an address, in a window of this size; `media` may be "print"."""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._events = []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._ask(f"{domain}.enable", session)
        self._ask("Emulation.setDeviceMetricsOverride", session, width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._ask("Emulation.setEmulatedMedia", session, media=media, features=scheme)
        address = page.as_uri() if isinstance(page, Path) else page
        self._ask("Page.navigate", session, url=address)
        self._until("Page.loadEventFired")
        content = self._value(session, "document.documentElement.scrollWidth")
        window = self._value(session, "window.innerWidth")
        png = self._ask("Page.captureScreenshot", session, captureBeyondViewport=True)["data"]
        requests = [
            event["params"]["request"]["url"] for event in self._events if event["method"] == "Network.requestWillBeSent"
        ]
        messages = [json.dumps(e["params"]) for e in self._events if e["method"] in _SAID]
        self._ask("Target.closeTarget", targetId=target)
        own = [url for url in requests if url != address and not url.startswith("data:")]
        return Seen(own, messages, content, window, base64.b64decode(png))

    def _value(self, session: str, expression: str):
        return self._ask("Runtime.evaluate", session, expression=expression, returnByValue=True)["result"]["value"]

    def _ask(self, method: str, session: str = "", **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._events.append(answer)

    def _until(self, method: str) -> None:
        while not any(event.get("method") == method for event in self._events):
            self._events.append(json.loads(self._socket.recv()))

    def _address(self, file: Path) -> str:
        ends = time.monotonic() + _PATIENCE
        while not file.exists() or len(file.read_text().splitlines()) < 2:
            assert self._process.poll() is None, "chromium ended at once"
            assert time.monotonic() < ends, f"chromium did not start within {_PATIENCE} s"
            time.sleep(0.05)
        port, path = file.read_text().splitlines()[:2]
        return f"ws://127.0.0.1:{port}{path}"


_SAID = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
