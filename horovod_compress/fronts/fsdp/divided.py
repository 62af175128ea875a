"""What is refused of models that ``fully_shard`` has divided, and of those that it has not, by name and in time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ...engine.methods import parse
from ...errors import ConfigError
from ..torch_dist.checks import check_parameters
from ..torch_dist.hooks import ParameterHook, leave_other
from .grid import RECIPE

Named = Sequence[tuple[str, nn.Parameter]]

#: By torch's `replicate()`, which makes modules that are not divided of the same kind.
_REPLICATED = "ReplicateModule"


def modules(model: nn.Module) -> Iterator[Any]:
    """Yield the modules that ``fully_shard`` was called with."""
    yield from (module for module in model.modules() if isinstance(module, FSDPModule))


def check_options(method: Any, options: Mapping[str, Any], shards: int) -> None:
    """Refuse options that look at a whole tensor, or a whole host, where a rank has a shard.

    Args:
        method: its name, or what makes it.

    Raises:
        ConfigError: says what to do.
    """
    methods, chosen = parse(method, options)
    if chosen.exchange == "hierarchical":
        raise ConfigError(
            'exchange="hierarchical" shares tensors among the ranks of a host, and fully_shard() does so already: '
            'divide the model within a host, and leave exchange="auto"'
        )
    if shards > 1 and methods.masked:
        raise ConfigError("masked() looks at whole tensors, and is not supported for a model of several shards yet")


def leave_others(named: Named) -> None:
    """Take the hooks of a closed compression from parameters, and refuse those of others.

    Raises:
        ConfigError: says which parameter has one.
    """
    leave_other(parameter for _, parameter in named)
    for name, parameter in named:
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            if isinstance(hook, ParameterHook):
                continue
            raise ConfigError(
                f"{name} has a hook that is called when its gradient is there, {_name_of(hook)}, such as an "
                "optimizer's step in the backward pass; gradients are those of all replicas only when backward() "
                "returns: let the optimizer make its step after that"
            )


def _name_of(hook: object) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def check_model(model: object, named: Named, others: Named) -> None:
    """Refuse a model that does not fit a compression.

    Args:
        named: the parameters that are exchanged.
        others: those that were frozen when the compression was created.

    Raises:
        ConfigError: says what to do.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"register() takes a module that fully_shard() divides, got {model!r:.200}")
    for name, module in model.named_modules():
        if isinstance(module, (FullyShardedDataParallel, DistributedDataParallel)):
            raise ConfigError(
                f"{name or 'this module'} has the class {type(module).__name__}, which exchanges gradients itself; "
                f"give register() a module that was divided by fully_shard(). Write {RECIPE}"
            )
        if _REPLICATED in (kind.__name__ for kind in type(module).__mro__):
            raise ConfigError(
                f"{name or 'this module'} was given to replicate(), which averages gradients uncompressed before "
                f"anybody sees them; call fully_shard() with a mesh of one rank instead. Write {RECIPE}"
            )
    if not any(modules(model)):
        raise ConfigError(
            "fully_shard() was not called with this module, or with any in it: call it first, and then create the "
            "compression; for a model that is whole on every rank, use horovod_compress.ddp"
        )
    check_parameters(model.named_parameters(), model, named, others)


