"""Checks the links of all documents: files and headings must exist; addresses of other hosts are checked for form only.

python tools/check_links.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINKS = (
    re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)"),  # [text](target "title")
    re.compile(r"^ {0,3}\[[^\]^]+\]:\s*<?([^\s>]+)", re.MULTILINE),  # [name]: target
    re.compile(r"\b(?:src|href)=\"([^\"]+)\""),
    re.compile(r"<(https?://[^\s>]+)>"),
)
_NAMED = re.compile(r"\[[^\]]+\]\[([^\]]+)\]")
_DEFINED = re.compile(r"^ {0,3}\[([^\]^]+)\]:", re.MULTILINE)


def pages(root: Path = ROOT) -> list[Path]:
    """Return the documents of the project."""
    return sorted(page for pattern in ("*.md", "docs/*.md", "docker/*.md") for page in root.glob(pattern))


def prose(page: Path) -> str:
    """Return a page without its code."""
    return _CODE.sub("", _FENCE.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings as GitHub names them, and those set by hand."""
    text = _FENCE.sub("", page.read_text())
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*?)#*$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip())
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
    again = {f"{name}-{number}" for name, last in found.items() for number in range(1, last + 1)}
    return {*found, *again, *re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text)}


def problems(page: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield what is wrong with a page's links."""
    text = prose(page)
    for pattern in _LINKS:
        for target in pattern.findall(text):
            if reason := wrong(page, target, root):
                yield f"{target}: {reason}"
    defined = {name.lower() for name in _DEFINED.findall(text)}
    for name in _NAMED.findall(text):
        if name.lower() not in defined:
            yield f"[{name}]: not defined on this page"


def wrong(page: Path, target: str, root: Path = ROOT) -> str | None:
    """Return why a link leads nowhere, or None."""
    parts = urlsplit(target)
    if parts.scheme == "mailto":
        return None if "@" in parts.path else "no address"
    if parts.scheme:
        formed = parts.scheme in ("http", "https") and "." in parts.netloc
        return None if formed else "should be https://HOST/..., a file of the project or a heading"
    found = (page.parent / parts.path).resolve() if parts.path else page
    if not (found.exists() and found.is_relative_to(root)):
        return "no such file in the project"
    if parts.fragment and found.suffix == ".md" and parts.fragment not in anchors(found):
        return f"{found.name} has no such heading"
    return None


def main() -> int:
    """Print what is wrong, and return 1 if something is."""
    found = [f"{page.relative_to(ROOT)}: {problem}" for page in pages() for problem in problems(page)]
    print("\n".join(found) or f"all links of {len(pages())} pages lead somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
