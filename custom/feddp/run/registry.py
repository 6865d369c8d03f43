"""The networks that a site has deployed: which one is in use, where each came from, and what was in use before.

    <registry>/deployments.jsonl       one event per line: deploy, with the network's origin, or rollback
    <registry>/<SHA-256>.safetensors   each deployed network, a copy, which the removal of a run leaves alone
    <registry>/.lock                   locked while an event is added

No event and no other network is ever removed or overwritten; the events, replayed, say what is deployed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import localtime, strftime
from typing import Any

from feddp.errors import BadFile, InputError, Problem
from feddp.export.facts import Facts
from feddp.files import Event, append_event, locked, read_events, replacing, writing
from feddp.limits import NETWORK_BYTES
from feddp.reading import is_name, read, short

EVENTS = "deployments.jsonl"
DEPLOY, ROLLBACK = "deploy", "rollback"
_LOCK = ".lock"
_TEXTS = ("site", "method", "job", "source")
_LONGEST = 4096  # characters of a text; a path has no more


@dataclass(frozen=True)
class Registry:
    """The registry in a folder, which need not exist before the first deployment."""

    folder: Path

    def deploy(self, network: Path) -> Path:
        """Copies a network's file into the registry and makes it the deployed one; returns the copy.

        If it is deployed already, no event is added; its copy is written anew.

        Raises:
            InputError: the file holds no network of FedDP, or is called by a text that no line can hold.
        """
        self.replayed()  # a damaged registry takes no more
        facts, content = Facts.of(network), read(network, NETWORK_BYTES)
        digest = sha256(content).hexdigest()
        if digest != facts.bytes_sha256:
            raise InputError(f"{network} changes while it is read; deploy it when it is written")
        texts = zip(_TEXTS, (facts.site or None, facts.method or None, facts.job, str(network.resolve())), strict=True)
        origin = {"sha256": digest, **dict(texts), "round": facts.round}
        if odd := [name for name in _TEXTS if not _is_text(origin[name])]:
            shown = short(repr(origin[odd[0]]))
            raise InputError(f"the network's {odd[0]} cannot be recorded: {shown}; copy the file to a folder with a plain name")
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        copy = self._file(digest)
        with locked(self.folder / _LOCK):
            stack = self.replayed()[1]
            with replacing(copy) as part:
                part.write_bytes(content)
            if not stack or stack[-1]["sha256"] != digest:
                append_event(self.folder / EVENTS, DEPLOY, **origin)
        return copy

    def rollback(self) -> Path:
        """Makes the network deployed that was so before the present one; returns its file.

        Raises:
            InputError: there is none, or its file has changed; then nothing changes.
        """
        if not self.replayed()[0]:  # not even a folder for the lock
            raise self._nothing_before()
        with locked(self.folder / _LOCK):
            stack = self.replayed()[1]
            if len(stack) < 2:
                raise self._nothing_before()
            file = self._checked(stack[-2])
            append_event(self.folder / EVENTS, ROLLBACK)
        return file

    def _nothing_before(self) -> InputError:
        return InputError(f"{self.folder} has no earlier network to go back to; deploy one with `feddp models deploy`")

    def deployed(self) -> Path:
        """Returns the file of the deployed network after a comparison with its checksum.

        Raises:
            InputError: no network is deployed, its file is missing or has changed, or the registry is damaged.
        """
        stack = self.replayed()[1]
        if not stack:
            raise InputError(f"{self.folder} has no deployed network; deploy one with `feddp models deploy`")
        return self._checked(stack[-1], ", or go back: `feddp models rollback`" if len(stack) > 1 else "")

    def lines(self) -> Iterator[str]:
        """Yields one line per event, the oldest first; the deployed network's is marked with a star."""
        events, stack = self.replayed()
        for event in events:
            when, mark = strftime("%Y-%m-%d %H:%M", localtime(event["time"])), "*" if event is stack[-1] else " "
            about = [f"{name} {event[name]}" for name in ("site", "method", "job", "round") if event.get(name) is not None]
            if event["event"] == DEPLOY:
                yield f"{mark} {when}  {DEPLOY}    {event['sha256'][:12]}  {', '.join(about)}  from {event['source']}"
            else:
                yield f"  {when}  {ROLLBACK}"

    def replayed(self) -> tuple[list[Event], list[Event]]:
        """Returns all events, the oldest first, and the deployments that no rollback has taken back; the last one is deployed.

        Raises:
            BadFile: the registry is damaged.
        """
        events, stack = read_events(self.folder / EVENTS), list[Event]()
        for number, event in enumerate(events, 1):
            if not _is_whole(event) or event["event"] == ROLLBACK and len(stack) < 2:
                what = f"is damaged (line {number})"
                raise BadFile(Problem(self.folder / EVENTS, what, "Restore it from a backup, or name another folder"))
            stack = [*stack, event] if event["event"] == DEPLOY else stack[:-1]
        return events, stack

    def _file(self, digest: str) -> Path:
        return self.folder / f"{digest}.safetensors"

    def _checked(self, event: Event, otherwise: str = "") -> Path:
        file = self._file(event["sha256"])
        try:
            found = sha256(read(file, NETWORK_BYTES, self.folder)).hexdigest()
        except FileNotFoundError:
            found = ""
        if found != event["sha256"]:
            what = "has changed since it was deployed" if found else "is missing"
            raise BadFile(Problem(file, what, f"Deploy it again from {event['source']}{otherwise}"))
        return file


def chosen(network: Path | None, deployed: bool, registry: Path) -> Path:
    """Returns the given network, or the deployed one; raises InputError if both or none are asked for."""
    if (network is not None) == deployed:
        raise InputError("give either --network FILE or --deployed")
    return network if network is not None else Registry(registry).deployed()


def _is_whole(event: dict[str, Any]) -> bool:
    """Returns whether an event can be replayed and shown; its SHA-256 becomes a path."""
    if (
        not isinstance(event.get("time"), int | float)
        or not 0 <= event["time"] < 1e11
        or event.get("event") not in (DEPLOY, ROLLBACK)
    ):
        return False
    if event["event"] == ROLLBACK:
        return True
    texts = all(_is_text(event.get(name)) for name in _TEXTS) and event.get("source") is not None
    return texts and re.fullmatch(r"[0-9a-f]{64}", str(event.get("sha256"))) is not None


def _is_text(value: Any) -> bool:
    return value is None or is_name(value, _LONGEST)
