"""Whether links of the README lead somewhere: ``python docs/site/links.py``.

MkDocs checks links between pages, and README.md is not one of these.
"""

import re
from pathlib import Path

from markdown import Markdown

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    return [link for link in LINK.findall(FENCE.sub("", page.read_text())) if not _leads(page, link)]


def _leads(page: Path, link: str) -> bool:
    if "://" in link:
        return True
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in _anchors(target))


def _anchors(page: Path) -> set[str]:
    reader = Markdown(extensions=["toc", "attr_list", "fenced_code"])
    return set(re.findall(r'id="([^"]+)"', reader.convert(page.read_text())))


def main() -> None:
    """Prints the links that lead nowhere; the exit code is 1 if there are any."""
    found = broken(ROOT / "README.md")
    for link in found:
        print(f"README.md links to {link}, which is not there.")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
