"""Names of methods and their options, for type checkers, and for checks that need no torch.

Written by tools/make_types.py from the methods' options.
"""

from __future__ import annotations

from typing import Any, Literal

MethodName = Literal[
    "none",
    "fp16",
    "bf16",
    "dgc",
    "ef_signsgd",
    "global_qsgd",
    "homomorphic",
    "marsit",
    "natural",
    "onebit",
    "onebit_adam",
    "powersgd",
    "qsgd",
    "randomk",
    "signsgd",
    "signum",
    "sketch_fusion",
    "spardl",
    "sparse_binary",
    "stc",
    "terngrad",
    "topk",
    "fp8",
    "gmc",
    "loco",
    "sparse_dithering",
    "scalecom",
    "sbc",
    "diloco",
    "sparse_loco",
    "cd_sgd",
]

#: The own options of each method, with the values that they can have where these can be counted.
OPTIONS: dict[str, dict[str, tuple[Any, ...] | None]] = {
    "none": {},
    "fp16": {},
    "bf16": {},
    "dgc": {"density": None, "momentum": None, "masking": (True, False), "ramp_steps": None, "clip": None, "momentum_kind": ("local", "global"), "value_bits": (2, 4, 8, 16, 32)},
    "ef_signsgd": {"step_size": ("tensor", "row"), "step_scale": None, "residual_dtype": ("float32", "bfloat16")},
    "global_qsgd": {"dithering": ("standard", "exponential"), "bits": None, "norm": ("max", 1, 2, 4), "block": None, "across": ("max", 1, 2, 4, None), "levels": None, "rounding": ("independent", "correlated", "nearest"), "feedback": ("none", "average"), "beta": None, "reset_every": None, "residual_bits": None},
    "homomorphic": {"block": None},
    "marsit": {"full_precision_every": None, "step_size": None, "compensation": ("none", "own", "global"), "zeros": ("random", "positive"), "residual_decay": None, "merge": ("shaped", "sampled"), "step_scale": None, "levels": (2, 3, None), "residual_dtype": ("float32", "bfloat16")},
    "natural": {"mantissa": (0, 2)},
    "onebit": {"step_size": ("tensor", "row"), "step_scale": None, "residual_dtype": ("float32", "bfloat16")},
    "onebit_adam": {"scale": ("l1", "l2"), "block": None, "step_scale": None, "owner_scale": ("shared", "own")},
    "powersgd": {"rank": None, "error_feedback": (True, False)},
    "qsgd": {"bits": None, "block": None, "norm": ("max", 2), "coding": ("packed", "elias"), "rounding": ("independent", "correlated", "nearest"), "feedback": ("none", "average"), "beta": None, "reset_every": None, "residual_bits": None, "error": None},
    "randomk": {"density": None, "scaled": (True, False), "block": None},
    "signsgd": {"step_size": None, "zeros": ("random", "positive"), "ties": ("random", "positive"), "merge": ("majority", "shaped")},
    "signum": {"beta": None, "step_size": None, "zeros": ("random", "positive"), "ties": ("random", "positive"), "merge": ("majority", "shaped")},
    "sketch_fusion": {"density": None, "cells": None, "rows": (1, 3, 5), "candidates": None, "momentum": None, "error_feedback": ("dense", "sketch")},
    "spardl": {"density": None, "value_bits": (2, 4, 8, 16, 32)},
    "sparse_binary": {"density": None, "preset": (1, 2, 3, None)},
    "stc": {"density": None},
    "terngrad": {"clip": None, "bits": (4, 8, 16), "rounding": ("independent", "correlated")},
    "topk": {"density": None, "value_bits": (2, 4, 8, 16, 32), "positions": ("own", "leader"), "filter": None, "chunk": None, "residual_decay": None, "average": ("ranks", "senders")},
}
