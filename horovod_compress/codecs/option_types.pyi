# Written by tools/make_types.py from the methods' options.

from typing import Literal, TypedDict

from typing_extensions import Unpack

from ..known import MethodName
from ..schedule.plan import Plan
from .base import Codec

class AllMethods(TypedDict, total=False):
    schedule: str | Plan
    exchange: str
    transport: Literal["auto", "gloo", "nccl", "local"]
    seed: int
    timeout: float | None
    nonfinite: Literal["propagate", "raise", "zero"]
    verify_every: int
    min_elements: int
    warmup_steps: int | None
    total_steps: int | None
    follow_lr: bool

class ForNone(AllMethods, total=False): ...
class ForFp16(AllMethods, total=False): ...
class ForBf16(AllMethods, total=False): ...

class ForDgc(AllMethods, total=False):
    density: float
    momentum: float
    masking: bool
    ramp_steps: int
    clip: float
    momentum_kind: Literal["local", "global"]
    value_bits: Literal[2, 4, 8, 16, 32]

class ForEfSignsgd(AllMethods, total=False):
    step_size: Literal["tensor", "row"]
    step_scale: float
    residual_dtype: Literal["float32", "bfloat16"]

class ForGlobalQsgd(AllMethods, total=False):
    dithering: Literal["standard", "exponential"]
    bits: int
    norm: Literal["max", 1, 2, 4]
    block: int
    across: Literal["max", 1, 2, 4] | None
    levels: int | None
    rounding: Literal["independent", "correlated", "nearest"]
    feedback: Literal["none", "average"]
    beta: float | None
    reset_every: int | None
    residual_bits: int | None

class ForHomomorphic(AllMethods, total=False):
    block: int

class ForMarsit(AllMethods, total=False):
    full_precision_every: int
    step_size: Literal["tensor", "row"] | float
    compensation: Literal["none", "own", "global"]
    zeros: Literal["random", "positive"]
    residual_decay: float | None
    merge: Literal["shaped", "sampled"]
    step_scale: float | None
    levels: Literal[2, 3] | None
    residual_dtype: Literal["float32", "bfloat16"]
    full_precision_dtype: Literal["float32", "bfloat16"]

class ForNatural(AllMethods, total=False):
    mantissa: Literal[0, 2]

class ForOnebit(AllMethods, total=False):
    step_size: Literal["tensor", "row"]
    step_scale: float
    residual_dtype: Literal["float32", "bfloat16"]

class ForOnebitAdam(AllMethods, total=False):
    scale: Literal["l1", "l2"]
    block: int
    step_scale: float | None
    owner_scale: Literal["shared", "own"]

class ForPowersgd(AllMethods, total=False):
    rank: int
    error_feedback: bool

class ForQsgd(AllMethods, total=False):
    bits: int
    block: int
    norm: Literal["max", 2]
    coding: Literal["packed", "elias"]
    rounding: Literal["independent", "correlated", "nearest"]
    feedback: Literal["none", "average"]
    beta: float | None
    reset_every: int | None
    residual_bits: int | None
    error: float

class ForRandomk(AllMethods, total=False):
    density: float
    scaled: bool
    block: int

class ForSignsgd(AllMethods, total=False):
    step_size: Literal["tensor", "row"] | float
    zeros: Literal["random", "positive"]
    ties: Literal["random", "positive"]
    merge: Literal["majority", "shaped"]

class ForSignum(AllMethods, total=False):
    beta: float
    step_size: Literal["tensor", "row"] | float
    zeros: Literal["random", "positive"]
    ties: Literal["random", "positive"]
    merge: Literal["majority", "shaped"]

class ForSketchFusion(AllMethods, total=False):
    density: float
    cells: float
    rows: Literal[1, 3, 5]
    candidates: int
    momentum: float
    error_feedback: Literal["dense", "sketch"]

class ForSpardl(AllMethods, total=False):
    density: float
    value_bits: Literal[2, 4, 8, 16, 32]

class ForSparseBinary(AllMethods, total=False):
    density: float | None
    preset: Literal[1, 2, 3] | None

class ForStc(AllMethods, total=False):
    density: float

class ForTerngrad(AllMethods, total=False):
    clip: float
    bits: Literal[4, 8, 16]
    rounding: Literal["independent", "correlated"]

class ForTopk(AllMethods, total=False):
    density: float
    value_bits: Literal[2, 4, 8, 16, 32]
    positions: Literal["own", "leader"]
    filter: float
    chunk: int
    residual_decay: float
    average: Literal["ranks", "senders"]

class OfSomeMethod(TypedDict, total=False):
    density: float | None
    momentum: float
    masking: bool
    ramp_steps: int
    clip: float
    momentum_kind: Literal["local", "global"]
    value_bits: Literal[2, 4, 8, 16, 32]
    step_size: Literal["tensor", "row"] | float
    step_scale: float | None
    residual_dtype: Literal["float32", "bfloat16"]
    dithering: Literal["standard", "exponential"]
    bits: int
    norm: Literal["max", 1, 2, 4]
    block: int
    across: Literal["max", 1, 2, 4] | None
    levels: int | None
    rounding: Literal["independent", "correlated", "nearest"]
    feedback: Literal["none", "average"]
    beta: float | None
    reset_every: int | None
    residual_bits: int | None
    full_precision_every: int
    compensation: Literal["none", "own", "global"]
    zeros: Literal["random", "positive"]
    residual_decay: float | None
    merge: Literal["shaped", "sampled", "majority"]
    full_precision_dtype: Literal["float32", "bfloat16"]
    mantissa: Literal[0, 2]
    scale: Literal["l1", "l2"]
    owner_scale: Literal["shared", "own"]
    rank: int
    error_feedback: Literal["dense", "sketch"] | bool
    coding: Literal["packed", "elias"]
    error: float
    scaled: bool
    ties: Literal["random", "positive"]
    cells: float
    rows: Literal[1, 3, 5]
    candidates: int
    preset: Literal[1, 2, 3] | None
    positions: Literal["own", "leader"]
    filter: float
    chunk: int
    average: Literal["ranks", "senders"]

class ForSomeMethod(OfSomeMethod, AllMethods, total=False): ...

def method(name: MethodName, **options: Unpack[OfSomeMethod]) -> Codec: ...
