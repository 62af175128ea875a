"""Which front a command uses: that of the launcher that has started it, else what is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from horovod_compress.cli import common

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, ""),
        ({"HOROVOD_RANK": "0"}, "horovodrun"),
        (TORCHRUN, "torchrun"),
        (TORCHRUN | {"HOROVOD_RANK": "0"}, "horovodrun"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ""),  # not all that torch.distributed needs
    ],
)
def test_a_rank_knows_its_launcher_by_its_environment(environment: dict[str, str], launcher: str) -> None:
    assert common.started_by(environment) == launcher


@pytest.mark.parametrize(
    ("asked", "under", "installed", "launcher"),
    [
        (None, "", True, "horovodrun"),
        (None, "", False, "torchrun"),
        (None, "torchrun", True, "torchrun"),
        ("horovodrun", "", False, "horovodrun"),
        ("torchrun", "", True, "torchrun"),
    ],
)
def test_what_is_asked_for_comes_first(
    asked: str | None, under: str, installed: bool, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> Any:
        if not installed:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return object()

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(common, "started_by", lambda: under)
    assert common.chosen_launcher(asked) == launcher


@pytest.mark.parametrize(
    ("launcher", "said"), [("horovodrun", "give --launcher torchrun"), ("torchrun", "pip install torch")]
)
def test_what_is_missing_is_said(launcher: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(common.importlib, "import_module", refuse)
    with pytest.raises(ImportError, match=said):
        common.module_of(launcher, "ranks")
