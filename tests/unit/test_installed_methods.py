"""Methods of other packages: found by their entry points, loaded when asked for, and no danger to the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_compress.codecs import registry

METHOD = '''
"""The sign of a coin: half of the gradient, as plain numbers."""

from dataclasses import dataclass
from typing import ClassVar

from horovod_compress.codecs.base import Law, Properties
from horovod_compress.codecs.dense import Dense


@dataclass(frozen=True)
class Halved(Dense):
    """Half of the gradient.

    Args:
        share: what is sent.
    """

    share: float = 0.5
    name: ClassVar[str] = "halved"
    summary: ClassVar[str] = "half of it"

    def properties(self) -> Properties:
        return Properties(Law(bound="half of |x|"))

    def decode(self, work, parts, key, result_scale) -> None:
        super().decode(work, parts, key, result_scale * self.share)


class Other:
    name = "no_codec"
'''

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "other-methods"
version = "3.1"

[project.entry-points."horovod_compress.methods"]
halved = "other_methods:Halved"
broken = "other_methods_broken:Broken"
no_codec = "other_methods:Other"
renamed = "other_methods:Halved"
marsit = "other_methods:Halved"

[tool.setuptools]
py-modules = ["other_methods", "other_methods_broken"]
"""

USE = """
import json, sys, warnings
warnings.simplefilter("error")
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    import torch
    from horovod_compress.codecs import registry
    from horovod_compress.errors import ConfigError
    from tests.support.local import Fleet, spec
    names = registry.methods()
early = "other_methods" in sys.modules
def refused(name):
    try:
        registry.create(name)
    except ConfigError as error:
        return str(error)
with Fleet(2, [spec("a", 8)], "halved", share=0.25) as fleet:
    result = fleet.step([{"a": torch.ones(8)}, {"a": torch.full((8,), 3.0)}])[0]["a"].tolist()
import horovod_compress.ddp as hvc
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
alone = hvc.Compression.create("halved", [("a", torch.nn.Parameter(torch.ones(4)))])
marsit = registry.codec_class("marsit").__module__
errors = {name: refused(name) for name in ("broken", "no_codec", "renamed", "halvd")}
said = [str(one.message) for one in warned]
print(json.dumps([names, early, result, errors, marsit, said, "halved" in hvc.available(), type(alone).__name__]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install a package with pip, and return an environment that has it."""
    project, target = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("target")
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "other_methods.py").write_text(METHOD)
    (project / "other_methods_broken.py").write_text("raise RuntimeError('it needs a newer torch')\n")
    options = ["--no-index", "--no-build-isolation", "--no-deps", "--quiet", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(project)], check=True, timeout=100)
    root = Path(__file__).resolve().parents[2]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(target)])}


@pytest.mark.slow
def test_a_method_of_another_package(installed: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", USE], env=installed, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    names, early, result, errors, marsit, warned, offered, kind = json.loads(done.stdout)
    usual = registry.built_in()
    assert names[: len(usual)] == usual and set(names[len(usual) :]) == {"halved", "broken", "no_codec", "renamed"}
    assert not early and offered and result == [0.5] * 8 and kind == "Compression"
    assert marsit == "horovod_compress.codecs.marsit"
    assert warned == ["other-methods 3.1 offers a method 'marsit'; that of horovod-compress is used"]
    start = "the method 'broken' of the package other-methods 3.1 cannot be used: "
    assert errors["broken"].startswith(start) and "RuntimeError: it needs a newer torch" in errors["broken"]
    assert "other-methods 3.1" in errors["no_codec"] and "should be a class derived from" in errors["no_codec"]
    assert "other-methods 3.1" in errors["renamed"] and "has the name 'halved'" in errors["renamed"]
    assert "unknown method 'halvd'" in errors["halvd"] and "halved" in errors["halvd"]


def test_the_list_has_it_and_says_what_is_broken(installed: dict[str, str]) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "horovod_compress.cli", "list", "--json"]
    done = subprocess.run(command, env=installed, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    names = [one["method"] for one in json.loads(done.stdout)["methods"]]
    assert "halved" in names and "marsit" in names and "broken" not in names
    assert done.stderr.count("other-methods 3.1") == 3
