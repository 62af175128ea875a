"""Whatever the package makes of tensors, it says where: a program may have torch make them on another device."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch.utils._device import _device_constructors

import horovod_compress

PACKAGE = Path(horovod_compress.__file__).parent
MAKE_TENSORS = {function.__name__ for function in _device_constructors()}


def without_device(text: str) -> list[str]:
    """Return the calls of functions of torch's that would make a tensor on the default device."""
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in MAKE_TENSORS
        and not {"device", None} & {option.arg for option in call.keywords}
    ]


def test_tensors_are_made_on_devices_that_are_named() -> None:
    found = {path.relative_to(PACKAGE): without_device(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 200 and not {path: calls for path, calls in found.items() if calls}


def test_a_tensor_without_a_device_is_found() -> None:
    assert without_device("torch.zeros(3, dtype=torch.int8)") and without_device("torch.tensor([1])")
    assert not without_device('torch.zeros(3, device="cpu")') and not without_device("torch.zeros_like(3)")
