"""Faults in every phase of a job, on every path, with every collective; pairwise.

Whatever happens to rank 1, every other one ends by itself, in time, with an error, and none goes on with a tensor that
is wrong. A job without a fault, the control, ends well.
"""

from __future__ import annotations

import signal

import pytest

from tests.support.nursery import Nursery, Rank

from .pairs import pairs_of, pairwise_cells
from .survivors import aborted_by_horovod, blames

pytestmark = pytest.mark.slow

WORLD, VICTIM = 3, 1
TIMEOUT, LIMIT = 2.0, 5  # seconds: of an exchange, and of Horovod's own Gloo
SLEEP = 12.0
#: For the notes, and for a machine on which other work leaves a process a tenth of a processor. What fails here would
#: last without end.
SLACK, BOUND = 45.0, 90.0

COLUMNS = {
    "fault": ["kill", "stop", "raise", "term", "sleep", "drop", "flip"],
    "phase": ["start", "search", "first hop", "last hop", "between", "shutdown"],
    "path": ["stock", "attached", "update", "ddp", "ddp-update", "fsdp"],
    "exchange": ["ring", "fold", "gather"],
}
AT_THE_SEAM = ("drop", "flip")
HOPS = ("first hop", "last hop")
#: The last hop as the recorder has it, with three ranks.
LAST = {"ring": 3, "fold": 1, "gather": 1}
#: Frames that rank 1 has sent before: its step to both others, and then all but one of the first bucket's.
FRAMES = {"first hop": 2, "last hop": 5}


def fits(fault: str, phase: str, path: str, exchange: str) -> bool:
    """Return whether there is such a job: update mode searches nothing, and only exchanges have frames."""
    return not (path.endswith("update") and phase == "search") and (fault not in AT_THE_SEAM or phase in HOPS)


CELLS = pairwise_cells(COLUMNS, fits)


def options(phase: str, path: str, exchange: str) -> dict[str, object]:
    """Return the case without its fault."""
    method = "topk" if exchange == "gather" else "marsit"
    found = {"path": path, "method": method, "exchange": "auto" if exchange == "gather" else exchange}
    search = {"schedule": "mergecomp", "step": 3, "steps": 12} if phase == "search" else {}
    return {"catch": False, "timeout": TIMEOUT, "sleep": SLEEP, "victim": VICTIM} | found | search


def where(fault: str, phase: str, exchange: str) -> dict[str, object]:
    """Return where in the job the fault comes."""
    if fault in AT_THE_SEAM:
        return {"hop": FRAMES[phase]}
    if phase in HOPS:
        return {"event": "hop", "hop": 0 if phase == "first hop" else LAST[exchange]}
    return {"event": phase if phase in ("start", "shutdown") else "idle"}


def run(nursery: Nursery, fault: str, phase: str, path: str, exchange: str) -> list[Rank]:
    case = options(phase, path, exchange) | where(fault, phase, exchange) | {"fault": fault}
    gone = fault in ("kill", "stop", "term")
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(LIMIT)}
    return nursery.run(WORLD, "train.py", case, victims=[VICTIM] if gone else [], bound=BOUND, env=env)


@pytest.mark.parametrize(("fault", "phase", "path", "exchange"), CELLS)
def test_fault(nursery: Nursery, fault: str, phase: str, path: str, exchange: str) -> None:
    ranks = run(nursery, fault, phase, path, exchange)
    assert "fault" in ranks[VICTIM].marks, f"rank {VICTIM} was never harmed: {ranks[VICTIM].output}"
    at = float(ranks[VICTIM].marks["fault"])
    for rank in ranks:
        if rank.number == VICTIM or aborted_by_horovod(rank):
            continue
        assert rank.status is not None, f"rank {rank.number} did not end: {rank.output}"
        if phase == "shutdown":
            assert rank.at - at <= LIMIT + SLACK
            continue  # its work is done
        assert rank.status == 1 or ended_by_gloo(fault, rank), f"rank {rank.number}: {rank.status} {rank.output}"
        assert rank.at - at <= LIMIT + SLACK, f"rank {rank.number} ended {rank.at - at:.1f} s after the fault"
        assert "done" not in rank.marks, f"rank {rank.number} went on"
        check_text(fault, phase, rank)


def ended_by_gloo(fault: str, rank: Rank) -> bool:
    """Return whether torch's Gloo has ended the process, as it does where the next message is larger than the lost one.

    Its connections lose no messages; only this test's seam does.
    """
    return fault == "drop" and rank.status == -signal.SIGABRT and "gloo::EnforceNotMet" in rank.output


def check_text(fault: str, phase: str, rank: Rank) -> None:
    """Check that the error says what is known: which rank, or which frame."""
    if fault == "drop":  # every rank waits for another
        return
    text = rank.output[rank.output.rindex("horovod_compress.errors.") :]
    if fault == "flip":
        assert f"corrupt frame from rank {VICTIM}" in text, text
    elif phase == "start":
        assert f"Rank(s) {VICTIM} never came" in text, text
    else:
        assert blames(text, VICTIM) or f"Rank {VICTIM} stopped first" in text, text


@pytest.mark.parametrize("exchange", COLUMNS["exchange"])
@pytest.mark.parametrize("path", COLUMNS["path"])
@pytest.mark.parametrize("phase", ["search", "between"])
def test_control(nursery: Nursery, phase: str, path: str, exchange: str) -> None:
    if fits("none", phase, path, exchange):
        for rank in run(nursery, "none", phase, path, exchange):
            assert (rank.status, rank.output) == (0, "") and "done" in rank.marks, rank


def test_cells_cover_all_pairs() -> None:
    """Every two values that can meet do, and no cell is impossible."""
    met = set().union(*map(pairs_of, CELLS))
    for fault in COLUMNS["fault"]:
        for phase in COLUMNS["phase"]:
            possible = fits(fault, phase, "stock", "ring")
            assert (((0, fault), (1, phase)) in met) is possible
    assert all(fits(*cell) for cell in CELLS)
    assert len(CELLS) < len(COLUMNS["fault"]) * len(COLUMNS["phase"]) * 2
