# Written by tools/make_types.py from the methods' options.

from collections.abc import Mapping

from torch.distributed.device_mesh import DeviceMesh as Ranks
from typing_extensions import Self, Unpack

from ...codecs import option_types as of
from ...codecs.base import Codec
from ...codecs.masked import Masked
from ...known import MethodName
from ..factories import NamedParameters as Named

class Factories:
    @classmethod
    def none(cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForNone]) -> Self: ...
    @classmethod
    def fp16(cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForFp16]) -> Self: ...
    @classmethod
    def bf16(cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForBf16]) -> Self: ...
    @classmethod
    def dgc(cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForDgc]) -> Self: ...
    @classmethod
    def ef_signsgd(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForEfSignsgd]
    ) -> Self: ...
    @classmethod
    def global_qsgd(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForGlobalQsgd]
    ) -> Self: ...
    @classmethod
    def homomorphic(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForHomomorphic]
    ) -> Self: ...
    @classmethod
    def marsit(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForMarsit]
    ) -> Self: ...
    @classmethod
    def natural(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForNatural]
    ) -> Self: ...
    @classmethod
    def onebit(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForOnebit]
    ) -> Self: ...
    @classmethod
    def onebit_adam(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForOnebitAdam]
    ) -> Self: ...
    @classmethod
    def powersgd(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForPowersgd]
    ) -> Self: ...
    @classmethod
    def qsgd(cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForQsgd]) -> Self: ...
    @classmethod
    def randomk(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForRandomk]
    ) -> Self: ...
    @classmethod
    def signsgd(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForSignsgd]
    ) -> Self: ...
    @classmethod
    def signum(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForSignum]
    ) -> Self: ...
    @classmethod
    def sketch_fusion(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForSketchFusion]
    ) -> Self: ...
    @classmethod
    def spardl(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForSpardl]
    ) -> Self: ...
    @classmethod
    def sparse_binary(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForSparseBinary]
    ) -> Self: ...
    @classmethod
    def stc(cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForStc]) -> Self: ...
    @classmethod
    def terngrad(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForTerngrad]
    ) -> Self: ...
    @classmethod
    def topk(cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForTopk]) -> Self: ...
    @classmethod
    def fp8(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForNatural]
    ) -> Self: ...
    @classmethod
    def gmc(cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForDgc]) -> Self: ...
    @classmethod
    def loco(cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForQsgd]) -> Self: ...
    @classmethod
    def sparse_dithering(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForQsgd]
    ) -> Self: ...
    @classmethod
    def scalecom(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForTopk]
    ) -> Self: ...
    @classmethod
    def sbc(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForSparseBinary]
    ) -> Self: ...
    @classmethod
    def diloco(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForNone]
    ) -> Self: ...
    @classmethod
    def sparse_loco(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForTopk]
    ) -> Self: ...
    @classmethod
    def cd_sgd(
        cls, named_parameters: Named, *, replicate: Ranks | None = ..., **options: Unpack[of.ForMarsit]
    ) -> Self: ...
    @classmethod
    def create(
        cls,
        method: MethodName | Codec | Masked,
        named_parameters: Named,
        *,
        replicate: Ranks | None = ...,
        **options: Unpack[of.ForSomeMethod],
    ) -> Self: ...
    @classmethod
    def per_layer(
        cls,
        methods: Mapping[str, MethodName | Codec | Masked],
        named_parameters: Named,
        *,
        replicate: Ranks | None = ...,
        **options: Unpack[of.AllMethods],
    ) -> Self: ...
