"""What `make lint` runs: hooks whose programs the extra `lint` brings, with nothing to be downloaded."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")  # Horovod needs it too

ROOT = Path(__file__).resolve().parents[2]
HOOKS = [
    (repository["repo"], hook)
    for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repository["hooks"]
]


def test_hooks_run_what_the_extra_brings() -> None:
    extra = re.search(r"^lint = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert extra
    brought = {*re.findall(r'"([\w-]+)', extra[1]), "python"}
    for repository, hook in HOOKS:
        assert repository == "local" and hook["language"] == "system", "it would be downloaded"
        programs = re.findall(r"\.venv/bin/([\w-]+)", hook["entry"])
        assert programs and set(programs) <= brought, hook["id"]
        assert all((ROOT / name).is_file() for name in re.findall(r"tools/\S+\.py", hook["entry"]))


def test_every_native_source_is_formatted() -> None:
    wanted = next(re.compile(hook["files"]) for _, hook in HOOKS if hook["id"] == "clang-format")
    found = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.suffix in (".c", ".h", ".cpp", ".cu")]
    ours = [str(path) for path in found if not path.parts[0].startswith((".", "build"))]
    assert ours and all(map(wanted.search, ours))


def test_without_a_checkout_lint_says_what_it_needs(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    command = ["make", "-o", "environment", "lint"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "needs git, and a checkout" in done.stderr
