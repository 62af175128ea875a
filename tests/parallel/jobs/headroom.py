"""`hvd-compress headroom`, as users start it, with the arguments of the test."""

from __future__ import annotations

from horovod_compress.cli import command as cli
from tests.support import rank

rank.report({"status": cli.main(rank.arguments()["argv"])})
