"""What a communication hook cannot serve is refused by name, before the first step where that can be seen then."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...engine.optimizer.step_hooks import calls_hooks, in_words
from ...engine.shards import is_divided
from ...errors import ConfigError, HorovodCompressError, anew, some_of
from ..copies import Copied

NO_JOIN = (
    "DistributedDataParallel's join() with uneven batches is not supported: a rank without batches would still have "
    "to send its residuals and step its optimizer. Give every rank the same number of steps, for example with "
    "drop_last=True"
)
PYTHON_REDUCER = (
    'torch._dynamo.config.optimize_ddp = "python_reducer" hands gradients over one by one, not in the buckets that a '
    'compression takes: set it to "ddp_optimizer", or leave it out, before DistributedDataParallel is created'
)

COMPILED_AUTOGRAD = (
    "compiled autograd has no end of a backward pass, where results are waited for: leave out "
    "torch._dynamo.config.compiled_autograd = True; torch.compile(model) alone compiles both passes of the model, and "
    "works"
)

Named = Sequence[tuple[str, nn.Parameter]]


def check_model(model: DistributedDataParallel, group: object, named: Named, others: Named) -> None:
    """Refuse a wrapped model that does not fit a compression.

    Args:
        named: the parameters that are exchanged.
        others: those that were frozen when the compression was created.

    Raises:
        ConfigError: says what to do.
    """
    if model.process_group is not group:
        raise ConfigError(
            "give DistributedDataParallel and the compression the same process_group=; a wrapper from before "
            "torch.distributed was initialized again has the former one: wrap the model again"
        )
    hooks = [hook for hook, state in getattr(model, "_comm_hooks", ()) if not isinstance(state, Copied)]
    if hooks or getattr(model, "mixed_precision", None):
        raise ConfigError(
            "this DistributedDataParallel has a communication hook already, or mixed_precision=, which sets one; it "
            "can have only one: wrap the model again, and use torch.autocast"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise ConfigError(
            "this DistributedDataParallel has skip_all_reduce_unused_params=True, which withholds buckets from its "
            "hook in some steps; wrap the model again without it"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ConfigError(PYTHON_REDUCER)
    check_parameters(_reduced(model), model.module, named, others)


#: Modules whose parameters, or gradients, are not whole or not this rank's own, with where torch or others have them.
_NOT_WHOLE = (
    ("torch.nn.parallel.data_parallel", "DataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("deepspeed", "DeepSpeedEngine"),
)
_DIVIDED = (("torch.distributed.fsdp", "FSDPModule"),)
#: What to do with a model of which each rank has a part.
INSTEAD = "for a model that fully_shard() divides, import horovod_compress.fsdp instead (docs/fsdp.md)"


def check_unwrapped(model: object, named: Named, others: Named) -> None:
    """Refuse a module that does not fit a compression; see :func:`check_model`.

    Raises:
        ConfigError: says what to do.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"register() takes a module, or DistributedDataParallel(module), got {model!r:.200}")
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                f"{name} of this module is a DistributedDataParallel, which exchanges its gradients itself: give "
                "register() that, or the module without the wrapper"
            )
        if isinstance(module, _known(_NOT_WHOLE)):
            raise ConfigError(
                f"{name or 'this module'} has the class {type(module).__name__}, whose parameters or gradients are "
                "divided among devices or exchanged by itself; give register() the module without it, or "
                "DistributedDataParallel(module)"
            )
        if isinstance(module, _known(_DIVIDED)):  # its parameters may be whole for now
            raise ConfigError(f"{name or 'this module'} is divided among ranks, by fully_shard(); {INSTEAD}")
    refuse_divided(model.named_parameters())
    check_parameters(model.named_parameters(), model, named, others)


def refuse_divided(named: Iterable[tuple[str, Tensor]], group: Any = None) -> None:
    """Refuse parameters of which each rank has a part.

    Args:
        group: only where ranks of this one have different parts; others may share tensors, say.

    Raises:
        ConfigError: names one, and what to do.
    """
    ours = {*dist.get_process_group_ranks(group)} if group else set()
    for name, parameter in named:
        if is_divided(parameter) and (group is None or any(len(ours.intersection(r)) > 1 for r in _divides(parameter))):
            raise ConfigError(f"{name} is divided among ranks, a DTensor; {INSTEAD}")


def _divides(parameter: Any) -> Iterator[list[int]]:
    """Yield the ranks among which a DTensor is divided, for each dimension of its mesh that divides it."""
    mesh = parameter.device_mesh
    for dimension, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            yield dist.get_process_group_ranks(mesh.get_group(dimension))


