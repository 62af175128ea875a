"""What every kernel's arguments are checked with, and where the compiled code is found."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cache
from types import ModuleType
from typing import NoReturn

import torch
from torch import Tensor

from . import loader

__all__ = ["word_count"]

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
#: Of the arithmetic, and so of a residual.
WORK_DTYPES = {dtype: torch.float64 if dtype is torch.float64 else torch.float32 for dtype in _DTYPES}
MAX_PARTS = 65535
MAX_WEIGHT = 1 << 62
MAX_WORDS = 1 << 33  # the group index is 32 bits wide, and a group holds two words
MAX_DRAWS = 1 << 35  # and a word 16 random bits for each of four elements
#: Powers of |x| that a norm may add up; 0 stands for the maximum.
POWERS = (0, 1, 2, 4)
#: Of codes that are whole numbers.
CODE_BITS = (*range(2, 9), 16)
#: By name, the rules of a residual, and of the scale of a record.
FEEDBACK = {"none": 0, "global": 1, "own": 2, "momentum": 3}
RECORD_RULES = {"l1": 0, "l2": 1, "shared": 2}


REFERENCE: ModuleType | None = None
CPU: ModuleType
if loader.choice() == "reference":
    from . import reference

    REFERENCE = CPU = reference
else:
    CPU = loader.load("_cpu")


@cache
def _cuda() -> ModuleType:
    if loader.choice():
        raise ValueError(f"HVC_KERNELS={loader.choice()} runs on CPU tensors only")
    return loader.load("_cuda")


def stream_of(device: int) -> int:
    """Return the address of the stream that this thread queues on."""
    if _RAW_STREAM is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(_RAW_STREAM(device))


#: What torch's compiler uses: for a gradient it is asked hundreds of times, and an object for each takes a microsecond.
_RAW_STREAM = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def backend(tensor: Tensor) -> tuple[ModuleType, int, int]:
    """Return the module for a tensor, its device (-1 is the CPU), and how to launch there."""
    if tensor.is_cpu:
        return REFERENCE or CPU, -1, torch.get_num_threads()
    device = tensor.get_device()
    if not tensor.is_cuda or device != torch.cuda.current_device():
        raise ValueError(
            f"tensors must be on the CPU or the current CUDA device (torch.cuda.set_device "
            f"chooses it, for each thread), got one on {tensor.device}"
        )
    return _cuda(), device, stream_of(device)


# ---- arrays -------------------------------------------------------------------------------------


def lies_on(tensor: Tensor, device: int) -> bool:
    """Return whether a tensor is on a device, -1 for the CPU."""
    return tensor.is_cpu if device < 0 else tensor.is_cuda and tensor.get_device() == device


def checked(name: str, tensor: Tensor, dtype: torch.dtype, count: int, device: int) -> int:
    """Check one tensor and return its address."""
    if tensor.dtype is not dtype or tensor.numel() != count or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor of {count} elements, "
            f"got {tensor.dtype} with shape {tuple(tensor.shape)} and stride {tensor.stride()}"
        )
    if not lies_on(tensor, device):
        expected = "the CPU" if device < 0 else f"cuda:{device}"
        raise ValueError(f"{name} must be on {expected}, got a tensor on {tensor.device}")
    return tensor.data_ptr()


def checked_each(name: str, tensors: Sequence[Tensor], dtype: torch.dtype, count: int, device: int) -> list[int]:
    """Check some tensors of one length and return their addresses."""
    for i, x in enumerate(tensors):  # their names are made where they are needed: there are hundreds
        if x.dtype is not dtype or x.numel() != count or not x.is_contiguous() or not lies_on(x, device):
            checked(f"{name}[{i}]", x, dtype, count, device)
    return [tensor.data_ptr() for tensor in tensors]


def ranks_of(sections: Sequence[Tensor], number: int) -> int:
    """Return of how many ranks there are sections of each of so many tensors."""
    ranks = len(sections) // number
    if not 1 <= ranks <= MAX_PARTS:
        raise ValueError(f"sections must hold those of 1 to {MAX_PARTS} ranks, got those of {ranks}")
    return ranks


def checked_sections(sections: Sequence[Tensor], device: int) -> list[tuple[int, int]]:
    """Check sections and return their addresses and lengths."""
    for i, x in enumerate(sections):
        if x.dtype is not torch.uint8 or not x.is_contiguous() or not lies_on(x, device):
            checked(f"sections[{i}]", x, torch.uint8, x.numel(), device)
    return [(section.data_ptr(), section.numel()) for section in sections]


def check_room(name: str, room: Tensor, least: int) -> None:
    """Refuse bytes that cannot hold what may be written."""
    if room.numel() < least:
        raise ValueError(f"{name} must hold at least {least} bytes, got {room.numel()}")


def begin_of(place: Tensor) -> int:
    """Return where in its memory a section begins, as far as the host knows: kernels on CUDA check it themselves."""
    return int(place[0]) if place.is_cpu and place.numel() else 0


def with_room(room: Tensor, before: int, more: int, last: bool) -> int:
    """Return how many bytes may be written so far; when it is all of them, refuse what cannot hold them."""
    if last:
        check_room("out", room, before + more)
    return before + more


def dtype_code(name: str, tensor: Tensor) -> int:
    """Return the code of a floating-point dtype."""
    code = _DTYPES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"{name} must be float32, float64, float16 or bfloat16, got {tensor.dtype}")
    return code


def wide(name: str, tensor: Tensor) -> torch.dtype:
    """Return a dtype, which must be one of the arithmetic."""
    if tensor.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} must be float32 or float64, got {tensor.dtype}")
    return tensor.dtype


def kept_kind(tensors: Sequence[Tensor] | None, work: torch.dtype) -> torch.dtype:
    """Return the dtype of what is kept for the tensors of a batch: the one of the arithmetic, or bfloat16."""
    return torch.bfloat16 if tensors and tensors[0].dtype is torch.bfloat16 else work


def check_rounding(rounding: object, kept: torch.dtype) -> None:
    """Refuse to keep numbers of 16 bits without a key to round them by, and a key that is not needed."""
    if (rounding is not None) != (kept is torch.bfloat16):
        raise ValueError(f"rounding must be a key for residuals of bfloat16, else None; got {rounding} for {kept}")


def refuse_overlap(name: str, other_name: str) -> NoReturn:
    """Say which arrays share memory."""
    raise ValueError(f"{name} and {other_name} must not overlap")


def check_apart_from_each(name: str, start: int, end: int, other_name: str, others: Sequence[Tensor]) -> None:
    """Refuse an array that shares memory with one of several."""
    for i, other in enumerate(others):
        if start < other.data_ptr() + other.nbytes and other.data_ptr() < end:
            refuse_overlap(name, f"{other_name}[{i}]")


# ---- numbers ------------------------------------------------------------------------------------


def word_count(count: int) -> int:
    """Return how many 64-bit words hold ``count`` bits."""
    return (count + 63) >> 6


def row_count(count: int, row_length: int) -> int:
    """Return how many rows elements make; the last one may be shorter."""
    if row_length < 1:
        raise ValueError(f"row_length must be at least 1, got {row_length}")
    return -(-count // row_length)


def check_marked(words: int, elements: int, block: int) -> None:
    """Refuse words that do not hold a bit for each block of a tensor."""
    if elements < 0 or words != word_count(row_count(elements, block)):
        raise ValueError(f"bits must be those of {elements} elements in blocks of {block}, got {words} words")


def check_parts(parts: Sequence[Tensor], name: str = "parts") -> None:
    """Refuse the payloads of no ranks, and of more than a kernel counts."""
    if not 1 <= len(parts) <= MAX_PARTS:
        raise ValueError(f"{name} must hold 1 to {MAX_PARTS} tensors, got {len(parts)}")


def check_own(own: int, ranks: int) -> None:
    """Refuse a place that is none among the ranks."""
    if not 0 <= own < ranks:
        raise ValueError(f"own must be in [0, {ranks}), got {own}")


def check_factor(momentum: object, factor: float) -> None:
    """Refuse a factor that is no number, and one that multiplies nothing."""
    if not math.isfinite(factor) or (momentum is None and factor != 0):
        given = "no" if momentum is None else "a"
        raise ValueError(f"factor must be finite, and 0 without momentum, got {factor} with {given} momentum")


def check_words(word_offset: int, count: int) -> None:
    """Refuse bits whose words are beyond what a key has numbers for."""
    words = word_count(count)
    if word_offset < 0 or word_offset + words > MAX_WORDS:
        raise ValueError(f"words must lie in [0, {MAX_WORDS}), got {word_offset} + {words}")


def check_draws(offset: int, count: int) -> None:
    """Refuse elements beyond what a key has numbers for."""
    if offset < 0 or offset + count > MAX_DRAWS:
        raise ValueError(f"elements must lie in [0, {MAX_DRAWS}), got {offset} + {count}")


def check_odds(numerator: int, denominator: int) -> None:
    """Refuse what is no probability in whole numbers."""
    if not (0 <= numerator <= denominator and 0 < denominator <= MAX_WEIGHT):
        raise ValueError(
            f"a probability must be numerator / denominator with 0 <= numerator <= denominator "
            f"and 1 <= denominator <= {MAX_WEIGHT}, got {numerator} / {denominator}"
        )


def check_one_of(name: str, value: int | str, allowed: Collection[int | str]) -> None:
    """Refuse a value that is none of those allowed, by the name of its argument."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def check_levels(bits: int, levels: int) -> None:
    """Refuse a number of levels that does not fit into the bits of a code."""
    check_one_of("bits", bits, CODE_BITS)
    if not 1 <= levels < 1 << (bits - 1):
        raise ValueError(f"levels must be in [1, {1 << (bits - 1)}), got {levels}")


