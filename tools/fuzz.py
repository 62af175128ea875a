"""Feeds random bytes to the C++ that reads what other ranks send, under the address and undefined-behaviour sanitizers.

python tools/fuzz.py --seconds 180           every target for so long; what is new is kept in build/fuzz/corpus
python tools/fuzz.py --seconds 0             only the inputs of csrc/fuzz/corpus, once
python tools/fuzz.py golomb elias            these targets
CXX=clang++ python tools/fuzz.py             with clang's libFuzzer; with other compilers, with csrc/fuzz/engine.cpp

Golden payloads are where the search begins. An input that ends a target is a fault in the C++: mend it, and keep the
input in csrc/fuzz/corpus/TARGET.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "csrc" / "fuzz"
BUILD = ROOT / "build" / "fuzz"
KEPT = BUILD / "corpus"
GOLDEN = ROOT / "tests" / "golden" / "golden.json"
TARGETS = ("golomb", "values", "elias", "codes", "signs", "numbers", "checksums")
MOST_BYTES = 4096
DTYPES = ("float32", "float64", "float16", "bfloat16")
#: As csrc/rules/values.h numbers them.
FORMS = {"dgc": 0, "topk": 0, "stc": 3}
#: Of the tensors in the golden payloads.
COUNTS = (390, 5, 1)


def sections(payload: bytes) -> list[bytes]:
    """Return the sections of a gathered payload, which are behind a table of their lengths."""
    lengths = struct.unpack_from(f"<{len(COUNTS)}i", payload)
    found, at = [], 4 * len(COUNTS)
    for length in lengths:
        found.append(payload[at : at + length])
        at += length
    return found


def seeds(target: str) -> Iterator[tuple[str, bytes]]:
    """Return golden payloads as inputs of a target, behind the choices that it reads first."""
    for name, made in json.loads(GOLDEN.read_text())["payloads"].items():
        method = name.split()[0]
        for number, dtype in enumerate(DTYPES):
            payload = bytes.fromhex(made[dtype])
            for index, choices in enumerate(_choices(target, name, method, number)):
                body = sections(payload)[index] if target in ("golomb", "values", "elias") else payload
                yield f"{method}-{dtype}-{index}", (choices + body)[:MOST_BYTES]


def _choices(target: str, name: str, method: str, dtype: int) -> list[bytes]:
    """Return, for each tensor, the bytes that choose its dtype, its length and the like; none for other methods."""
    counts = [bytes([0, *count.to_bytes(2, "big")]) for count in COUNTS]
    if target == "golomb" and method == "sparse_binary":
        # dtype, a small parameter, a short tensor, one rank; nothing to write; no residual; no gradient of its own
        return [bytes([dtype, 0, 6]) + count + bytes([0, 1, 0, 0]) for count in counts]
    if target == "values" and method in FORMS:
        # As above, but with a residual; only full values ask whether there is momentum too.
        rest = bytes([0, 1, 1, 0, 0] if FORMS[method] == 0 else [0, 1, 1, 0])
        return [bytes([dtype, FORMS[method], 0, 6]) + count + rest for count in counts]
    if target == "elias" and "coding=elias" in name:
        bits = 2 if "bits=4" in name else 0
        return [bytes([dtype, 1, 0, bits, 1, 1]) + count[1:] + bytes([0, 1]) for count in counts]
    if target == "codes" and method in ("global_qsgd", "natural", "qsgd", "terngrad"):
        return [bytes([{"natural": 1, "qsgd": 2}.get(method, 0), dtype, 1, 134])]
    if target == "signs" and method in ("marsit", "signsgd", "signum", "onebit", "onebit_adam", "ef_signsgd"):
        return [bytes([{"onebit": 1, "onebit_adam": 4}.get(method, 0), dtype, 1, 134])]
    if target == "numbers" and method in ("sketch_fusion", "powersgd", "randomk", "none"):
        return [bytes([{"sketch_fusion": 0, "powersgd": 1, "randomk": 2}.get(method, 4), dtype])]
    return [bytes([0, 0, 0, 0])] if target == "checksums" and method == "none" else []


def build(targets: Sequence[str]) -> Path:
    """Compile what has changed; return the folder of the programs."""
    compiler = os.environ.get("CXX", "g++")
    jobs = str(len(os.sched_getaffinity(0)))
    subprocess.run(["make", "-s", "-j", jobs, "-C", SOURCES, f"CXX={compiler}", *targets], check=True)
    version = subprocess.run([*compiler.split(), "--version"], check=True, capture_output=True, text=True).stdout
    return BUILD / ("libfuzzer" if "clang" in version else "engine")


def run(program: Path, seconds: int) -> bool:
    """Run one target and say what came of it; return whether it is good."""
    kept, given = KEPT / program.name, BUILD / "seeds" / program.name
    for folder in (kept, given):
        folder.mkdir(parents=True, exist_ok=True)
    for name, data in seeds(program.name):
        (given / name).write_bytes(data)
    crash = BUILD / f"{program.name}-"
    folders = [str(path) for path in (kept, SOURCES / "corpus" / program.name, given) if path.exists()]
    limits = [f"-max_total_time={seconds}"] if seconds else ["-runs=0"]
    own = program.parent.name == "engine"
    more = [] if own else [f"-max_len={MOST_BYTES}", "-len_control=20", "-print_final_stats=1"]
    command = [str(program), *folders, *limits, f"-artifact_prefix={crash}", *more]
    found = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    output = found.stdout + found.stderr
    runs = re.findall(r"number_of_executed_units: *(\d+)|, (\d+) runs|Executed .* in", output)
    executed = max((int(number) for pair in runs for number in pair if number), default=0)
    print(f"{program.name}: {executed} executions, {'no fault' if found.returncode == 0 else 'A FAULT'}", flush=True)
    if found.returncode:
        print(output[-6000:], file=sys.stderr)
    return found.returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all, if none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target; 0 replays what is kept")
    options = parser.parse_args(arguments)
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"there is no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    targets = options.targets or list(TARGETS)
    folder = build(targets)
    good = [run(folder / target, options.seconds) for target in targets]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
