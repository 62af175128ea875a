"""What every kernel's arguments are checked with, and where the compiled code is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import NoReturn

import torch
from torch import Tensor

from . import loader
from .keys import Key

__all__ = ["code_layout", "word_count"]

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
MAX_PARTS = 65535
MAX_WEIGHT = 1 << 62
MAX_WORDS = 1 << 33  # the group index is 32 bits wide, and a group holds two words
MAX_DRAWS = 1 << 35  # and a word 16 random bits for each of four elements
#: Powers of |x| that a norm may add up; 0 stands for the maximum.
POWERS = (0, 1, 2, 4)
#: Of codes that are whole numbers.
CODE_BITS = (*range(2, 9), 16)


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


def word_count(count: int) -> int:
    """Return how many 64-bit words hold ``count`` bits."""
    return (count + 63) >> 6


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
    return _cuda(), device, torch.cuda.current_stream().cuda_stream


def checked(name: str, tensor: Tensor, dtype: torch.dtype, count: int, device: int) -> int:
    """Check one tensor and return its address."""
    if tensor.dtype is not dtype or tensor.numel() != count or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor of {count} elements, "
            f"got {tensor.dtype} with shape {tuple(tensor.shape)} and stride {tensor.stride()}"
        )
    if not (tensor.is_cpu if device < 0 else tensor.is_cuda and tensor.get_device() == device):
        expected = "the CPU" if device < 0 else f"cuda:{device}"
        raise ValueError(f"{name} must be on {expected}, got a tensor on {tensor.device}")
    return tensor.data_ptr()


def checked_or_none(name: str, tensor: Tensor | None, dtype: torch.dtype, count: int, device: int) -> int:
    """Check a tensor that may be missing and return its address, 0 for none."""
    return 0 if tensor is None else checked(name, tensor, dtype, count, device)


def checked_each(name: str, tensors: Sequence[Tensor], dtype: torch.dtype, count: int, device: int) -> list[int]:
    """Check some tensors of one length and return their addresses."""
    return [checked(f"{name}[{i}]", tensor, dtype, count, device) for i, tensor in enumerate(tensors)]


def checked_room(name: str, room: Tensor, least: int, device: int) -> int:
    """Check bytes that have to hold so many and return their address."""
    if room.numel() < least:
        raise ValueError(f"{name} must hold at least {least} bytes, got {room.numel()}")
    return checked(name, room, torch.uint8, room.numel(), device)


def checked_bytes(name: str, data: Tensor, device: int) -> tuple[int, int]:
    """Check bytes, as many as there are, and return their address and their number."""
    return checked(name, data, torch.uint8, data.numel(), device), data.numel()


def checked_sections(sections: Sequence[Tensor], device: int) -> list[tuple[int, int]]:
    """Check the sections of all ranks and return their addresses and lengths."""
    check_parts(sections, "sections")
    return [checked_bytes(f"sections[{i}]", section, device) for i, section in enumerate(sections)]


def counted(kernel: Callable[..., int], arguments: Sequence[object], device: int, launch: int) -> int | Tensor:
    """Call a kernel that counts; return the count, on CUDA a tensor that nothing waits for."""
    if device < 0:
        return kernel(*arguments, 0, launch)
    counter = torch.empty(1, dtype=torch.int64, device=f"cuda:{device}")
    kernel(*arguments, counter.data_ptr(), launch)
    return counter


def dtype_code(name: str, tensor: Tensor) -> int:
    """Return the code of a floating-point dtype."""
    code = _DTYPES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"{name} must be float32, float64, float16 or bfloat16, got {tensor.dtype}")
    return code


def floating(name: str, tensor: Tensor) -> torch.dtype:
    """Return a dtype, which must be a floating one."""
    dtype_code(name, tensor)
    return tensor.dtype


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic, and so of a residual."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def check_apart(name: str, first: Tensor, other_name: str, second: Tensor) -> None:
    """Refuse two tensors that share memory."""
    a, b = first.data_ptr(), second.data_ptr()
    if a < b + second.nbytes and b < a + first.nbytes:
        refuse_overlap(name, other_name)


def check_all_apart(outputs: Mapping[str, Tensor | None], inputs: Mapping[str, Tensor | None]) -> None:
    """Refuse outputs that share memory with each other or with an input."""
    before = dict(inputs)
    for name, output in outputs.items():
        for other_name, other in before.items():
            if output is not None and other is not None:
                check_apart(name, output, other_name, other)
        before[name] = output


def check_parts(parts: Sequence[Tensor], name: str = "parts") -> None:
    """Refuse the payloads of no ranks, and of more than a kernel counts."""
    if not 1 <= len(parts) <= MAX_PARTS:
        raise ValueError(f"{name} must hold 1 to {MAX_PARTS} tensors, got {len(parts)}")


def check_factor(momentum: Tensor | None, factor: float) -> None:
    """Refuse a factor that is no number, and one that multiplies nothing."""
    if not math.isfinite(factor) or (momentum is None and factor != 0):
        given = "no" if momentum is None else "a"
        raise ValueError(f"factor must be finite, and 0 without momentum, got {factor} with {given} momentum")


def check_own(own: int, sections: Sequence[Tensor]) -> None:
    """Refuse a place that is none in a list of sections."""
    if not 0 <= own < len(sections):
        raise ValueError(f"own must be in [0, {len(sections)}), got {own}")


def refuse_overlap(name: str, other_name: str) -> NoReturn:
    """Say which arrays share memory."""
    raise ValueError(f"{name} and {other_name} must not overlap")


def row_count(count: int, row_length: int) -> int:
    """Return how many rows elements make; the last one may be shorter."""
    if row_length < 1:
        raise ValueError(f"row_length must be at least 1, got {row_length}")
    return -(-count // row_length)


def check_words(word_offset: int, count: int) -> None:
    """Refuse bits whose words are beyond what a key has numbers for."""
    words = word_count(count)
    if word_offset < 0 or word_offset + words > MAX_WORDS:
        raise ValueError(f"words must lie in [0, {MAX_WORDS}), got {word_offset} + {words}")


def word_stream(key: Key | None, word_offset: int, words: int) -> tuple[int, int, int, int, int] | None:
    """Return the words of a key, or None without one, after checking that it has numbers for all of them."""
    check_words(word_offset, 64 * words)
    return None if key is None else key.words()


def check_odds(numerator: int, denominator: int) -> None:
    """Refuse what is no probability in whole numbers."""
    if not (0 <= numerator <= denominator and 0 < denominator <= MAX_WEIGHT):
        raise ValueError(
            f"a probability must be numerator / denominator with 0 <= numerator <= denominator "
            f"and 1 <= denominator <= {MAX_WEIGHT}, got {numerator} / {denominator}"
        )


def draw_stream(key: Key, offset: int, count: int) -> tuple[int, int, int, int, int]:
    """Return the words of a key that has a number for each of the elements."""
    check_draws(offset, count)
    return key.words()


def check_draws(offset: int, count: int) -> None:
    """Refuse elements beyond what a key has numbers for."""
    if offset < 0 or offset + count > MAX_DRAWS:
        raise ValueError(f"elements must lie in [0, {MAX_DRAWS}), got {offset} + {count}")


def check_one_of(name: str, value: int, allowed: tuple[int, ...]) -> None:
    """Refuse a value that is none of those allowed, by the name of its argument."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def check_levels(bits: int, levels: int) -> None:
    """Refuse a number of levels that does not fit into the bits of a code."""
    check_one_of("bits", bits, CODE_BITS)
    if not 1 <= levels < 1 << (bits - 1):
        raise ValueError(f"levels must be in [1, {1 << (bits - 1)}), got {levels}")


def check_headroom(bits: int, headroom: int) -> None:
    """Refuse a headroom that does not fit into the bits of a code."""
    check_one_of("bits", bits, (4, 8))
    most = min(1 << (bits - 1), 32) - 1
    if not 1 <= headroom <= most:
        raise ValueError(f"headroom must be in [1, {most}], got {headroom}")


def code_layout(bits: int, count: int) -> tuple[torch.dtype, int]:
    """Return the dtype and the length of the array that holds ``count`` codes; those below 8 bits share bytes."""
    return (torch.int16, count) if bits == 16 else (torch.uint8, -(-count * bits // 8))
