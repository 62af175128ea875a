"""The recipe for a kernel names files that exist, and all of those that one has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a kernel\n")[2]
#: Paths with a folder in front, in code.
FILES = sorted(set(re.findall(r"`(?:python )?((?:\w+/)+\w+\.\w+)`", RECIPE)))
FOLDERS = ("csrc", "horovod_compress/ops")
EXAMPLE = "norm_offer"
#: These hand it on, or use it for something else.
USERS = {"horovod_compress/ops/sparse.py", "csrc/fuzz/threads.cpp"}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_recipe_exists(name: str) -> None:
    assert (ROOT / name).is_file()


def test_the_recipe_lists_every_file_of_its_example() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    texts = {path: path.read_text() for path in paths if path.suffix in (".h", ".cpp", ".cu", ".py")}
    having = {str(path.relative_to(ROOT)) for path, text in texts.items() if re.search(rf"\b{EXAMPLE}\b", text)}
    assert len(having) >= 7 and having - USERS <= set(FILES), having - USERS - set(FILES)


def test_a_kernel_takes_at_most_seven_files() -> None:
    assert 5 <= len(re.findall(r"^\| `", RECIPE, re.MULTILINE)) <= 7
