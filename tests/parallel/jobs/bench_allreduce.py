"""The all-reduce benchmark's job, as users start it, with the arguments of the test."""

from __future__ import annotations

from benchmarks.jobs.allreduce import main
from tests.support import rank

rank.report({"status": main(rank.arguments()["argv"])})
