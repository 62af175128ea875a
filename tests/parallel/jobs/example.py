"""Runs a script of the examples, with some of its text replaced to be short, and reports what it printed."""

from __future__ import annotations

import contextlib
import io
import sys

from tests.support import rank
from tests.support.jobs import ROOT

given = rank.arguments()
path = ROOT / "examples" / given["name"]
sys.argv = [str(path), *given["words"]]
sys.path.insert(0, str(path.parent))  # as Python has it for a script
code = path.read_text()
for old, new in given["instead"].items():
    assert old in code, f"{path.name} has no {old!r}"
    code = code.replace(old, new)
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    exec(compile(code, str(path), "exec"), {"__name__": "__main__"})
rank.report(printed.getvalue())