def _known(kinds: Sequence[tuple[str, str]]) -> tuple[type, ...]:
    """Return those of some classes that a program has imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in kinds)
    return tuple(kind for kind in found if isinstance(kind, type))


def check_parameters(
    trained: Iterable[tuple[str, nn.Parameter]], module: nn.Module, named: Named, others: Named
) -> None:
    """Refuse a list of parameters that is not what a module trains.

    Args:
        trained: the parameters that are to be exchanged, by name.
        module: has these.
        named, others: see :func:`check_model`.

    Raises:
        ConfigError: says which parameters are missing, or of another model.
    """
    ours, frozen = ({id(parameter): name for name, parameter in mine} for mine in (named, others))
    theirs = {id(p): name for name, p in trained if p.requires_grad}
    if thawed := [name for key, name in theirs.items() if key in frozen]:
        raise ConfigError(
            f"{len(thawed)} parameter(s) need a gradient now and were frozen when the compression was created: "
            f"{some_of(thawed)}; set requires_grad first, then create the "
            "compression, and the wrapper if there is one"
        )
    missing = [name for key, name in theirs.items() if key not in ours]
    if missing and len(missing) == len(theirs):
        raise ConfigError(
            "named_parameters has none of the model's parameters; a compression serves one model: create another one "
            "with the named_parameters() of this model"
        )
    if missing:
        raise ConfigError(
            f"named_parameters lacks {len(missing)} parameter(s) of the model: {some_of(missing)}; write "
            f"model.named_parameters()"
        )
    extra = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in theirs]
    left = {id(parameter) for parameter in module.parameters()}
    if extra and all(id(parameter) in left for name, parameter in named if name in extra):
        raise ConfigError(
            f"DistributedDataParallel leaves {len(extra)} parameter(s) of named_parameters out of its buckets: "
            f"{some_of(extra)}. They are ignored (_ddp_params_and_buffers_to_ignore), or their reduction is "
            "delayed (delay_all_reduce_named_params=), which torch does itself, uncompressed; give the compression the "
            "other parameters only, such as [(name, p) for name, p in model.named_parameters() if name not in "
            "ddp_model.parameters_to_ignore]"
        )
    if extra:
        raise ConfigError(
            f"named_parameters has {len(extra)} parameter(s) that the model does not have: {some_of(extra)}; "
            f"create a compression for each model"
        )


def _reduced(model: DistributedDataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model, without those that it was told to ignore."""
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    yield from ((name, parameter) for name, parameter in model.module.named_parameters() if name not in ignored)


def not_exchanged(model: nn.Module, named: Named) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a model that a compression does not exchange, as they were frozen."""
    ours = {id(parameter) for _, parameter in named}
    reduced = _reduced(model) if isinstance(model, DistributedDataParallel) else model.named_parameters()
    return [(name, parameter) for name, parameter in reduced if id(parameter) not in ours]


def refuse_no_optimizer(given: object) -> None:
    """Refuse an empty list where optimizers may be given.

    Raises:
        ConfigError: it is one.
    """
    if isinstance(given, (list, tuple)) and not given:
        raise ConfigError("register() takes an optimizer of torch.optim, or a list of several, got an empty list")


def check_optimizer(optimizer: object, named: Named) -> None:
    """Refuse what does not optimize the parameters of a compression.

    Raises:
        ConfigError: says what to do.
    """
    groups: Any = getattr(optimizer, "param_groups", None)
    wraps = isinstance(optimizer, Optimizer) and not calls_hooks(optimizer)
    if groups is None or wraps or not callable(getattr(optimizer, "register_step_pre_hook", None)):
        raise ConfigError(
            f"what register() or attach() takes is an optimizer of torch.optim, got {in_words(optimizer)}; of a "
            "wrapper, give the optimizer that it wraps, whose step() moves the weights"
        )
    ours = {id(parameter) for _, parameter in named}
    if not any(id(parameter) in ours for group in groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer has none of the parameters in named_parameters; create it from the same model, after you "
            "move the model to its device. Copies of the parameters in another precision, which a program moves "
            "itself, are not supported: train a float32 model under torch.autocast"
        )


def refuse_to_go_on(model: DistributedDataParallel, error: HorovodCompressError) -> None:
    """Let a model's next forward pass say what ended its last backward pass; torch would speak of itself.

    Args:
        error: training cannot go on after it.
    """
    told = anew(error)
    stock: Callable[..., Any] = model.forward

    def forward(*given: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() and model.training:
            raise anew(told)
        return stock(*given, **options)

    model.forward = forward  # type: ignore[method-assign]


class RefusedJoin:
    """Stands for the hook that DistributedDataParallel's ``join()`` asks for; a copy of the model has its own again."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def __call__(self, **options: Any) -> NoReturn:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(NO_JOIN)

    def __reduce__(self) -> Any:
        return partial, (DistributedDataParallel.join_hook, self._model)


