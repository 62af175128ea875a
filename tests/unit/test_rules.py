"""Every rule in csrc/rules is one text that the CPU's and CUDA's kernels both use, directly or through another rule."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"

#: What one side has no use for, and why.
ONE_SIDED = {
    "add_halves": "the CPU adds vectors of 16-bit numbers",
    "add_nibbles": "CUDA adds the codes of eight bytes at once",
    "bernoulli_word": "CUDA draws two words at a time, by decide()",
    "combine_lanes": "on CUDA lanes are threads, which shuffle",
    "full_add": "a thread of CUDA counts in bytes of a word",
    "StreamWriter": "a lane of CUDA writes the zeros of a code among ones",
    "make_crc_tables": "checksums are of host memory",
    "crc_multiply": "checksums are of host memory",
    "crc_zeros": "checksums are of host memory",
    "negated_if": "the CPU gives vectors their signs, by with_signs()",
    "next_block": "a thread of CUDA has one block",
    "norm_negates": "the CPU shifts vectors of signs from one block to the next",
    "open": "a warp of CUDA reads a range",
    "order_of": "the CPU orders vectors, by orders()",
    "pack_eight": "a warp of CUDA takes any number of bits in one path, by Packing",
    "put_code": "a warp of CUDA writes the codes of a range beside each other",
    "reader_of": "a warp of CUDA reads a range",
    "signed_code": "the CPU does the same to vectors of bytes",
    "too_short": "CUDA asks the same of sections of every kind",
    "unpack_eight": "the same the other way round",
}
WHO_CALLS_KERNELS = ("lowrank_operands.h", "record_operands.h", "select_operands.h", "sketch_operands.h")


def without_comments(path: Path) -> str:
    return re.sub(r"//.*", "", path.read_text())


@cache
def rules() -> dict[str, str]:
    """Return the rules by name, each with the text of all functions of that name."""
    found: dict[str, str] = {}
    for path in sorted((CSRC / "rules").glob("*.h")):
        text = without_comments(path)
        for match in re.finditer(r"(?:HVC_RULE|^constexpr)[^;{}()#]*?\b(\w+)\(", text, re.MULTILINE):
            if match[1].startswith("__"):
                continue  # of the compiler
            found[match[1]] = found.get(match[1], "") + body(text, match.end())
    return found


def body(text: str, at: int) -> str:
    """Return what is in braces behind the arguments that begin at a place; nothing behind a declaration."""
    opened, ended = text.find("{", at), text.find(";", at)
    if opened < 0 or 0 <= ended < opened:
        return ""
    depth, end = 1, opened + 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[opened:end]


@cache
def used_by(folder: str) -> set[str]:
    """Return the rules that the kernels of a folder use."""
    paths = [*(CSRC / folder).iterdir(), *(CSRC / name for name in WHO_CALLS_KERNELS)]
    return used_in("".join(without_comments(path) for path in paths))


def used_in(text: str) -> set[str]:
    """Return the rules that a text uses, directly and through others."""
    words = set(re.findall(r"\w+", text))
    used: set[str] = set()
    while more := {name for name in rules() if name in words} - used:
        used |= more
        words = {word for name in more for word in re.findall(r"\w+", rules()[name])}
    return used


@pytest.mark.parametrize("name", sorted(rules()))
def test_both_sides_use_a_rule(name: str) -> None:
    sides = [folder for folder in ("cpu", "cuda") if name in used_by(folder)]
    if name in ONE_SIDED:
        assert len(sides) == 1, f"{name} has its reason no longer: {ONE_SIDED[name]}"
    else:
        assert sides == ["cpu", "cuda"], f"only {sides} use {name}"


def test_reasons_are_for_rules_that_exist() -> None:
    assert set(ONE_SIDED) <= set(rules()) and len(rules()) > 150


def test_a_rule_that_nobody_uses_is_found() -> None:
    """The control, with a rule that is used through another one only."""
    assert used_in("x = less_value(x, value, true);") >= {"less_value", "limited", "limited_part"}
    assert "signed_step" not in used_in("x = with_momentum(factor, momentum, grad);")


def test_rules_for_lanes_are_the_text_for_numbers() -> None:
    including = {path.name for path in CSRC.rglob("*.*") if '#include "rules/lanewise.h"' in path.read_text()}
    assert including == {"numbers.h", "lanes.h"}
    numbers = {path.name for path in CSRC.rglob("*.*") if '#include "rules/numbers.h"' in path.read_text()}
    assert numbers == {"launch.h", "foreach_isa.h"}, "CUDA and the CPU find them there"
