"""README is short, names what there is, and leads to what it names; so do CONTRIBUTING and the pointer in provisioning/."""

import re
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from support.docs_pages import PAGES, ROOT, text_of

README = text_of("README.md")
OUTSIDE = [page for page in PAGES if not page.startswith("docs/")]  # mkdocs checks the links of the others
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_it_takes_two_screens():
    assert len(README.splitlines()) <= 125


def test_it_has_a_picture_and_the_two_commands():
    assert "```mermaid\n" in README
    assert all(f"```bash\n{command}\n```" in README for command in ("poc/run.sh", "tests/run.sh"))


@pytest.mark.parametrize("page", OUTSIDE)
def test_links_lead_somewhere(page):
    """Files of this repository, headings of Markdown files."""
    links = LINK.findall(text_of(page))
    assert links
    for link in links:
        if not link.startswith("https://"):
            name, _, anchor = link.partition("#")
            target = (ROOT / page).parent / name if name else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """As mkdocs names them, and GitHub: here they agree."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {slugify(heading.replace("`", ""), "-") for heading in headings}
