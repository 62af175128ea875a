"""Runs inside the virtual environment: prints, as JSON, what is there and which requirements are not met.

Reads pyproject.toml, so that dependencies are written down once. Needs nothing but the environment's own pip, whose
copies of `packaging` and `tomli` spare us a chicken-and-egg installation.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import runpy
import sys
import sysconfig
from pathlib import Path

import pip
from pip._vendor.packaging.requirements import InvalidRequirement, Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def build_requirements(project: Path) -> list[str]:
    """What compiles and builds the package."""
    content = tomllib.loads(project.read_text(encoding="utf-8"))
    return list(content["build-system"]["requires"])


def wanted_requirements(project: Path, extras: list[str]) -> list[str]:
    """What builds the package, what it needs, and what the chosen extras add."""
    content = tomllib.loads(project.read_text(encoding="utf-8"))
    metadata, optional = content["project"], content["project"]["optional-dependencies"]
    if unknown := [name for name in extras if name not in optional]:
        sys.exit(f"unknown extras {', '.join(unknown)}: pyproject.toml has {', '.join(optional)}")
    chosen = [entry for name in extras for entry in optional[name]]
    return list(dict.fromkeys([*build_requirements(project), *metadata["dependencies"], *chosen]))


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda_of_torch() -> str | None:
    """The CUDA release that the installed torch was built with; read, because importing torch takes seconds."""
    found = importlib.util.find_spec("torch")
    written = Path(found.origin or "").parent / "version.py" if found else None
    return runpy.run_path(str(written)).get("cuda") if written and written.exists() else None


def is_met(text: str, extras: frozenset[str] = frozenset({""}), seen: set[str] | None = None) -> bool:
    """Whether a requirement is met by what is installed, and so are its own requirements, all the way down."""
    seen = set() if seen is None else seen
    requirement = Requirement(text)
    if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
        return True
    if str(requirement) in seen:
        return True
    seen.add(str(requirement))
    version = installed_version(requirement.name)
    if version is None or not requirement.specifier.contains(version, prereleases=True):
        return False
    below = importlib.metadata.requires(requirement.name) or []
    return all(is_met(entry, frozenset({"", *requirement.extras}), seen) for entry in below)


def is_judged_by_version(text: str) -> bool:
    """False for paths and addresses, which a version says nothing about."""
    try:
        return Requirement(text).url is None
    except InvalidRequirement:
        return False


def unmet(requirements: list[str], already_installed: str) -> list[str]:
    def is_installed(text: str) -> bool:
        return is_met(text) if is_judged_by_version(text) else text == already_installed

    return [text for text in requirements if not is_installed(text)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("project", type=Path, help="pyproject.toml")
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--also", action="append", default=[], help="another requirement")
    parser.add_argument("--already", default="", help="a path or address that was installed as it stands")
    arguments = parser.parse_args()
    requirements = [*arguments.also, *wanted_requirements(arguments.project, arguments.extra)]
    facts = {
        "python": list(sys.version_info[:2]),
        "abi": sysconfig.get_config_var("SOABI"),
        "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
        "include": sysconfig.get_path("include"),
        "pip": pip.__version__,
        "torch": installed_version("torch"),
        "torch_cuda": cuda_of_torch(),
        "horovod": installed_version("horovod"),
        "package": installed_version("horovod-compress"),
        "unmet": unmet(requirements, arguments.already),
        "tools": unmet(build_requirements(arguments.project), ""),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