class DivideFactors:
    """What torch is told to divide sums of gradients by, in place of the mean; keeps no model alive.

    Torch's own hybrid sharding divides the sum over all ranks by it. Here torch adds up within a replica, and results
    are means over replicas: with a factor of 1/replicas of that, they are what torch's would be.

    Args:
        replicas: their number.
    """

    def __init__(self, model: nn.Module, replicas: int) -> None:
        self._replicas = replicas
        self._groups: list[tuple[str, weakref.ref[Any]]] = []
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()
                groups = getattr(state, "_fsdp_param_groups", None)
                if groups is None:  # an older torch has one at most
                    groups = [getattr(state, "_fsdp_param_group", None)]
                self._groups += [(name or "the model itself", weakref.ref(group)) for group in groups if group]

    def refuse_twice(self) -> None:
        """Refuse factors where a replica is one rank, and torch would divide by them twice.

        Raises:
            ConfigError: says what to multiply the loss by instead.
        """
        for name, group, factor in self._found():
            policy = group.mp_policy
            own = {policy.reduce_dtype or policy.param_dtype or one.sharded_param.dtype for one in group.fsdp_params}
            forced = getattr(group, "force_sum_reduction_for_comms", False)
            if forced or not own <= {torch.float32, torch.bfloat16}:
                raise ConfigError(
                    f"set_gradient_divide_factor({factor:g}) was called for {name}, by which torch divides twice where "
                    "a replica is one rank, and gradients are reduced by sums or in another dtype than float32 and "
                    f"bfloat16: leave it out, and multiply the loss by {self._replicas / factor:g}"
                )

    def share(self) -> None:
        """Let torch divide by a replica's share of each factor."""
        for _, group, factor in self._found():
            whole = factor.whole if isinstance(factor, _Shared) else factor
            group.gradient_divide_factor = _Shared(whole, self._replicas, self)

    def give_back(self) -> None:
        """Let torch divide by what the program has said."""
        for _, group, factor in self._found():
            if isinstance(factor, _Shared) and factor.by is self:
                group.gradient_divide_factor = factor.whole

    def refuse_others(self) -> None:
        """Refuse factors that came later: hundreds of modules take microseconds.

        Raises:
            ConfigError: says what to do.
        """
        for name, _, factor in self._found():
            if isinstance(factor, _Shared):
                continue
            raise ConfigError(
                f"set_gradient_divide_factor({factor:g}) was called for {name} after register(), which has to know "
                "the factor, as torch adds up within a replica only: call it before register(), and for a factor that "
                "changes multiply the loss instead"
            )

    def _found(self) -> Iterator[tuple[str, Any, float]]:
        """Yield module, group and factor of each group that has one."""
        for name, reference in self._groups:
            # Torch before 2.8 has another attribute, beside which it takes the mean over replicas, as is done here.
            factor = getattr(group := reference(), "gradient_divide_factor", None)
            if factor is not None:
                yield name, group, factor


class _Shared(float):
    """A replica's share of a factor."""

    whole: float
    by: DivideFactors

    def __new__(cls, whole: float, replicas: int, by: DivideFactors) -> _Shared:
        made = super().__new__(cls, whole / replicas)
        made.whole, made.by = whole, by
        return made


def shard_mesh(named: Named) -> DeviceMesh:
    """Return the dimension of the mesh along which parameters are divided.

    Raises:
        ConfigError: some are not divided, or otherwise, or along another one.
    """
    meshes: dict[DeviceMesh, str] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        if not isinstance(parameter, DTensor):
            raise ConfigError(
                f"{name} is not divided among ranks: call fully_shard() with the whole model, after its blocks, and "
                "then create the compression, with the parameters that the model has by then; a forward pass without a "
                "backward one leaves some whole, and model.reshard() divides those of one module only: write "
                "[module.reshard() for module in model.modules() if isinstance(module, FSDPModule)] first"
            )
        mesh, kinds = parameter.device_mesh, parameter.placements
        if mesh.ndim > 1 and any(kind.is_replicate() for kind in kinds):
            raise ConfigError(
                f"{name} is divided by a mesh of {mesh.ndim} dimensions, along one of which it is replicated: torch "
                "would average gradients over it, uncompressed, before anybody sees them. Give fully_shard() the "
                f"dimension that divides, and register() the other one. Write {RECIPE}"
            )
        if mesh.ndim > 1 or not kinds[0].is_shard():
            raise ConfigError(
                f"{name} is divided as {kinds} by a mesh of {mesh.ndim} dimension(s); only fully_shard() with a mesh "
                f"of one dimension is supported, without tensor parallelism. Write {RECIPE}"
            )
        meshes.setdefault(mesh, name)
    if len(meshes) > 1:
        raise ConfigError(
            f"{' and '.join(list(meshes.values())[:2])} are divided along different dimensions, {[*meshes]!r:.200}, "
            "which is not supported: give all calls of fully_shard() the same mesh"
        )
    return next(iter(meshes))
