"""Plants known faults, one at a time, and reports which tests notice.

Run it after making the tests faster, or when you doubt them: a suite that lets one of these faults pass has lost
something. Every fault is planted in a copy of the tree, in build/mutate, and the tests of that copy run until the
first one fails: the files where one should, then all others. Without any fault all tests have to pass there: that is
the control, and it runs first.

    python tools/mutate.py                       every fault against `make test`: half an hour on two cores
    python tools/mutate.py --only ring           faults whose name contains a word
    python tools/mutate.py -- -m "not alone"      other arguments for pytest
    python tools/mutate.py --json FILE           one record a line; a second run goes on where the first one stopped

The exit status is 0 when every fault was noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "mutate"
CONTROL = "control"
PASSED, FAILED, INTERRUPTED, NO_TESTS = 0, 1, 2, 5  # pytest's exit statuses
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """One change that no correct program has: `old`, which occurs once in `file`, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    near: str  # where a test should notice

    @property
    def compiled(self) -> bool:
        return self.file.startswith("csrc/") and not self.file.startswith("csrc/cuda/")


FAULTS = (
    # ---- kernels ----
    Fault(
        "kernel: a merged bit comes from the wrong rank",
        "csrc/cpu/merge_body.h",
        "& random));",
        "& ~random));",
        "tests/property/test_marsit_laws.py",
    ),
    Fault(
        "kernel: zeros of a gradient are always positive",
        "csrc/cpu/sign_body.h",
        "kCoin ? mask_of<Test::greater>(x)",
        "kCoin ? mask_of<Test::greater_equal>(x)",
        "tests/kernels/test_sign.py",
    ),
    Fault(
        "kernel: what rounding took from a sparse value is lost",
        "csrc/cpu/values_body.h",
        "d.residual[at] -= d.decay * sent.values[i];",
        "d.residual[at] = 0;",
        "tests/kernels/test_values.py",
    ),
    Fault(
        "kernel: two words share their random numbers on CUDA",
        "csrc/cuda/merge.cu",
        "- d.word_offset + 1, random.odd",
        "- d.word_offset + 1, random.even",
        "tests/kernels/test_cuda.py",
    ),
    Fault(
        "kernel: a fold on CUDA leaves out the fifth rank",
        "csrc/cuda/kept_blocks.h",
        "if (part + i >= number) break;",
        "if (part + i >= min(number, kAtOnce)) break;",
        "tests/kernels/test_cuda.py",
    ),
    # ---- codecs ----
    Fault(
        "codec: a full-precision round comes one step late",
        "horovod_compress/codecs/marsit.py",
        "step % every == 0",
        "step % every == 1",
        "tests/property/test_marsit_laws.py tests/property/test_marsit_reference.py",
    ),
    Fault(
        "codec: a residual never fades",
        "horovod_compress/codecs/marsit.py",
        'self.residual_decay if self.compensation == "own" else 1.0',
        "1.0",
        "tests/property/test_marsit_laws.py tests/property/test_marsit_reference.py",
    ),
    Fault(
        "codec: ranks quantise on the smallest norm",
        "horovod_compress/codecs/shared/dithering.py",
        "torch.maximum(piece.values, other, out=piece.values)",
        "torch.minimum(piece.values, other, out=piece.values)",
        "tests/property/test_global_qsgd_laws.py",
    ),
    Fault(
        "codec: ranks side by side round alike",
        "horovod_compress/codecs/shared/rounding.py",
        "numbers.argsort(stable=True).argsort().tolist()",
        "list(range(world))",
        "tests/property/test_correlated_laws.py",
    ),
    Fault(
        "codec: errors are added up, not averaged",
        "horovod_compress/codecs/shared/averaging.py",
        "values.sub_(sent).mul_(1 - self.average.beta)",
        "values.sub_(sent)",
        "tests/property/test_loco_laws.py",
    ),
    Fault(
        "codec: an error feedback keeps its residual",
        "horovod_compress/codecs/shared/sections.py",
        "            residuals_of(work, positions),\n            scale,",
        "            None,\n            scale,",
        "tests/property/test_sparse_methods_laws.py",
    ),
    # ---- engine ----
    Fault(
        "engine: the memory of a gradient that was refused counts as offered",
        "horovod_compress/engine/reducer.py",
        "taken.get(at, index) != index",
        "taken.setdefault(at, index) != index",
        "tests/unit/test_steady_state.py",
    ),
    Fault(
        "exchange: merges of a ring count every rank once",
        "horovod_compress/exchange/ring.py",
        "(1, slot.hop + 1), slot.hop)",
        "(1, 1), slot.hop)",
        "tests/property/test_marsit_laws.py",
    ),
    Fault(
        "engine: buckets with NaN are decoded in parts",
        "horovod_compress/engine/bucket/round.py",
        "if chunk in self.parts and not bad.count:",
        "if chunk in self.parts:",
        "tests/battery/test_nonfinite.py tests/battery/test_parts.py",
    ),
    Fault(
        "engine: values that count as 0 are told to nobody",
        "horovod_compress/engine/context.py",
        "self._zeroed[position] += int(where.sum())",
        "self._zeroed[position] += 0",
        "tests/battery/test_nonfinite.py",
    ),
    Fault(
        "engine: parts are decoded before all of their chunks are there",
        "horovod_compress/engine/bucket/memory.py",
        "return _by_chunk(layout, work, order, max)",
        "return _by_chunk(layout, work, order, min)",
        "tests/battery/test_parts.py",
    ),
    Fault(
        "engine: only the last tensor of a bucket is verified",
        "horovod_compress/engine/comparison.py",
        "hash_of(grad for grad in state.grads if grad is not None)",
        "hash_of(grad for grad in state.memory.grads[-1:] if grad is not None)",
        "tests/unit/test_verifying.py",
    ),
    Fault(
        "engine: results of gradients that are not contiguous stay away",
        "horovod_compress/engine/turn.py",
        "taken.data_ptr() == grad.data_ptr()",
        "taken.data_ptr() != grad.data_ptr()",
        "tests/battery/test_dtypes.py",
    ),
    Fault(
        "engine: a bucket is taken in before other streams have its gradients",
        "horovod_compress/engine/turn.py",
        "device.follow(self._waiting.streams)",
        "device.follow({})",
        "tests/unit/test_waiting.py",
    ),
    Fault(
        "engine: memory of results that nobody fetched is given away",
        "horovod_compress/engine/turn.py",
        "state.device.keep([grad for grad in state.grads if grad is not None])",
        "state.device.keep([])",
        "tests/unit/test_waiting.py",
    ),
    Fault(
        "norms: gradients that a pass has filled are taken for results that were kept",
        "horovod_compress/engine/optimizer/matching.py",
        "        if self._before:\n",
        "        if not self._before:\n",
        "tests/unit/test_cleared.py",
    ),
    Fault(
        "front: what a rank has given up is an answer to one that comes late",
        "horovod_compress/fronts/gather.py",
        "        if all(seen for seen, _ in found):\n",
        "        if found:\n",
        "tests/unit/test_confirmed.py",
    ),
    Fault(
        "front: a rank has met the others when it has seen them, before they have seen it",
        "horovod_compress/fronts/torch_dist/store_gathers.py",
        "elif not (others := [rank for rank, one in enumerate(shown) if one[_TOKEN:] != mine]):",
        "elif not (others := []):",
        "tests/unit/test_gather_ends.py",
    ),
    Fault(
        "front: buckets are taken to lie as weights do now",
        "horovod_compress/fronts/torch_dist/wrapped.py",
        "            if self._changed(parameter) or (",
        "            if self._changed(parameter) and (",
        "tests/parallel/test_plain.py",
    ),
    Fault(
        "norms: the last elements of results are in nobody's share",
        "horovod_compress/engine/norms.py",
        "end = number if rank + 1 == world else",
        "end =",
        "tests/unit/test_norms.py",
    ),
    Fault(
        "norms: clipping does not see what a spike has left in residuals",
        "horovod_compress/engine/usual.py",
        "max(ratio, self.ratio / BELOW) if large else ratio",
        "ratio",
        "tests/unit/test_ratio.py",
    ),
    Fault(
        "held: where b2 is small, V forgets nearly all in one exact round",
        "horovod_compress/engine/optimizer/held.py",
        "moments.counted(self._form.betas(group)[1], steps)",
        "steps",
        "tests/property/test_held_laws.py",
    ),
    Fault(
        "held: nothing stands in for V in rows that begin between two exact rounds",
        "horovod_compress/engine/optimizer/rare_rows.py",
        "_finite(own.moment)",
        "_finite(own.moment.zero_())",
        "tests/property/test_late_rows_laws.py",
    ),
    Fault(
        "held: where a state lacks what stood in, nothing of earlier gradients does",
        "horovod_compress/engine/optimizer/rare_rows.py",
        "if first is not None and steps and",
        "if False and",
        "tests/property/test_late_rows_laws.py",
    ),
    Fault(
        "update mode: nothing stands in for V where it moves before a rank has a state",
        "horovod_compress/engine/optimizer/update_moment.py",
        "held.stand_in = None  #",
        "pass  #",
        "tests/property/test_late_rows_laws.py",
    ),
    Fault(
        "held: nothing stands in for V in rows that it has forgotten",
        "horovod_compress/engine/optimizer/rare_rows.py",
        "held.usual_floor() * RARE",
        "held.usual_floor() * 0",
        "tests/property/test_late_rows_laws.py",
    ),
    Fault(
        "held: nothing stands in for V in rows that it has just forgotten",
        "horovod_compress/engine/optimizer/rare_rows.py",
        "if held.stand_in is None or held.moved:",
        "if held.stand_in is None:",
        "tests/property/test_late_rows_laws.py",
    ),
    Fault(
        "held: rows that are small in all steps are taken for rare ones",
        "horovod_compress/engine/optimizer/second_moment.py",
        "self.stand_in > self.surpassed",
        "self.stand_in > 0",
        "tests/property/test_late_rows_laws.py",
    ),
    Fault(
        "held: a row of which V is small is divided by almost nothing before it is encoded",
        "horovod_compress/engine/optimizer/held_moment.py",
        "torch.maximum(self.floor, self.usual_floor() * (CODE_FLOOR / moments.FLOOR) ** 2)",
        "self.floor",
        "tests/property/test_late_rows_laws.py",
    ),
    Fault(
        "withheld: what is rounded off is kept where nothing waits, until a resume forgets it",
        "horovod_compress/engine/bucket/withheld.py",
        "left = kept.nonzero().view(-1)",
        "left = torch.arange(kept.numel())",
        "tests/property/test_zero_laws.py",
    ),
    Fault(
        "withheld: what waits beside a gradient that counts as zero is dropped once its element is coded",
        "horovod_compress/engine/bucket/withheld.py",
        "torch.where(good, rest, some.kept)",
        "torch.where(good, rest, 0.0)",
        "tests/property/test_zero_laws.py",
    ),
    Fault(
        "withheld: of what waits, what 16 bits cannot hold is dropped once its element is coded",
        "horovod_compress/engine/bucket/withheld.py",
        "(total.clamp(-most, most) if drops else sent)",
        "(total if drops else sent)",
        "tests/property/test_zero_laws.py",
    ),
    Fault(
        "withholding: what was kept for elements that are withheld from now on stays with their method",
        "horovod_compress/engine/withholding.py",
        "self.withheld.add(self.position, index, self._emptied(index))",
        "pass",
        "tests/property/test_zero_laws.py",
    ),
    Fault(
        "spikes: what a spike has left in residuals is not clipped with it",
        "horovod_compress/engine/optimizer/spikes.py",
        "* (self._scale() or 1.0) / self._reducer.result_scale",
        "* math.inf",
        "tests/unit/test_spikes.py",
    ),
    Fault(
        "spikes: an optimizer of which nothing waits has it clipped",
        "horovod_compress/engine/optimizer/spikes.py",
        "(excess := self._norms.excess) and (mine & coded or not excess.unused & coded)",
        "self._norms.excess",
        "tests/unit/test_spikes.py",
    ),
    Fault(
        "failure: notes of ranks that have ended are waited for",
        "horovod_compress/exchange/transports/gloo.py",
        "due -= gone | set(found)",
        "due -= set(found)",
        "tests/faults/test_connections.py",
    ),
    Fault(
        "failure: forks of a rank keep its connections",
        "horovod_compress/exchange/transports/sockets.py",
        "os.register_at_fork(after_in_child=_leave_all)",
        "",
        "tests/unit/test_sockets.py",
    ),
    Fault(
        "failure: a rank that ends resets connections on which data are on their way",
        "horovod_compress/exchange/transports/sockets.py",
        "_system().shutdown(self._number, socket.SHUT_WR)",
        "self.end()",
        "tests/unit/test_sockets.py",
    ),
    Fault(
        "failure: a rank that ends as another has is blamed",
        "horovod_compress/engine/agreement/notes.py",
        "if not transport.said(_LEFT):",
        "if transport.rank not in transport.said(_LEFT):",
        "tests/unit/test_notes.py",
    ),
    Fault(
        "horovod: a rank trains alone where Horovod has no ranks",
        "horovod_compress/fronts/horovod/job.py",
        "return self.process_set is hvd.global_process_set or bool(",
        "return bool(",
        "tests/unit/test_horovod_job.py",
    ),
    Fault(
        "ops: a gradient that became shorter is not looked at again",
        "horovod_compress/ops/dispatch.py",
        "and list(map(_COUNT, arrays)) == self._counts",
        "",
        "tests/kernels/test_legality.py",
    ),
    Fault(
        "engine: a saved state is loaded without what is kept",
        "horovod_compress/engine/saved/checkpoint.py",
        'None if residuals == "reset" else state["state"]',
        "None",
        "tests/battery/test_checkpoint.py",
    ),
    Fault(
        "engine: the last rank's options are not compared",
        "horovod_compress/engine/agreement/handshake.py",
        "for document in documents]\n        if any",
        "for document in documents[:-1]]\n        if any",
        "tests/parallel/test_handshake.py",
    ),
    Fault(
        "engine: hops draw the same random numbers",
        "horovod_compress/ops/keys.py",
        "self.purpose << 28 | self.hop << 8",
        "self.purpose << 28",
        "tests/property/test_marsit_laws.py tests/battery/test_round_trip.py",
    ),
    Fault(
        "engine: what waits keeps its numbers when its units change",
        "horovod_compress/engine/optimizer/held.py",
        "note_units(factors, name, before, held.divisor)",
        "note_units(factors, name, before, before)",
        "tests/property/test_held_laws.py",
    ),
    Fault(
        "engine: what is held takes in the elements of a surge, with the errors of their code",
        "horovod_compress/engine/optimizer/held.py",
        "if self._all_exact else held.like(grad)",
        "if True else held.like(grad)",
        "tests/property/test_held_laws.py",
    ),
    Fault(
        "engine: what waited of an element counts in V for every step since the last exact round",
        "horovod_compress/engine/optimizer/held.py",
        "held.once(grad, counts) if",
        "grad if",
        "tests/property/test_zero_laws.py",
    ),
    Fault(
        "engine: the last ones of the exact rounds do for all that begin",
        "horovod_compress/engine/optimizer/beginnings.py",
        "(few - 1) // 2 if ends else few",
        "0 if ends else few",
        "tests/property/test_beginnings_laws.py",
    ),
    Fault(
        "several optimizers: a resume lets all have an exact round due where one has",
        "horovod_compress/engine/optimizer/taker.py",
        'due = due and not any("due" in mine for mine in left.values())',
        "due = bool(due)",
        "tests/property/test_several_optimizers.py",
    ),
    Fault(
        "engine: a result is a surge, however usual",
        "horovod_compress/engine/optimizer/surges.py",
        "TIMES**2 * max(usual, size)",
        "TIMES**2 * size",
        "tests/unit/test_surges.py",
    ),
    Fault(
        "engine: a surge that comes first is usual",
        "horovod_compress/engine/optimizer/surges.py",
        "(min(square, FIRST**2 * size) if size else square)",
        "square",
        "tests/unit/test_surges.py",
    ),
    Fault(
        "engine: RMSprop's bias is forgotten in the bound",
        "horovod_compress/engine/optimizer/family.py",
        'decay="alpha", unbiased=False)',
        'decay="alpha")',
        "tests/unit/test_family.py",
    ),
    Fault(
        "engine: what was frozen at first is taken for exchanged",
        "horovod_compress/fronts/steps.py",
        " for name, parameter in given if name in exchanged]",
        " for name, parameter in given]",
        "tests/parallel/test_optimizers.py",
    ),
    Fault(
        "engine: exact rounds wait for an optimizer that makes no step",
        "horovod_compress/engine/optimizer/held.py",
        "awaited = [held for held in several if not held.rests(step)] or several",
        "awaited = several",
        "tests/property/test_several_optimizers.py",
    ),
    Fault(
        "engine: a saved plan is compared with that of the shares of a host",
        "horovod_compress/engine/saved/checkpoint.py",
        '_expect("plan", plan.fingerprint(),',
        '_expect("plan", parts.shares(plan).fingerprint(),',
        "tests/unit/test_shares.py",
    ),
    Fault(
        "engine: a rank empties momentum in its own share only",
        "horovod_compress/engine/bucket/shares.py",
        "in self._momenta.get(position, ()):",
        "in self._momenta.get(position, ()) if place == self._place else ():",
        "tests/battery/test_hosts.py",
    ),
    Fault(
        "engine: saved scales of codes may be anything",
        "horovod_compress/engine/saved/checkpoint.py",
        "_refuse_spoilt(moves.spoilt(codes, withheld.MOST),",
        "_refuse_spoilt(0,",
        "tests/property/test_loco_laws.py",
    ),
    Fault(
        "engine: a saved residual may be NaN",
        "horovod_compress/engine/saved/checkpoint.py",
        "_refuse_spoilt(withheld.count(theirs[name]),",
        "_refuse_spoilt(0,",
        "tests/battery/test_checkpoint.py",
    ),
    Fault(
        "engine: results of withheld elements are what the code makes of them",
        "horovod_compress/engine/bucket/withheld.py",
        "result.index_fill_(0, index, 0)",
        "result.index_fill_(0, index[:0], 0)",
        "tests/property/test_zero_laws.py",
    ),
    Fault(
        "engine: what waits for a withheld element is forgotten",
        "horovod_compress/engine/bucket/withheld.py",
        "some.kept, some.next = some.next, some.kept",
        "some.kept.zero_()",
        "tests/property/test_zero_laws.py",
    ),
    Fault(
        "codecs: means count withheld elements",
        "horovod_compress/codecs/shared/signs.py",
        "return (sizes.double() / (sizes - counts).clamp_(min=1)).float()",
        "return (sizes.double() / sizes.clamp_(min=1)).float()",
        "tests/property/test_zero_laws.py",
    ),
    # ---- exchange ----
    Fault(
        "exchange: the ring says a payload holds one rank more",
        "horovod_compress/exchange/ring.py",
        "(1, slot.hop + 1), slot.hop)",
        "(1, slot.hop + 2), slot.hop)",
        "tests/unit/test_nccl.py",
    ),
    Fault(
        "exchange: columns of a torus merge as if their payloads were of one rank",
        "horovod_compress/exchange/torus.py",
        "weights = (self.columns, (hop + 1) * self.columns)",
        "weights = (1, hop + 1)",
        "tests/property/test_shaped_laws.py",
    ),
    Fault(
        "exchange: the ring forgets its own NaN",
        "horovod_compress/exchange/ring.py",
        "self._x.bad.plus(bad) if phase == REDUCE else bad",
        "bad",
        "tests/battery/test_nonfinite.py",
    ),
    Fault(
        "exchange: gathered payloads are not in rank order",
        "horovod_compress/exchange/all_gatherv.py",
        "[payloads[rank] for rank in range(len(sizes))]",
        "[payloads[rank] for rank in payloads]",
        "tests/property/test_sign_methods_laws.py tests/battery/test_round_trip.py",
    ),
    Fault(
        "exchange: a wrong checksum is accepted",
        "horovod_compress/exchange/wire.py",
        '        _field("checksum", crc, _CRC.unpack_from(self._bytes, _CRC_AT)[0], due)\n',
        "",
        "tests/unit/test_wire.py",
    ),
    Fault(
        "exchange: the owner of a chunk folds in the order of arrival",
        "horovod_compress/exchange/fold.py",
        "self._peers = [rank for rank in range(world) if rank != self._rank]",
        "self._peers = _after(self._rank, world)",
        "tests/unit/test_nccl.py",
    ),
    Fault(
        "exchange: every wait has the whole time",
        "horovod_compress/exchange/device.py",
        "return max(0.0, self._end - time.monotonic())",
        "return self.seconds",
        "tests/unit/test_deadline.py",
    ),
    # ---- the optimizer ----
    Fault(
        "gmc: what waits does not follow the learning rate",
        "horovod_compress/engine/optimizer/momentum.py",
        "if follow_lr or name in goes_on]",
        "if follow_lr]",
        "tests/property/test_global_momentum_laws.py",
    ),
    Fault(
        "several optimizers: one takes a sum of exact and coded results for exact",
        "horovod_compress/engine/optimizer/held.py",
        "self._all_exact = exact and (self._all_exact or not self.unused(step))",
        "self._all_exact = exact",
        "tests/property/test_several_optimizers.py",
    ),
    # ---- fronts ----
    Fault(
        "front: an attach() after a refused one registers its hooks again",
        "horovod_compress/fronts/horovod/compression.py",
        "if not steps.met and not any(optimizer is other for other in self._watched):",
        "if not steps.met:",
        "tests/parallel/test_usage.py",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    chosen = [fault for fault in FAULTS if options.only in fault.name]
    known = _known(options.json)
    _copy_tree()
    build()
    records = [known.get(CONTROL) or _report(_measure(CONTROL, options), options)]
    for fault in chosen:
        record = known.get(fault.name)
        if record is None:
            with planted(fault):
                record = _report(_measure(fault.name, options, fault.near), options)
        records.append(record)
    control, *others = records
    passed = [record["fault"] for record in others if record["noticed_by"] is None]
    if control["noticed_by"]:
        print(f"the control failed without any fault: {control['noticed_by']}")
    print(
        f"{len(others) - len(passed)} of {len(others)} faults noticed" + "".join(f"\n  not: {name}" for name in passed)
    )
    return 1 if passed or control["noticed_by"] else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--json", type=Path, help="append records to this file, and skip those it has")
    parser.add_argument("pytest", nargs="*", default=["-m", "not slow"], help='pytest\'s arguments, after "--"')
    return parser.parse_args(arguments)


@contextmanager
def planted(fault: Fault, tree: Path = COPY) -> Iterator[None]:
    """Plant a fault in a copy of the tree, compiled where it has to be, and take it out again."""
    path = tree / fault.file
    healthy = path.read_text()
    path.write_text(sick(fault, healthy))
    try:
        if fault.compiled:
            build(tree)
        yield
    finally:
        path.write_text(healthy)
        if fault.compiled:
            build(tree)


def sick(fault: Fault, healthy: str) -> str:
    """Return a file's text with the fault.

    Raises:
        ValueError: the line is not there, or not only once: the table of faults is older than the file.
    """
    if (found := healthy.count(fault.old)) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has {fault.old!r} {found} times, once was expected")
    return healthy.replace(fault.old, fault.new)


def build(tree: Path = COPY) -> None:
    """Compile the CPU kernels of a tree; objects whose sources did not change are kept."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    environment = os.environ | {"HVC_CUDA": "0"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tree} does not compile:\n{done.stderr[-2000:]}")


def _copy_tree() -> None:
    """Bring the copy up to date; what was built there stays, and a file that is gone here goes there too."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = set(filter(None, listed.split("\0")))
    for folder in ("horovod_compress", "tests", "csrc", "tools", "benchmarks", "examples"):
        for path in (COPY / folder).rglob("*.*"):
            if path.is_file() and path.suffix not in (".so", ".pyc") and str(path.relative_to(COPY)) not in names:
                path.unlink()
    for name in sorted(names):
        source, target = ROOT / name, COPY / name
        if source.exists() and not (target.exists() and target.read_bytes() == source.read_bytes()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def _measure(name: str, options: argparse.Namespace, near: str = "") -> dict[str, Any]:
    """Run the copy's tests until one fails."""
    began = time.monotonic()
    noticed = (_failed_of([*options.pytest, *near.split()]) if near else None) or _failed_of(options.pytest)
    return {"fault": name, "noticed_by": noticed, "seconds": round(time.monotonic() - began, 1)}


def _failed_of(arguments: Sequence[str]) -> str | None:
    """Return the first of the copy's tests that fails, if any."""
    # That file looks for each fault's line, and would notice by that alone.
    leave_out = "--ignore=tests/unit/test_mutate.py"
    command = [sys.executable, "tools/run_tests.py", "-x", "-q", "--no-header", leave_out, *arguments]
    done = subprocess.run(command, cwd=COPY, capture_output=True, text=True, check=False)
    failed = _FAILED.findall(done.stdout)
    # With several workers pytest ends as interrupted where -x stops it.
    if done.returncode not in (PASSED, FAILED, NO_TESTS) and not (done.returncode == INTERRUPTED and failed):
        raise SystemExit(f"the tests did not run: status {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    return (failed[0] if failed else "a test that gave no name") if done.returncode in (FAILED, INTERRUPTED) else None


def _report(record: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    outcome = record["noticed_by"] or ("all tests pass" if record["fault"] == CONTROL else "NOT NOTICED")
    print(f"{record['seconds']:6.0f} s  {record['fault']}\n          {outcome}", flush=True)
    if options.json:
        with options.json.open("a") as file:
            file.write(json.dumps(record) + "\n")
    return record


def _known(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    return {record["fault"]: record for record in map(json.loads, path.read_text().splitlines())}


if __name__ == "__main__":
    sys.exit(main())