def check_headroom(bits: int, headroom: int, mantissa: int = 0) -> None:
    """Refuse a headroom or a mantissa that does not fit into the bits of a code."""
    check_one_of("bits", bits, (4, 8))
    check_one_of("mantissa", mantissa, (0, 2) if bits == 8 else (0,))
    most = min(1 << (bits - 1), 32) - 1
    if not 1 <= headroom <= most:
        raise ValueError(f"headroom must be in [1, {most}], got {headroom}")


def adam_step_scales(
    betas: tuple[float, float],
    step: float,
    bound: float,
    lr: float,
    eps: float,
    by: float,
    weight_decay: float,
    decoupled: bool,
) -> tuple[float, ...]:
    """Return what the kernel of a whole step multiplies by, in the order of its struct."""
    beta1, beta2 = betas
    unbiased, near = 1 - beta1**step, 1 - beta1 < 0.5  # torch, too, goes from the nearer end
    coupled, kept = (0.0, 1 - lr * weight_decay) if decoupled else (weight_decay, 1.0)
    moments = (1 - beta1 if near else -beta1, float(not near), 1 / (unbiased * bound), (1 - beta2) / (1 - beta2**step))
    return (by, coupled, kept, *moments, lr / unbiased, eps)


def sgd_step_scales(
    lr: float, momentum: float, dampening: float, nesterov: bool, by: float, weight_decay: float
) -> tuple[float, ...]:
    """Return what the kernel of a step multiplies by, in the order of its struct."""
    return (by, weight_decay, momentum, 1 - dampening, lr, float(nesterov))


def adam_scales(betas: tuple[float, float], step: float, bound: float, left: float) -> tuple[float, ...]:
    """Return what the kernel multiplies by."""
    beta1, beta2 = betas
    least, wanted = 1 / ((1 - beta1**step) * bound), (1 - beta2**step) / beta2
    return (1 - beta1, least, wanted, (1 - beta2) / beta2, 1 - left)
