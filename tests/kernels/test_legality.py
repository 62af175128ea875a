"""What a kernel refuses, before it touches memory."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.errors import ConfigError
from horovod_compress.ops import loader
from horovod_compress.ops.dispatch import Checked
from horovod_compress.ops.keys import KEPT

from .support import KEY, poison

F32, F64, I64 = torch.float32, torch.float64, torch.int64


def _f(count: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)


def _w(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=I64)


SHARED = _f(200)
SHARED_WORDS = _w(20)

REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "too few words": ("bits must be", lambda: ops.sign_pack(_f(65), _w(1))),
    "too many words": ("bits must be", lambda: ops.sign_pack(_f(64), _w(2))),
    "words of another type": ("bits must be", lambda: ops.sign_pack(_f(64), _w(1).to(torch.int32))),
    "integers": ("x must be float32", lambda: ops.sign_pack(_w(64), _w(1))),
    "strided": ("contiguous", lambda: ops.sign_pack(_f(128)[::2], _w(1))),
    "another device": (
        "on the CPU or the current CUDA",
        lambda: ops.sign_pack(torch.zeros(64, device="meta"), _w(1)),
    ),
    "two devices": ("bits must be on the CPU", lambda: ops.sign_pack(_f(64), _w(1).to("meta"))),
    "residual too short": ("residual must be", lambda: single.sign_offer(_f(64), _f(63), _w(1), None, 1)),
    "residual of the gradient's type": (
        "residual must be",
        lambda: single.sign_offer(_f(64, torch.float16), _f(64, torch.float16), _w(1), None, 1),
    ),
    "float32 residual of float64": (
        "residual must be",
        lambda: single.sign_offer(_f(64, F64), _f(64), _w(1), None, 1),
    ),
    "row length": ("row_length", lambda: single.sign_offer(_f(64), None, _w(1), None, 0)),
    "sums too short": ("sums must be", lambda: single.sign_offer(_f(64), None, _w(1), _f(2, F64), 30)),
    "sums of another type": ("sums must be", lambda: single.sign_offer(_f(64), None, _w(1), _f(3), 30)),
    "negative offset": ("words must lie", lambda: single.sign_offer(_f(64), None, _w(1), None, 1, word_offset=-1)),
    "offset too large": (
        "words must lie",
        lambda: ops.bernoulli_words(_w(2), 1, 2, KEY, word_offset=(1 << 33) - 1),
    ),
    "unknown feedback": (
        "feedback must be",
        lambda: single.sign_decode(_w(1), _f(1), 64, _f(64), _f(64), feedback="both"),  # type: ignore[arg-type]
    ),
    "feedback without residual": (
        "feedback must be",
        lambda: single.sign_decode(_w(1), _f(1), 64, _f(64), None, feedback="own"),
    ),
    "residual without feedback": (
        "feedback must be",
        lambda: single.sign_decode(_w(1), _f(1), 64, _f(64), _f(64), feedback="none"),
    ),
    "residual over gradient": (
        "overlap",
        lambda: single.sign_decode(_w(2), _f(1), 128, SHARED[:128], SHARED[50:178], feedback="own"),
    ),
    "too few steps": ("steps must be", lambda: single.sign_decode(_w(1), _f(1), 63, _f(64), None, feedback="none")),
    "steps of another type": (
        "steps must be",
        lambda: single.sign_decode(_w(1), _f(1, F64), 64, _f(64), None, feedback="none"),
    ),
    "no weight at all": ("probability", lambda: ops.merge_bits(_w(1), _w(1), 0, 0, KEY)),
    "negative weight": ("probability", lambda: ops.merge_bits(_w(1), _w(1), 3, -1, KEY)),
    "weights too large": ("probability", lambda: ops.merge_bits(_w(1), _w(1), 1 << 62, 1, KEY)),
    "more than certain": ("probability", lambda: ops.bernoulli_words(_w(1), 3, 2, KEY)),
    "merge of different lengths": ("other must be", lambda: ops.merge_bits(_w(2), _w(3), 1, 1, KEY)),
    "merge with itself": (
        "overlap",
        lambda: ops.merge_bits(SHARED_WORDS[:10], SHARED_WORDS[9:19], 1, 1, KEY),
    ),
    "no parts": ("parts must hold", lambda: ops.majority_fold([], _w(1), 64)),
    "too many parts": ("parts must hold", lambda: ops.majority_fold([_w(1)] * 65536, _w(1), 64)),
    "no sections": (
        "sections must hold those of 1 to 65535 ranks, got those of 0",
        lambda: ops.elias_decode([], _f(4), bits=4, block=64, scale=1.0),
    ),
    "a part too short": (r"parts\[1\]", lambda: ops.majority_fold([_w(2), _w(1)], _w(2), 128)),
    "offer over gradient": ("overlap", lambda: single.dense_offer(SHARED[:64], None, SHARED[:64])),
    "offer over residual": ("overlap", lambda: single.dense_offer(_f(64), SHARED[:64], SHARED[63:127])),
    "add of different types": ("other must be", lambda: ops.dense_add(_f(4), _f(4, F64))),
    "signs over their mean": (
        "overlap",
        lambda: single.values_encode(
            torch.tensor([0, 5], dtype=torch.int32),
            2,
            _f(2),
            1,
            64,
            torch.zeros(2, dtype=torch.int64),
            SHARED.view(torch.uint8),
            form="signs",
            head=SHARED[:1],
        ),
    ),
    "add of itself": ("overlap", lambda: ops.dense_add(SHARED, SHARED)),
    "decode of different lengths": (
        "payload must be|grad must be",
        lambda: single.dense_decode(_f(3), _f(4), scale=1),
    ),
    "checksum of words": ("data must be", lambda: ops.crc32c(_w(1))),
    "hash of words": ("data must be", lambda: ops.hash64(_w(1))),
    "copy to a shorter place": (
        "dst must be",
        lambda: ops.crc32c_copy(poison(7, torch.uint8), poison(8, torch.uint8)),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    pattern, call = REFUSED[case]
    with pytest.raises(ValueError, match=pattern):
        call()


def test_neighbours_do_not_overlap() -> None:
    ops.dense_add(SHARED[:100], SHARED[100:])
    ops.merge_bits(SHARED_WORDS[:10], SHARED_WORDS[10:], 1, 1, KEY)


def test_no_elements_are_nothing_to_do() -> None:
    ops.sign_pack(_f(0), _w(0))
    assert single.sign_offer(_f(0), _f(0), _w(0), _f(0, F64), 5) == 0
    ops.merge_bits(_w(0), _w(0), 1, 1, KEY)
    ops.majority_fold([_w(0)], _w(0), 0)
    assert ops.crc32c(poison(0, torch.uint8), 77) == 77


def test_unknown_override_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVC_KERNELS", "gpu")
    with pytest.raises(ConfigError, match="HVC_KERNELS must be one of"):
        loader.choice()


def test_missing_extension_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"make setup.*HVC_KERNELS=reference") as missed:
        loader.load("_cpu")
    assert missed.value.name == "horovod_compress._cpu"


def test_instruction_set_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loader.load("_cpu")
    monkeypatch.setenv("HVC_ISA", "sse9")
    with pytest.raises(ConfigError, match="HVC_ISA='sse9'"):
        loader.load("_cpu")


class TestCheckedBefore:
    """What a call has found of a batch holds for the next one only if its gradients are what they were."""

    COUNTS = (5, 0, 70, 300)

    def given(self) -> dict[str, Any]:
        sizes = [ops.word_count(count) for count in self.COUNTS]
        return {
            "residuals": tuple(torch.zeros(count) for count in self.COUNTS),
            "bits": tuple(torch.zeros(size, dtype=torch.int64) for size in sizes),
            "steps": tuple(torch.zeros(min(count, 1)) for count in self.COUNTS),
            "row_lengths": tuple(max(count, 1) for count in self.COUNTS),
        }

    def grads(self, seed: int) -> list[Tensor]:
        return [torch.randn(count, generator=torch.Generator().manual_seed(seed)) for count in self.COUNTS]

    def looks(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Return what notes how often the rows of a batch are made."""
        made: list[int] = []
        keep = Checked.keep
        monkeypatch.setattr(Checked, "keep", lambda self, *given: made.append(1) or keep(self, *given))
        return made

    def test_rows_are_used_again_and_bits_are_those_of_now(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, given, checked, grads = self.looks(monkeypatch), self.given(), Checked(), self.grads(1)
        for seed in (1, 2, 3):
            for grad, values in zip(grads, self.grads(seed), strict=True):
                grad.copy_(values)
            ops.sign_offer_all(grads, **given, checked_before=checked)
            fresh = self.given()
            ops.sign_offer_all(self.grads(seed), **fresh)
            assert all(map(torch.equal, given["bits"] + given["steps"], fresh["bits"] + fresh["steps"]))
        assert made == [1]
        ops.sign_offer_all([grad.view(1, -1) for grad in grads], **given, checked_before=checked)
        assert made == [1]  # another view of the same elements

    def test_a_key_of_rounding_changes_no_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, checked, given, grads = self.looks(monkeypatch), Checked(), self.given(), self.grads(1)
        given["residuals"] = tuple(residual.bfloat16() for residual in given["residuals"])
        for step in range(3):
            rounding = KEY.at(purpose=KEPT, step=step)
            ops.sign_decode_all(grads=grads, **given, feedback="own", rounding=rounding, checked_before=checked)
        assert made == [1]

    def test_gradients_that_lie_elsewhere_change_no_more_than_their_addresses(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, given, decoded, offered = self.looks(monkeypatch), self.given(), Checked(), Checked()
        first, second = self.grads(1), self.grads(2)
        for number, grads in enumerate((first, second, first, second, self.grads(3))):
            for grad in grads:
                grad.add_(number)
            before, fresh = [residual.clone() for residual in given["residuals"]], self.given()
            ops.sign_offer_all(grads, **given, checked_before=offered)
            for residual, value in zip(fresh["residuals"], before, strict=True):
                residual.copy_(value)
            theirs = [grad.clone() for grad in grads]
            ops.sign_offer_all(theirs, **fresh)
            ops.sign_decode_all(grads=grads, **given, feedback="own", checked_before=decoded)
            ops.sign_decode_all(grads=theirs, **fresh, feedback="own")
            for mine, other in (
                *((given[name], fresh[name]) for name in ("bits", "steps", "residuals")),
                (grads, theirs),
            ):
                assert all(map(torch.equal, mine, other))
        assert made == [1, 1]
        ops.sign_offer_all(second, **self.given() | {"steps": given["steps"]}, checked_before=offered)
        assert made == [1, 1, 1]

    @pytest.mark.parametrize("into", ["its residual", "the end of it", "before it", "another residual", "elsewhere"])
    def test_a_gradient_that_moved_into_other_memory_is_refused(self, into: str) -> None:
        given, checked, grads, room = self.given(), Checked(), self.grads(1), torch.zeros(200)
        ops.sign_decode_all(grads=grads, **given, feedback="own", checked_before=checked)
        ops.sign_decode_all(grads=self.grads(1), **given, feedback="own", checked_before=checked)
        given["residuals"] = (*given["residuals"][:2], room[100:170], given["residuals"][3])  # rows are made anew
        ops.sign_decode_all(grads=grads, **given, feedback="own", checked_before=checked)
        memory = {"its residual": room[100:], "the end of it": room[31:], "before it": room[30:]}
        grads[2] = (memory | {"another residual": given["residuals"][3]}).get(into, torch.zeros(70))[:70]
        refused = into in ("its residual", "the end of it")  # to see that tensors share nothing is for the caller
        with pytest.raises(ValueError, match="overlap") if refused else contextlib.nullcontext():
            ops.sign_decode_all(grads=grads, **given, feedback="own", checked_before=checked)

    @pytest.mark.parametrize("change", ["dtype", "fewer", "gaps"])
    def test_a_gradient_that_changed_where_it_lies_is_refused(self, change: str) -> None:
        given, checked, grads = self.given(), Checked(), self.grads(1)
        memory = torch.zeros(1000)
        grads[2] = memory[:70]
        ops.sign_offer_all(grads, **given, checked_before=checked)
        grads[2] = {"dtype": memory[:70].view(torch.int32), "fewer": memory[:69], "gaps": memory[:140:2]}[change]
        assert grads[2].data_ptr() == memory.data_ptr()
        with pytest.raises(ValueError, match=r"grad must be a contiguous|residual must be a contiguous"):
            ops.sign_offer_all(grads, **given, checked_before=checked)

    def test_what_may_change_without_notice_is_not_kept(self) -> None:
        given, checked, grads = self.given(), Checked(), self.grads(1)
        given["bits"] = list(given["bits"])
        ops.sign_offer_all(grads, **given, checked_before=checked)
        given["bits"][2] = torch.zeros(1, dtype=torch.int64)
        with pytest.raises(ValueError, match="bits must be a contiguous"):
            ops.sign_offer_all(grads, **given, checked_before=checked)