def numbers(parameters: Sequence[Tensor], index: Mapping[int, int], rank: int) -> list[int]:
    """Return the numbers of a bucket's parameters in the plan.

    Args:
        index: the number of each parameter of the compression, by identity.

    Raises:
        ConfigError: one is none of ours.
    """
    found = [index.get(id(parameter)) for parameter in parameters]
    if None in found:
        shape = tuple(parameters[found.index(None)].shape)
        raise ConfigError(
            f"rank {rank}: the model has a parameter of shape {shape} that is not one of the {len(index)} in "
            "named_parameters; give the compression all parameters of the model"
        )
    return [number for number in found if number is not None]


def refuse_compiled_autograd() -> None:
    """Refuse a backward pass that compiled autograd runs; where a program only allows it, others run as ever.

    Raises:
        ConfigError: this is one.
    """
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and getattr(compiled, "in_compiled_autograd_region", False):
        raise ConfigError(COMPILED_AUTOGRAD)


# ---- ZeroRedundancyOptimizer, each of whose ranks steps its own share of the parameters ----

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def refuse_sharded(optimizer: Any, own: bool) -> None:
    """Refuse an optimizer whose second moment is divided among the ranks.

    Args:
        own: nobody is to hold a second moment; then the whole of it can be served, not the share of one rank.

    Raises:
        ConfigError: says what to do.
    """
    kind: Any = getattr(sys.modules.get(_MODULE), "ZeroRedundancyOptimizer", None)
    if kind is None:
        return
    if isinstance(optimizer, kind):
        if not own and not isinstance(getattr(optimizer, "optim", None), torch.optim.SGD):  # which has none
            raise ConfigError(
                "ZeroRedundancyOptimizer divides its state among the ranks, and a second moment that is held has to "
                "be whole on every rank: give DistributedDataParallel's model the plain optimizer, or write "
                'second_moment="own", with which training is slower, or choose a method that needs none held, such as '
                "global_qsgd or fp16"
            )
    elif any(found.optim is optimizer for found in gc.get_objects() if issubclass(type(found), kind)):
        raise ConfigError(
            "this optimizer is the .optim of a ZeroRedundancyOptimizer, which has only this rank's share of the "
            "parameters: use the plain optimizer without ZeroRedundancyOptimizer, or give that itself with "
            'second_moment="own"'
        )


# ---- modules as they are, in a wrapper that exchanges as well ----


def refuse_averaged(parameters: Iterable[Tensor], group: Any) -> None:
    """Refuse to exchange updates where DistributedDataParallel averages the gradients over some of the same ranks.

    Over others it may: ranks of one host average gradients, say, and one of each host exchanges updates.

    Args:
        group: the ranks that would exchange updates.

    Raises:
        ConfigError: says what to do.
    """
    ours, ranks = {id(parameter) for parameter in parameters}, {*dist.get_process_group_ranks(group)}

    def averages(found: DistributedDataParallel) -> bool:
        over: Any = getattr(found, "process_group", None)
        if over not in dist.distributed_c10d._world.pg_map:  # of a job before, which averages nothing any more
            return False
        if not isinstance(getattr(found, "module", None), nn.Module):  # it was refused itself, half made
            return False
        shared = ranks.intersection(dist.get_process_group_ranks(over))
        return len(shared) > 1 and any(id(parameter) in ours for parameter in reduced(found))

    def any_averages() -> bool:
        return any(issubclass(type(found), DistributedDataParallel) and averages(found) for found in gc.get_objects())

    if any_averages():
        gc.collect()  # a wrapper that was dropped stays until then
        if any_averages():
            raise ConfigError(
                "this model is in DistributedDataParallel, which averages gradients over ranks that are to exchange "
                "updates: in update mode gradients stay on their rank. Train the model as it is, and drop the wrapper; "
                "or register() the wrapped model, to exchange gradients"
            )


def reduced(model: DistributedDataParallel) -> Iterator[nn.Parameter]:
    """Return the parameters whose gradients DistributedDataParallel averages."""
    return (parameter for _, parameter in _reduced(model))


def sparse_in(module: nn.Module) -> set[int]:
    """Return the parameters whose gradients are sparse, by identity, as DistributedDataParallel expects it too."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(found.weight) for found in module.modules() if isinstance(found, kinds) and found.sparse}


def mean_of(grad: Tensor, group: Any) -> Any:
    """Return a future of the mean over ranks, which travels as indices and values."""
    share = grad / dist.get_world_size(group)
    return dist.all_reduce(share, group=group, async_op=True).get_future().then(lambda done: done.value()[0])
