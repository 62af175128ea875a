"""The fuzz targets find nothing in what is kept for them, and both parts of the fuzzer can find something."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fuzz
from tests.golden import cases

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")

#: Reads a byte too many once it has been given three letters; a law of its own does not hold for a fourth.
PLANTED = """
#include "fuzz/input.h"
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  hvc::fuzz::Input in(data, size);
  if (in.byte() != 'h' || in.byte() != 'v') return 0;
  const uint8_t third = in.byte();
  const hvc::fuzz::Bytes rest = in.bytes(in.left());
  hvc::fuzz::require(third != 'x', "there is no x");
  static volatile uint8_t seen;
  if (third == 'c') seen = rest.get()[rest.size];
  return 0;
}
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_is_kept_is_no_fault() -> None:
    """Golden payloads, and inputs that once were faults."""
    command = [sys.executable, fuzz.ROOT / "tools" / "fuzz.py", "--seconds", "0"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.count("no fault") == len(fuzz.TARGETS)


def test_every_target_is_linked_with_the_kernels_that_it_calls() -> None:
    """Linking all of them with sanitizers takes a quarter of an hour, so nobody notices soon that it fails."""
    csrc, makefile = fuzz.SOURCES.parent, (fuzz.SOURCES / "Makefile").read_text()
    start = r"^\w[\w:<>*&, ]*?\b"  # of a declaration or a definition
    declared = re.findall(rf"{start}(\w+)\(", (csrc / "kernels.h").read_text(), re.MULTILINE)
    sources = {path.stem: path.read_text() for path in (csrc / "cpu").glob("*.cpp")}
    home = {
        kernel: stem
        for kernel in declared
        for stem, text in sources.items()
        if re.search(rf"{start}{kernel}\(", text, re.MULTILINE)
    }
    assert len(home) == len(set(declared)) > 50
    for target in fuzz.TARGETS:
        found = re.search(rf"^{target} := (.*)$", makefile, re.MULTILINE)
        assert found
        text = (fuzz.SOURCES / f"{target}.cpp").read_text()
        called = {stem for kernel, stem in home.items() if re.search(rf"\b{kernel}\(", text)}
        assert called and not called - set(found[1].split()), f"the Makefile links {target} without these"


@pytest.mark.parametrize("name", [*fuzz.TARGETS, "threads"])
def test_every_program_fits_the_kernels(name: str) -> None:
    """As the last one: a kernel with another argument is noticed before they are built."""
    check = [COMPILER, "-fsyntax-only", "-std=c++17", f"-I{fuzz.SOURCES.parent}", fuzz.SOURCES / f"{name}.cpp"]
    assert subprocess.run(check, check=False).returncode == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gone.h", "gone.cpp"])
def test_a_header_that_is_gone_since_the_last_build_is_no_obstacle(tmp_path: Path, name: str) -> None:
    """A source that is gone is one: the control."""
    shutil.copytree(fuzz.SOURCES, tmp_path / "csrc" / "fuzz")
    shutil.copytree(fuzz.ROOT / "csrc" / "cpu", tmp_path / "csrc" / "cpu")
    built = tmp_path / "build" / "fuzz" / "engine"
    built.mkdir(parents=True)
    (built / "target-golomb.d").write_text(f"{built}/target-golomb.o: {tmp_path}/csrc/rules/{name}\n")
    command = ["make", "--dry-run", "-C", tmp_path / "csrc" / "fuzz", "CXX=g++", "golomb"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (name == "gone.h"), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("letter", ["c", "x"])
def test_the_engine_finds_what_was_planted(tmp_path: Path, letter: str) -> None:
    """An overrun by the sanitizer, a broken law by itself; it learns letter by letter, and keeps the input."""
    program, source, corpus = tmp_path / "planted", tmp_path / "planted.cpp", tmp_path / "corpus"
    # Only one of the two.
    gone, by = ("third == 'c'", "false") if letter == "x" else ("third != 'x'", "true")
    source.write_text(PLANTED.replace(gone, by))
    flags = ["-O1", "-std=c++17", f"-I{fuzz.ROOT / 'csrc'}", "-fsanitize=address"]
    for path, more in ((source, ["-fsanitize-coverage=trace-pc"]), (fuzz.SOURCES / "engine.cpp", [])):
        subprocess.run(["g++", *flags, *more, "-c", path, "-o", tmp_path / f"{path.stem}.o"], check=True)
    objects = [tmp_path / "planted.o", tmp_path / "engine.o"]
    subprocess.run(["g++", "-fsanitize=address", *objects, "-o", program], check=True)
    corpus.mkdir()

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [program, corpus, *more, f"-artifact_prefix={tmp_path}/"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    (corpus / "seed").write_bytes(b"hv")
    control = run("-runs=0")
    assert control.returncode == 0 and "1 files replayed" in control.stdout, control.stderr
    found = run("-runs=300000")
    assert found.returncode != 0, found.stdout
    assert ("heap-buffer-overflow" if letter == "c" else "there is no x") in found.stderr
    assert (tmp_path / "crash").read_bytes()[:3] == f"hv{letter}".encode()


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_every_target_begins_with_golden_payloads(target: str) -> None:
    found = dict(fuzz.seeds(target))
    assert found and all(0 < len(data) <= fuzz.MOST_BYTES for data in found.values())
    assert len(set(found.values())) > len(fuzz.DTYPES) or target == "checksums"


def test_sections_are_those_of_the_golden_payloads() -> None:
    golden = json.loads(cases.FILE.read_text())["payloads"]
    payload = bytes.fromhex(golden["topk density=0.01"]["float32"])
    assert b"".join(fuzz.sections(payload)) == payload[12:] and len(fuzz.sections(payload)) == 3
