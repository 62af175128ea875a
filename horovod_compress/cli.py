"""The command line: `hvd-compress --check-build` and the verbs in horovod_compress/verbs."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

from horovod_compress import check_build, verbs

_JSON_HELP = "print one JSON document instead of text"


def verb_modules() -> dict[str, ModuleType]:
    """Every verb by its name on the command line; a file check_rate.py is the verb check-rate."""
    names = sorted(module.name for module in pkgutil.iter_modules(verbs.__path__) if not module.name.startswith("_"))
    return {name.replace("_", "-"): importlib.import_module(f"{verbs.__name__}.{name}") for name in names}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line, with every verb in it."""
    parser = argparse.ArgumentParser(prog="hvd-compress", description="Gradient compression for Horovod jobs.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {check_build.package_version()}")
    parser.add_argument("--check-build", "-cb", action="store_true", help="show what is available here, and exit")
    parser.add_argument("--json", action="store_true", help=_JSON_HELP)
    commands = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB")
    for name, module in verb_modules().items():
        _add_verb(commands, name, module)
    return parser


def _add_verb(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, module: ModuleType) -> None:
    description = (module.__doc__ or "").strip()
    # argparse formats help texts with %, which a docstring may well contain.
    summary = description.partition("\n")[0].replace("%", "%%")
    verb = commands.add_parser(
        name,
        help=summary,
        description=description.replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Without a default here, `hvd-compress --json list` keeps what the first parser saw.
    verb.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=_JSON_HELP)
    module.add_arguments(verb)
    verb.set_defaults(run=module.run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    run = check_build.run if parsed.check_build else getattr(parsed, "run", None)
    if run is None:
        parser.print_help()
        return 2
    try:
        status = int(run(parsed))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Python flushes once more when it ends: into nothing, then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
