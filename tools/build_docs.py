"""Builds the documentation as a site: the pages as they are, and a reference from docstrings. A warning is an error.

python tools/build_docs.py               into build/site/html
python tools/build_docs.py --out FOLDER

The pages are written for the repository, where their links lead to sources too. So what they link to is copied beside
them, in the same layout.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
FOLDERS = ("docs", "docker", "horovod_compress", "benchmarks", "examples", "tests", "tools", "csrc")
FILES = ("LICENSE", "CITATION.cff", "Makefile", "pyproject.toml", "setup.py", ".dockerignore")
SECTIONS = ("Getting started", "Running jobs", "Training", "The methods in detail", "Inside")
MODULES = ("torch", "errors", "timeline", "ops", "codecs.base")

_CONF = """\
project = "horovod-compress"
author = "The horovod-compress authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "horovod-compress"
myst_heading_anchors = 4
exclude_patterns = ["tests", "horovod_compress", "benchmarks", "examples", "tools", "csrc"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["cupy"]
# What is linked and is no page becomes a file to download.
suppress_warnings = ["myst.xref_ambiguous"]


def verbatim(app, what, name, obj, options, lines):
    # Docstrings are written for help(), whose columns reStructuredText would take apart.
    if lines:
        lines[:] = ["::", "", *(f"   {line}" for line in lines), ""]


def setup(app):
    app.connect("autodoc-process-docstring", verbatim)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the site; return Sphinx's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SITE / "html", help="folder of the site (default build/site/html)")
    out = parser.parse_args(arguments).out.resolve()
    source = SITE / "source"
    lay_out(source)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(source), str(out)]
    status = subprocess.run(command, check=False).returncode
    if status == 0:
        print(out / "index.html")
    return status


def lay_out(source: Path) -> None:
    """Copy the pages and what they link to, and write the settings, the index and the reference."""
    shutil.rmtree(source, ignore_errors=True)
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.pyc")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=unwanted)
    for path in [*(ROOT / name for name in FILES), *ROOT.glob("*.md")]:
        shutil.copy(path, source / path.name)
    for page in [*source.glob("*.md"), *source.glob("docs/*.md"), *source.glob("docker/*.md")]:
        page.write_text(without_folders(page.read_text(), page.parent))
    (source / "conf.py").write_text(f"import sys\n\nsys.path.insert(0, {str(ROOT)!r})\n{_CONF}")
    (source / "index.md").write_text(index((ROOT / "docs" / "README.md").read_text()))
    (source / "reference.md").write_text(reference())


def without_folders(text: str, base: Path) -> str:
    """Return a page in which links to folders, which a site cannot show, are plain text."""

    def shown(link: re.Match[str]) -> str:
        return link[1] if (base / link[2]).is_dir() else link[0]

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)#:]+)\)", shown, text)


def index(text: str) -> str:
    """Return the front page: the contents in the order of docs/README.md."""
    parts = ["# horovod-compress\n\nStart with [the overview](README.md).\n"]
    for section in SECTIONS:
        body = text.partition(f"## {section}\n")[2].partition("\n## ")[0]
        pages = [line.split("](")[1].split(")")[0] for line in body.splitlines() if line.startswith("| [")]
        entries = "\n".join(f"docs/{page}".replace("docs/../", "") for page in pages)
        parts.append(f"```{{toctree}}\n:caption: {section}\n:maxdepth: 1\n\n{entries}\n```\n")
    more = "README.md\ndocs/README.md\nreference.md\ndocker/README.md\nCHANGELOG.md\nSECURITY.md"
    parts.append(f"```{{toctree}}\n:caption: More\n:maxdepth: 1\n\n{more}\n```\n")
    return "\n".join(parts)


def reference() -> str:
    """Return the page that Sphinx fills from docstrings."""
    parts = ["# Reference\n\nFrom the docstrings; `help()` shows the same.\n"]
    for name in MODULES:
        directive = f".. automodule:: horovod_compress.{name}\n   :members:\n"
        parts.append(f"## horovod_compress.{name}\n\n```{{eval-rst}}\n{directive}```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
