"""The plan: which tensors travel together, and the ways of choosing that without measuring.

It is decided on rank 0, and equal on every rank.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ConfigError, naming, some_of

#: Every tensor starts at a multiple of this many elements, so that its bits start at a whole word.
ALIGNMENT = 64
#: What gradients may be.
DTYPES = ("float32", "float64", "float16", "bfloat16")
_MOST_METHODS, _MOST_ELEMENTS = 1 << 16, 1 << 48

USUAL_SIZE = "25MB"
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_MOST_SIZE = 1 << 62  # more than any model has
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def supported_dtype(what: str, given: Any) -> str:
    """Return the name of a torch dtype that gradients may have.

    Raises:
        ConfigError: it is another one; the text says what has it.
    """
    dtype = str(given).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"{what} is {dtype}; supported are {', '.join(DTYPES)}")
    return dtype


@dataclass(frozen=True)
class TensorSpec:
    """One parameter as the plan sees it.

    Attributes:
        device: where this rank has it, such as "cpu" or "cuda:1". It is not part of what ranks compare or of what is
            saved: a plan serves whatever device the gradients are on.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str = field(default="cpu", compare=False)

    @cached_property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Tensors of one kind that are fused into one flat buffer, in the order in which they are expected.

    Attributes:
        index: position in the plan, which is the order of exchange.
        tensors: the tensors, in backward order.
        method: the number of its method; 0 travels as it is, as the bucket of small tensors does.
        plain: the bucket has a method, but travels uncompressed; what its method keeps is sent along and emptied.
        offsets: where each tensor starts in the flat buffer, in elements.
        padded: elements of the flat buffer, gaps included.
    """

    index: int
    tensors: tuple[TensorSpec, ...]
    method: int = 1
    plain: bool = False
    offsets: tuple[int, ...] = field(init=False)
    padded: int = field(init=False)

    def __post_init__(self) -> None:
        offsets, end = [], 0
        for tensor in self.tensors:
            offsets.append(end)
            end += -(-tensor.count // ALIGNMENT) * ALIGNMENT
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "padded", end)

    @property
    def compressed(self) -> bool:
        return self.method > 0

    @cached_property
    def count(self) -> int:
        """Elements, gaps not included."""
        return sum(tensor.count for tensor in self.tensors)

    @property
    def dtype(self) -> str:
        return self.tensors[0].dtype

    @property
    def device(self) -> str:
        """Return where this rank has the tensors."""
        return self.tensors[0].device


@dataclass(frozen=True)
class Plan:
    """The buckets in the order in which they are exchanged."""

    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, groups: Iterable[tuple[Sequence[TensorSpec], int] | tuple[Sequence[TensorSpec], int, bool]]) -> Plan:
        """Build a plan from (tensors, number of the method) groups, cut further where dtype or device change.

        False and True will do for 0, not compressed, and 1, the only method. A third part says whether the
        group travels uncompressed nevertheless.
        """
        buckets: list[Bucket] = []
        for tensors, method, *plain in groups:
            for run in _runs(tensors):
                buckets.append(Bucket(len(buckets), tuple(run), int(method), any(plain)))
        return cls(tuple(buckets))

    @property
    def count(self) -> int:
        """Elements of all tensors."""
        return sum(bucket.count for bucket in self.buckets)

    def names(self) -> list[str]:
        """Return the name of every tensor, in plan order."""
        return [tensor.name for bucket in self.buckets for tensor in bucket.tensors]

    def document(self) -> list[dict[str, Any]]:
        """Return the plan as plain data, for the handshake and for files."""
        return [
            {"method": bucket.method, "tensors": [[t.name, list(t.shape), t.dtype] for t in bucket.tensors]}
            | ({"plain": True} if bucket.plain else {})
            for bucket in self.buckets
        ]

    @classmethod
    def from_document(cls, document: Any) -> Plan:
        """Rebuild a plan from :meth:`document`.

        Raises:
            ConfigError: says what is malformed.
        """
        if not isinstance(document, list):
            raise ConfigError(f"a plan should be a list of buckets, got {type(document).__name__}")
        return cls(tuple(_bucket(index, entry) for index, entry in enumerate(document)))

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, which :meth:`load` reads."""
        with naming(path):
            Path(path).write_text(json.dumps(self.document()) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file written by :meth:`save` or ``hvd-compress plan --save``.

        Raises:
            ConfigError: there is no plan in the file.
        """
        try:
            return cls.from_document(json.loads(Path(path).read_text()))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not a plan: {type(error).__name__}: {error}") from None

    def fingerprint(self) -> str:
        """Return a short hash that differs whenever two plans differ."""
        text = json.dumps(self.document(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def placed(self, tensors: Iterable[TensorSpec]) -> Plan:
        """Return the same plan with the devices that this rank has these tensors on.

        Raises:
            ConfigError: a bucket would hold tensors of several devices.
        """
        device = {tensor.name: tensor.device for tensor in tensors}
        buckets = []
        for bucket in self.buckets:
            moved = tuple(replace(t, device=device.get(t.name, t.device)) for t in bucket.tensors)
            if len(found := {tensor.device for tensor in moved}) > 1:
                raise ConfigError(
                    f"bucket {bucket.index} of the plan should hold tensors of one device, it holds {sorted(found)}; "
                    f"make the plan from this model where it is trained"
                )
            buckets.append(replace(bucket, tensors=moved))
        same = all(a.tensors[0].device == b.tensors[0].device for a, b in zip(buckets, self.buckets, strict=True))
        return self if same else Plan(tuple(buckets))

    def check_covers(self, tensors: Sequence[TensorSpec]) -> None:
        """Refuse a plan that does not hold exactly these tensors, once each.

        Raises:
            ConfigError: names the first difference.
        """
        for bucket in self.buckets:
            if len({tensor.dtype for tensor in bucket.tensors}) != 1:
                raise ConfigError(
                    f"bucket {bucket.index} of the plan should hold tensors of one dtype, it holds "
                    f"{sorted({tensor.dtype for tensor in bucket.tensors})}"
                )
        planned = {t.name: t for bucket in self.buckets for t in bucket.tensors}
        if len(planned) != len(self.names()):
            raise ConfigError("the plan holds a tensor twice; every tensor belongs to one bucket")
        for tensor in tensors:
            if (found := planned.get(tensor.name)) != tensor:
                theirs = f"it as {_told(found)}" if found else "no such tensor"
                raise ConfigError(
                    f"the model has {tensor.name} as {_told(tensor)}, the plan has {theirs}; make the plan from this "
                    "model's parameters"
                )
        if extra := sorted(set(planned) - {tensor.name for tensor in tensors}):
            raise ConfigError(
                f"the plan holds tensors that the model does not have: {some_of(extra)}; make the plan from this "
                "model's parameters"
            )


def _told(tensor: TensorSpec) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"


def _bucket(index: int, entry: Any) -> Bucket:
    """Return a bucket from its entry in a document.

    Raises:
        ConfigError: says what is malformed.
    """
    method, plain = (entry.get("method"), entry.get("plain", False)) if isinstance(entry, dict) else (None, None)
    if type(method) is not int or not 0 <= method < _MOST_METHODS or type(plain) is not bool:
        raise ConfigError(
            f"bucket {index} of a plan should have the number of its method, and its tensors; got {entry!r:.100}"
        )
    tensors = entry.get("tensors")
    if not isinstance(tensors, list) or not tensors or not all(map(_is_tensor, tensors)):
        raise ConfigError(
            f"bucket {index} of a plan should have tensors as [name, shape, dtype], at least one; got {tensors!r:.100}"
        )
    return Bucket(index, tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in tensors), method, plain)


def _is_tensor(entry: Any) -> bool:
    if not isinstance(entry, (list, tuple)) or len(entry) != 3:
        return False
    name, shape, dtype = entry
    if type(name) is not str or dtype not in DTYPES or not isinstance(shape, (list, tuple)):
        return False
    return all(type(size) is int and size >= 0 for size in shape) and math.prod(shape) < _MOST_ELEMENTS


def _runs(tensors: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Cut a list where dtype or device change: a bucket is one flat buffer of one dtype on one device."""
    runs: list[list[TensorSpec]] = []
    for tensor in tensors:
        if not runs or (runs[-1][0].dtype, runs[-1][0].device) != (tensor.dtype, tensor.device):
            runs.append([])
        runs[-1].append(tensor)
    return runs


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a text such as ``25MB``.

    Raises:
        ConfigError: the text is no positive number with one of the units B, KB, MB, GB.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B)", text.strip(), re.IGNORECASE)
    size = int(min(float(match[1]) * _UNITS[match[2].upper()], _MOST_SIZE)) if match else 0
    if size < 1:
        raise ConfigError(f'schedule="size:N" takes a size such as 25MB or 512KB, got {text!r}')
    return size


