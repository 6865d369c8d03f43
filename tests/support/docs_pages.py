"""README and docs as the tests read them: their blocks of code, and which test runs each.

A shell block is run by test_docs_commands.py, in the order of its page. Where that cannot be, a comment in the line above the
block says so: `<!-- run by tests/test_x.py -->`, `<!-- checked by tests/test_x.py -->` or `<!-- not run: why -->`.
"""

import re
from dataclasses import dataclass

from support import ROOT

DOCS = ROOT / "docs"
# the tables of results/<data set> are what `feddp compare` wrote
PAGES = ["README.md", "CONTRIBUTING.md", "provisioning/README.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md") if path.name != "tables.md")
SHELL = ("bash", "console")
_BLOCK = re.compile(r'(?:^<!-- ([^>]+) -->\n)?^```(\w+)(?: title="([^"]+)")?\n(.*?)\n^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the file that it is to be written to ("" if none), its text, who runs it."""

    page: str
    kind: str
    title: str
    text: str
    note: str

    @property
    def here(self) -> bool:
        """Whether test_docs_commands.py runs it."""
        return not self.note.startswith(("run by", "checked by", "not run:"))


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    found = (match.groups() for match in _BLOCK.finditer(text_of(page)))
    return [Block(page, kind, title or "", text, note or "") for note, kind, title, text in found]


def blocks_for(test: str, *pages: str) -> list[Block]:
    """The shell blocks of these pages that a file of tests runs."""
    return [block for page in pages for block in blocks(page) if block.kind in SHELL and f"/{test}.py" in block.note]


def commands_for(test: str, *pages: str) -> list[str]:
    """Their lines."""
    return [line for block in blocks_for(test, *pages) for line in block.text.splitlines()]
