"""The command line: `hvd-compress --check-build` and the verbs.

A verb is a module beside this one. It has

- a docstring, whose first line is the help text of the verb;
- `add_arguments(parser)`, which declares its options (`--json` is already there);
- `run(arguments) -> int`, which returns the exit status and honours `arguments.json`.

Heavy imports such as torch belong inside `run`: every start of the command imports all of these modules.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from . import check_build, common

#: Their modules; check_rate would be the verb check-rate.
VERBS = ("bench", "build_horovod", "headroom", "inspect", "list", "plan", "verify")

_JSON_HELP = "print JSON instead of text: one document, or one a line with bench"
_OPTIONAL = ("torch", "horovod", "psutil", "matplotlib")  # not every verb needs them
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line, with every verb in it."""
    parser = argparse.ArgumentParser(
        prog="hvd-compress",
        description="Gradient compression for PyTorch's DistributedDataParallel (DDP) and for Horovod.",
    )
    parser.add_argument("--version", action="store_true", help="show the version, and exit")
    parser.add_argument("--check-build", "-cb", action="store_true", help="show what works here, and exit")
    parser.add_argument("--json", action="store_true", help=_JSON_HELP)
    commands = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB")
    for name in VERBS:
        _add_verb(commands, name.replace("_", "-"), importlib.import_module(f"{__package__}.{name}"))
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
    verb.set_defaults(run=module.run, usage=verb)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    if sys.stdout is None:  # the shell closed it: >&-
        return _failed("standard output is closed; remove >&-, or redirect it to a file")
    try:
        try:
            with common.ended_in_order():
                return _run(arguments)
        finally:  # --help ends with SystemExit
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _drop_output()
        return 1
    except OSError as error:
        if error.filename is not None:
            return _failed(f"{error.filename}: {error.strerror}")
        if error.errno not in _OUTPUT_ERRORS:
            raise
        _drop_output()
        return _failed(f"the output cannot be written: {error.strerror}")
    except KeyboardInterrupt:
        return 130  # as a shell reports an interrupt


def _run(arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:  # the usage that helps is the verb's; parse_args() shows that of the whole
        getattr(parsed, "usage", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    for alone in ("--check-build", "--version"):
        if getattr(parsed, alone[2:].replace("-", "_")) and parsed.verb:
            parser.error(f"{alone} is a command of its own: leave out {parsed.verb}, or {alone}")
    if parsed.version:
        print(f"{parser.prog} {check_build.package_version()}")
        return 0
    run = check_build.run if parsed.check_build else getattr(parsed, "run", None)
    if run is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return int(run(parsed))
    except ValueError as error:  # a wrong HVC_ISA, say
        from ..errors import ConfigError  # not earlier: it looks for Horovod

        if not isinstance(error, ConfigError):
            raise
        return common.refuse(parsed.verb, str(error))
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if error.name in common.KERNELS:
            return _failed(f"{parsed.verb} needs the kernels: {error}")
        if package not in _OPTIONAL or not isinstance(error, ModuleNotFoundError):
            raise
        return _failed(f"{parsed.verb} needs {package}: {error}; hvd-compress --check-build shows what works here")


def _failed(problem: str) -> int:
    with contextlib.suppress(OSError):
        print(f"hvd-compress: {problem}", file=sys.stderr)
    return 1


def _drop_output() -> None:
    """Let what is still to be written go nowhere: Python writes it when it ends, and would report the error again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