def by_size(tensors: Sequence[TensorSpec], argument: str) -> list[list[TensorSpec]]:
    """Return groups that are closed as soon as they would exceed the size."""
    groups, first = [], 0
    for count in runs_within([tensor.count * _BYTES[tensor.dtype] for tensor in tensors], parse_bytes(argument)):
        groups.append(list(tensors[first : first + count]))
        first += count
    return groups


def runs_within(sizes: Sequence[int], limit: int) -> list[int]:
    """Return how many consecutive sizes each group holds if none exceeds the limit that need not."""
    counts: list[int] = []
    room = 0
    for size in sizes:
        if not counts or size > room:
            counts.append(0)
            room = limit
        counts[-1] += 1
        room -= size
    return counts


def check_no_argument(schedule: str, argument: str) -> None:
    """Refuse an argument.

    Raises:
        ConfigError: there is one.
    """
    if argument:
        raise ConfigError(f'schedule="{schedule}" takes no argument, got {argument!r}')


def layerwise(tensors: Sequence[TensorSpec], argument: str) -> list[list[TensorSpec]]:
    """Return every tensor as its own group."""
    check_no_argument("layerwise", argument)
    return [[tensor] for tensor in tensors]


def single(tensors: Sequence[TensorSpec], argument: str) -> list[list[TensorSpec]]:
    """Return all tensors as one group."""
    check_no_argument("single", argument)
    return [list(tensors)] if tensors else []
