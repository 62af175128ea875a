"""The site of the documentation: which pages it has, and that its links can be followed there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import build_docs
import check_links

ROOT = Path(__file__).resolve().parents[2]


def test_the_contents_are_those_of_the_index() -> None:
    shown = build_docs.index((ROOT / "docs" / "README.md").read_text())
    listed = {page for page in shown.splitlines() if page.endswith(".md")}
    pages = {str(page.relative_to(ROOT)) for page in check_links.pages()}
    assert listed - {"reference.md"} == pages - {"CONTRIBUTING.md"} | ({"CONTRIBUTING.md"} & listed)


def test_the_layout_is_the_repositorys(tmp_path: Path) -> None:
    build_docs.lay_out(tmp_path)
    assert not [problem for page in check_links.pages(tmp_path) for problem in check_links.problems(page, tmp_path)]


def test_the_reference_names_modules_that_exist() -> None:
    named = re.findall(r"automodule:: horovod_compress\.(\S+)", build_docs.reference())
    assert named == list(build_docs.MODULES)
    for name in named:
        path = ROOT / "horovod_compress" / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name)
    subprocess.run([sys.executable, build_docs.__file__, "--out", str(tmp_path)], check=True, timeout=500)
    assert "marsit" in (tmp_path / "reference.html").read_text()
