"""The compression object that Horovod's stock optimizer is given."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from types import MethodType
from typing import Any, ClassVar, TypeVar, cast

import horovod
import horovod.torch as hvd
import torch
from torch import Tensor, nn

from ...codecs import registry
from ...codecs.base import Codec
from ...codecs.registry import available
from ...engine import checkpoint
from ...engine.agreement import uneven, way
from ...engine.agreement.weights import Weights
from ...engine.methods import Methods, per_layer
from ...engine.optimizer import heavy_ball, held
from ...engine.optimizer.rates import Rates
from ...engine.optimizer.second_moment import REBUILD_EVERY, WARMUP_STEPS, check_state as check_moments
from ...engine.parameters import listed
from ...engine.reducer import Reducer
from ...engine.tuning import Tuner
from ...errors import ConfigError, ExchangeError, HorovodCompressError
from ...observe import trace as recording
from ...observe.trace import MAX_EVENTS, Trace
from ...schedule.plan import Plan
from ...schedule.policies.registry import OPTIONAL, is_adaptive
from .. import help_text
from . import saving
from .calls import (
    allgather_object,
    calling_optimizer,
    forget_step,
    in_backward,
    in_join,
    owner_of_token,
    waits_for_tokens,
)
from .ending import Run, end_all_waits, explain
from .startup import before_handshake, start

F = TypeVar("F", bound=Callable[..., Any])
NamedParameters = Iterable[tuple[str, nn.Parameter]]

_log = logging.getLogger("horovod_compress")
_PRIVATE_API = "0.28."  # the Horovod versions whose private methods attach() was written for


class _OfAnObject:
    """A method that says so where it is called on the class, as Horovod does when it is given that."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        return _refuse_class if instance is None else MethodType(self._function, instance)


def _of_an_object(function: F) -> F:
    return cast(F, _OfAnObject(function))


def _refuse_class(*given: object) -> Any:
    raise ConfigError(
        "hvc.Compression is a class: write compression = hvc.Compression.marsit(model.named_parameters()), or another "
        "method, and give that to the optimizer"
    )


class Compression:
    """A compression for ``hvd.DistributedOptimizer(compression=...)``.

    Create one by the name of a method, ``Compression.marsit(model.named_parameters(), ...)``, after
    ``hvd.init()`` and on every rank; the ranks then compare their options.

    ``hvc.available()`` lists the methods; ``help(hvc.Compression.marsit)`` shows a method's options, and those of
    all methods, with their defaults.

    Raises:
        ConfigError: an option or the parameter list cannot work, on this or another rank.
        MismatchError: the ranks were given different options, parameters or versions.
        ExchangeError: not every rank arrived in time.
    """

    none: ClassVar[Callable[..., Compression]]
    dgc: ClassVar[Callable[..., Compression]]
    fp16: ClassVar[Callable[..., Compression]]
    bf16: ClassVar[Callable[..., Compression]]
    ef_signsgd: ClassVar[Callable[..., Compression]]
    global_qsgd: ClassVar[Callable[..., Compression]]
    marsit: ClassVar[Callable[..., Compression]]
    natural: ClassVar[Callable[..., Compression]]
    qsgd: ClassVar[Callable[..., Compression]]
    randomk: ClassVar[Callable[..., Compression]]
    onebit: ClassVar[Callable[..., Compression]]
    onebit_adam: ClassVar[Callable[..., Compression]]
    powersgd: ClassVar[Callable[..., Compression]]
    signsgd: ClassVar[Callable[..., Compression]]
    signum: ClassVar[Callable[..., Compression]]
    sketch_fusion: ClassVar[Callable[..., Compression]]
    sparse_binary: ClassVar[Callable[..., Compression]]
    stc: ClassVar[Callable[..., Compression]]
    terngrad: ClassVar[Callable[..., Compression]]
    topk: ClassVar[Callable[..., Compression]]

    def __init__(
        self,
        method: str | Codec | Methods,
        named_parameters: NamedParameters,
        options: Mapping[str, Any],
        process_set: Any,
    ) -> None:
        _check_process_set(process_set)
        self.method = str(getattr(method, "name", method))
        self._process_set = process_set
        self._reducer: Reducer | None = None
        self._run = Run()
        self._warned = self._logged = False
        self._optimizer: Any = None  # the one that attach() was given
        self._under_way = 0  # gradients handed over whose results were not fetched yet
        self._settled = -1  # the step whose sparse gradients were looked for
        self._in_updates = False
        self._comparing = threading.Lock()
        self._compared_ways = False  # whether all ranks are known to be attached, or none
        self._tuner: Tuner | None = None
        self._held: held.HeldSecondMoment | None = None
        self._exact_first = 0  # so many first steps are exact
        self._rates: Rates | None = None  # that residuals follow
        self._met = False  # the optimizer
        self._frozen: list[nn.Parameter] = []  # of the step under way
        self._moments: Mapping[str, Any] = {}  # that were loaded
        self._followed: Sequence[float] = ()  # learning rates that were loaded
        self._scaler: Any = None  # the gradient scaler that is followed
        self._scale, self._bridged = 0.0, False  # of what is kept, 0 for not known; whether that is the scaler's
        if not process_set.included():
            self._parameters: list[nn.Parameter] = []
            return
        with before_handshake(process_set):
            self._named: Any = listed(named_parameters)
        self._start(method, options)

    def _start(self, method: str | Codec | Methods, options: Mapping[str, Any]) -> None:
        self._methods, self._reducer = start(method, self._named, options, self._process_set)
        self._reducer.on_unseen = self._wake
        self._reducer.uneven.in_join = in_join
        if self._reducer.world > 1:
            self._reducer.weights = Weights(self._reducer.options.verify_every, warns=self._reducer.rank == 0)
        self._reducer.gain = None  # the first token that comes back tells, or attach()
        self._owners = [owner_of_token() for _ in self._reducer.plan.names()]
        self._take_order()
        schedule = self._reducer.options.schedule
        if is_adaptive(schedule):
            first = self._reducer.options.warmup_steps or 0
            self._tuner = Tuner(self._reducer, str(schedule), self._share, self._methods, first)
            # Not a number of this process: others may have made more compressions, or fewer.
            self._tuning_name = f"hvc.tuning.{self._reducer.plan.fingerprint()}"
        self._reducer.check_usable = self._check_run
        _open.add(self)
        recording.follow(self._reducer, hvd.rank(), self.method)

    def _take_order(self) -> None:
        """Number the parameters as the plan has them."""
        by_name = dict(self._named)
        self._parameters = [by_name[name] for name in self._running().plan.names()]
        self._index = {id(p): index for index, p in enumerate(self._parameters)}
        self._order = list(range(len(self._parameters)))
        self._calls = 0

    @staticmethod
    def create(method: str | Codec, named_parameters: NamedParameters, **options: Any) -> Compression:
        """Create a compression by the name of its method.

        Args:
            method: one of :func:`available`, or what :func:`method` or :func:`by_step` returns.
            named_parameters: as given to the optimizer, in forward order; parameters that need no
                gradient are skipped.
            options: those of the method and those of all methods; ``process_set`` as for the optimizer.
        """
        process_set = options.pop("process_set", hvd.global_process_set)
        return Compression(method, named_parameters, options, process_set)

    @staticmethod
    def per_layer(methods: Mapping[str, str | Codec], named_parameters: NamedParameters, **options: Any) -> Compression:
        """Create a compression with different methods for different layers.

            hvc.Compression.per_layer({"embed*": hvc.method("topk", density=0.01), "*.bias": "none", "*": "marsit"},
                                      model.named_parameters())

        Args:
            methods: by pattern, names of methods or what :func:`method` or :func:`by_step` returns. A pattern has to
                match the whole name of a parameter; * stands for anything, ? for one character, [ab] for
                one of these. The first match counts, and every parameter needs one.
            named_parameters: as for :meth:`create`.
            options: those of all methods; give a method's own options to :func:`method`.
        """
        process_set = options.pop("process_set", hvd.global_process_set)
        _check_process_set(process_set)
        with before_handshake(process_set):
            found = per_layer(methods)
        return Compression(found, named_parameters, options, process_set)

    # ---- Horovod's contract ----

    @_of_an_object
    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Accept a gradient; Horovod all-reduces the one-element token that this returns."""
        if self._in_updates:
            raise ConfigError(_TAKEN)
        if self._is_repeat():
            return self._token(self._find(tensor)), tensor
        self._begin_step()
        index = self._find(tensor)
        return self._token(index), (index, self._offer(index, tensor))

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return the result for a token; other tensors pass through."""
        if not isinstance(ctx, tuple):
            return tensor if ctx is None else ctx
        index, step = ctx
        return self._result(index, step, gain=self._gain_of(tensor.item()))

    def attach(
        self,
        optimizer: Any,
        *,
        second_moment: str = "auto",
        warmup_steps: int = WARMUP_STEPS,
        rebuild_every: int | None = None,
    ) -> Any:
        """Connect a stock optimizer without tokens; return the optimizer.

        The bits are the same as without it. It saves one tiny all-reduce per parameter, and failures of
        other ranks reach the training thread as :class:`ExchangeError`. It uses private methods of
        Horovod 0.28; with another version it leaves the optimizer unchanged.

        Call it on every rank or on none, before the first backward pass: the ranks compare this at the first gradient.

        Args:
            optimizer: what ``hvd.DistributedOptimizer(..., compression=compression)`` returned.
            second_moment: "shared" updates that of Adam and AdamW in exact rounds only, and holds it in between, see
                :mod:`...engine.optimizer.held`; "own" leaves it to the optimizer; "auto" is "shared" with these two and
                methods that need it, else "own". "auto" also applies without ``attach()``.
            warmup_steps: with a shared second moment, number of exact rounds at the start; at least 1.
            rebuild_every: with a shared second moment, one round in this many is exact after that; by default the
                method's ``full_precision_every``, else 50.

        Raises:
            ConfigError: the optimizer was created with another compression, process set or operation, or gradients
                were exchanged before.
        """
        if self._in_updates:
            raise ConfigError(_TAKEN)
        if self._compared_ways:
            raise ConfigError(
                "attach() comes before the first backward pass, on every rank; this compression has exchanged "
                "gradients already: call it right after hvd.DistributedOptimizer(...)"
            )
        if getattr(optimizer, "_compression", None) is not self:
            raise ConfigError(
                "attach() takes the optimizer that was created with this compression: "
                "hvd.DistributedOptimizer(..., compression=compression)"
            )
        if hasattr(optimizer, "_starting_models"):
            raise ConfigError(_NO_ADASUM)
        self._check_same_ranks(optimizer)
        if not self._reducer:
            return optimizer
        self._meet(optimizer, second_moment, warmup_steps, rebuild_every)  # which needs nothing private
        if not horovod.__version__.startswith(_PRIVATE_API):
            _log.warning("Horovod %s is unknown to attach(); using the stock path instead", horovod.__version__)
            return optimizer
        self._reducer.gain = self._gain_for(optimizer.op)
        _attach(optimizer, self)
        self._optimizer = optimizer
        return optimizer

    def _meet(self, optimizer: Any, *options: Any) -> None:
        """Look at the optimizer that takes the results: its momentum, and its second moment."""
        heavy_ball.refuse_twice(optimizer, self._methods, self._named)
        text = heavy_ball.advice(optimizer, self._methods, self._named)
        if text and not self._met and self._running().rank == 0 and not self._running().step:
            _log.warning("%s", text)
        if not self._met:
            optimizer.register_step_pre_hook(lambda *given: self._leave_frozen(optimizer))  # before that of self._held
        self._held = held.hold(optimizer, self._running(), self._named, self._rebuild_every(), *options)
        if self._running().options.follow_lr:
            self._rates = Rates(optimizer, self._running(), self._named)
            self._rates.load(self._followed)
        self._met = True
        if self._running().options.warmup_steps is None:
            self._begin_exact(optimizer)
        if self._held:
            self._held.load_state_dict(self._moments)
        if self._held and self._tuner:
            self._tuner.wait_for(self._held.warmup)

    def _begin_exact(self, optimizer: Any) -> None:
        """Let the first steps be exact where that is needed."""
        mine = heavy_ball.exact_first(optimizer, self._methods, self._named)
        self._exact_first = max(self._exact_first, mine)
        if mine and self._running().rank == 0 and not self._running().step:
            _log.info(
                "the first %d steps are exchanged uncompressed: with momentum, one bit of their large gradients could "
                "make training diverge; warmup_steps= sets another number",
                self._exact_first,
            )
        if self._exact_first and self._tuner:
            self._tuner.wait_for(self._exact_first)

    def _rebuild_every(self) -> int:
        try:
            return self.full_precision_every() or REBUILD_EVERY
        except ConfigError:  # the methods differ in that
            return REBUILD_EVERY

    def follow(self, scaler: Any) -> Any:
        """Rescale residuals whenever a gradient scaler changes its scale; return the scaler.

            scaler = compression.follow(torch.amp.GradScaler())

        Gradients arrive multiplied by the scale, so residuals contain it too. Without this, unsent residual would
        count too much or too little after a change of the scale. States of both may be loaded in any order, before or
        after this. Save the scaler by its ``state_dict()``.

        Raises:
            ConfigError: in update mode, where nothing is scaled; or this follows a scaler already.
        """
        if self._in_updates or self._scaler is not None:
            raise ConfigError(
                "follow() takes the gradient scaler of one optimizer, once; in update mode nothing is scaled, "
                "leave it out"
            )
        if not all(callable(getattr(scaler, name, None)) for name in ("update", "get_scale")):
            raise ConfigError(f"follow() takes a gradient scaler such as torch.amp.GradScaler(), got {scaler!r:.200}")
        if not self._reducer:
            return scaler
        stock, self._scaler = scaler.update, scaler

        def update(new_scale: Any = None) -> None:
            before = float(scaler.get_scale())
            stock(new_scale)
            self._rescale(before, float(scaler.get_scale()))

        scaler.update = update
        return scaler

    def _rescale(self, before: float, after: float) -> None:
        if after != before and before > 0:
            self._running().scale_kept(after / before)
        self._scale = after

    def _bridge(self) -> None:
        """Before the first step, or the first after a resume: what is kept may be of another scale."""
        self._bridged = True
        self._rescale(self._scale, float(self._scaler.get_scale()))

    # ---- update mode ----

    def begin_updates(self) -> Reducer:
        """Hand the reducer to :func:`DistributedUpdateOptimizer`; gradients are refused from then on.

        Raises:
            ConfigError: the compression is in use already.
        """
        self.check_updates()
        self._in_updates = True
        if self._tuner:
            self._tuner.stop()
        self._optimizer = self  # nobody waits for tokens
        self._running().gain = 1.0
        return self._running()

    def check_updates(self) -> None:
        """Refuse what update mode cannot work with.

        Raises:
            ConfigError: the compression is in use already, or has an option that would hide errors.
        """
        if self._in_updates or self._optimizer is not None or self._calls or self._running().step:
            raise ConfigError(_TAKEN)
        if self._scaler is not None:
            raise ConfigError(
                "this compression follows a gradient scaler, and updates are not scaled; leave follow() out"
            )
        if self._tuner and self._running().options.schedule != OPTIONAL:
            raise ConfigError(
                "adaptive schedules hide exchanges behind the backward pass, which update mode does not "
                'have; choose a fixed schedule such as "size:25MB"'
            )
        if any(bucket.plain for bucket in self._running().plan.buckets):
            raise ConfigError(
                "this plan leaves buckets uncompressed, which was chosen for gradients; give update mode a fixed "
                'schedule such as "size:25MB"'
            )
        if self._running().options.nonfinite == "zero":
            raise ConfigError(
                'nonfinite="zero" has no meaning for weight updates: momentum and local weights would stay as they '
                'are, not finite; choose "propagate" or "raise"'
            )

    def allgather_object(self, value: Any, name: str, *, by_name: bool = False) -> list[Any]:
        """Return every rank's value.

        Raises:
            ExchangeError: not every rank arrived in time, or this one has heard that some rank has failed.
        """
        reducer = self._running()
        seconds, failed = reducer.options.timeout, reducer.failed
        try:
            return allgather_object(value, name, self._process_set, seconds, by_name=by_name, failed=failed)
        except ExchangeError:
            reducer.wait_idle(0.0)  # raises what this rank has failed with, which says more
            raise

    def included(self) -> bool:
        """Return whether this rank takes part."""
        return bool(self._process_set.included())

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters in the order of the plan."""
        return list(self._parameters)

    def communication_delay(self) -> int:
        """Return after how many local steps the method's settings exchange updates."""
        return self._methods.communication_delay()

    def full_precision_every(self) -> int:
        """Return the period of the method's full-precision rounds, 0 if it has none."""
        return self._methods.full_precision_every()

    def check_momentum(self, optimizer: Any) -> None:
        """Refuse momentum in the updates of an optimizer upon a method's own.

        Raises:
            ConfigError: says which of them to leave out.
        """
        heavy_ball.refuse_twice(optimizer, self._methods, self._named, updates=True)

    # ---- state ----

    def stats(self) -> dict[str, Any]:
        """Return this rank's counters.

        Returns:
            ``steps``, ``bytes_sent`` (bytes handed to the transport, headers included), ``bytes_dense`` (bytes that a
            float32 ring would have sent), ``seconds`` per phase, ``residual_norm``, ``nonfinite`` (NaN and infinite
            values offered by all ranks together, however they are treated), ``verified`` (steps whose results were
            compared across ranks), ``buckets``, ``plain_buckets`` (those that the schedule leaves uncompressed),
            ``collectives`` in use, ``tuned`` (no search for buckets is in progress), ``method``, ``overlap`` (the share
            of the exchange time that the backward pass hides, 0 to 1) and the ``overlap_seconds`` it is computed from:
            see :class:`horovod_compress.observe.overlap.Overlap`.
        """
        reducer = self._running()
        return (
            reducer.metrics.document()
            | reducer.overlap.document()
            | {
                "residual_norm": reducer.residual_norm(),
                "buckets": len(reducer.plan.buckets),
                "collectives": sorted({station.collective(reducer.step) for station in reducer.stations}),
                "plain_buckets": sum(bucket.plain for bucket in reducer.plan.buckets),
                "tuned": self._tuner is None or self._tuner.done,
                "method": self.method,
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's step and residuals; every rank saves its own, between two steps."""
        self._check_between_steps()
        tuned = {"tuned": self._tuner.chosen} if self._tuner else {}
        scaled = {"scale": self._scale} if self._scaler is not None else {}
        moments = self._held.state_dict() if self._held else self._moments  # which were loaded, and nobody holds yet
        held_ = {"second_moment": moments} if moments else {}
        followed = self._rates.state() if self._rates else list(self._followed)  # which were loaded
        rates = {"rates": followed} if followed else {}
        return checkpoint.save(self._running(), self._methods, tuned | scaled | held_ | rates)

    def load_state_dict(self, state: Mapping[str, Any], residuals: str = "restore") -> None:
        """Restore a state, whole or not at all; every rank has to, between the same two steps.

        Args:
            residuals: "restore", or "reset" to continue with empty residuals, for example after a change of the number
                of ranks.

        Raises:
            ConfigError: a step is under way.
            StateError: the state is malformed, or not of this method, rank, number of ranks, model or plan.
            CorruptFrameError: it is not what was saved, by its checksums.
        """
        self.check_state(state, residuals)
        self._take_state(state, residuals)

    def check_state(self, state: Mapping[str, Any], residuals: str = "restore") -> None:
        """Refuse a state that could not be loaded; nothing is changed.

        Raises:
            ConfigError, CorruptFrameError: see :meth:`load_state_dict`.
        """
        self._check_between_steps()
        checkpoint.check(self._running(), self._methods, state, residuals)
        shapes = {name: parameter.shape for name, parameter in self._named}
        check_moments(state.get("second_moment", {}), shapes)
        if self._tuner:
            self._tuner.check(checkpoint.saved_plan(state))

    def _take_state(self, state: Mapping[str, Any], residuals: str) -> None:
        moments = state.get("second_moment", {})
        if self._tuner:
            same = state.get("world") == self._running().world
            self._tuner.resume(checkpoint.saved_plan(state), same and bool(state.get("tuned")))
            self._take_order()
        checkpoint.restore(self._running(), state, residuals)
        self._moments = moments
        if self._held:
            self._held.load_state_dict(moments)
        elif self._compared_ways:
            self._settle_moments()
        self._followed = [float(rate) for rate in state.get("rates", ()) if residuals == "restore"]
        if self._rates:
            self._rates.load(self._followed)
        self._settled, self._scale, self._bridged = -1, float(state.get("scale", 0.0)), False

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the state of all ranks in a folder that they share; every rank has to call it, between two steps.

        The folder holds one file a rank and a manifest, and changes from the checkpoint of before to the new one at
        once: a save that is cut off, or finds the disk full, leaves the one of before.

        Raises:
            ConfigError: some rank could not write its part, and says why; every rank raises it.
        """
        reducer = self._running()
        saving.save(folder, self.state_dict, reducer.rank, lambda value: self.allgather_object(value, "hvc.save"))

    def load(self, folder: str | os.PathLike[str], residuals: str = "refuse") -> None:
        """Restore what :meth:`save` left in a folder; every rank has to call it, between the same two steps.

        Either every rank restores its part, or none changes anything.

        Args:
            residuals: with another number of ranks than at the time of saving, "refuse" is an error, "redistribute"
                deals out what waits to be sent, and "reset" begins with empty residuals, also with the same number.

        Raises:
            ConfigError: a step is under way on some rank.
            StateError: the checkpoint is not of this method, model, schedule or number of ranks, or there is none.
            CorruptFrameError: a file is not, byte for byte, what was written.
        """
        reducer = self._running()
        owned = {name for codec in self._methods.codecs for variant in codec.variants() for name in variant.folded}
        state, way = saving.load(
            folder, residuals, (reducer.rank, reducer.world), owned, self.check_state,
            lambda value: self.allgather_object(value, "hvc.load"),
        )  # fmt: skip
        self._take_state(state, way)

    def _check_between_steps(self) -> None:
        if self._under_way:
            raise ConfigError(
                f"rank {hvd.rank()}: a step is under way; the compression state can be saved and loaded "
                f"between steps only: call the optimizer's step() or synchronize() first"
            )

    @property
    def plan(self) -> Plan:
        """The buckets in use."""
        return self._running().plan

    def close(self) -> None:
        """Stop the exchange thread and close the connections; safe to call twice. In a fork it does nothing."""
        if self._reducer and not self._run.forked():
            self._reducer.close()
        _open.discard(self)

    # ---- gradients ----

    def _running(self) -> Reducer:
        if self._reducer is None:
            raise ConfigError(f"rank {hvd.rank()} is not in this compression's process set, or the start failed")
        return self._reducer

    def _wake(self, failure: str) -> None:
        """Tell of a failure that the training thread has not come for, as it may be in Horovod.

        Horovod waits for the tokens of a silent rank without limit, and has no other way to call a wait
        off than to shut down, on all ranks. Its error then says nothing of the reason.
        """
        joined = in_join()
        if self._run.replaced() or (self._optimizer is not None and not joined):
            return  # it waits for our results only
        if not self._logged:
            self._logged = True
            _log.error("%s", failure)
        if joined or waits_for_tokens(self):
            end_all_waits()

    def _find(self, tensor: Tensor) -> int:
        """Return the index of the parameter whose gradient this is.

        Gradients arrive in much the same order in every step, so the last order is tried first.
        """
        if not self._under_way:
            self._calls = 0
        place = self._calls % max(1, len(self._order))
        self._calls += 1
        if self._order and self._parameters[self._order[place]].grad is tensor:
            return self._order[place]
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is tensor:
                at = self._order.index(index)
                self._order[place], self._order[at] = index, self._order[place]
                return index
        raise ConfigError(self._why_unknown(tensor))

    def _why_unknown(self, tensor: Tensor) -> str:
        if isinstance(tensor, nn.Parameter):
            return _NO_ADASUM
        if any(p.grad is not None and p.grad.is_sparse for p in self._parameters):
            return (
                "sparse_as_dense=True passes a copy that cannot be identified; leave "
                "it out: Horovod reduces sparse gradients itself, uncompressed"
            )
        return (
            f"rank {hvd.rank()}: compress() got a tensor of shape {tuple(tensor.shape)} that is not "
            f"the gradient of any of the {len(self._parameters)} parameters in named_parameters; give "
            f"the compression all parameters of the optimizer, and use it with that optimizer only"
        )

    def _is_repeat(self) -> bool:
        """Return whether this call belongs to a second synchronize() of the same step.

        ``step()`` after ``synchronize()`` without ``skip_synchronize()`` hands every result over
        once more. All ranks hold the same results then, so they are their own mean; reducing them
        again would corrupt the residuals. Horovod marks the optimizer in between.
        """
        if in_backward() or self._under_way:
            return False
        optimizer = self._optimizer or calling_optimizer(self)
        if optimizer is None or not optimizer._synchronized:
            return False
        if not self._warned:
            self._warned = True
            _log.warning(
                "optimizer.step() was called after optimizer.synchronize() without "
                "optimizer.skip_synchronize(): the gradients are left as they are"
            )
        return True

    def _settle_moments(self) -> None:
        """Where a second moment was loaded and nobody holds one, let what waits be in the units of gradients again."""
        if self._moments and not self._held:
            held.give_back(self._moments, self._running())
        self._moments = {}

    def _compare_ways(self) -> None:
        """At the first gradient, see that all ranks are attached, or none."""
        optimizer = calling_optimizer(self) if self._optimizer is None else None
        if optimizer is not None:
            self._check_same_ranks(optimizer)
            explain(optimizer, self._why_ended)
        if optimizer is not None and not self._met:
            self._meet(optimizer, "auto")
        self._settle_moments()
        first = f", with {self._exact_first} exact steps first" if self._exact_first else ""
        kind = self._held.settings() if self._held else f"its own{first}"
        mine = way.Way(self._running().plan.fingerprint(), self._optimizer is not None, kind)
        way.check_all(self.allgather_object(asdict(mine), "hvc.attach", by_name=True))
        self._compared_ways = True

    def _check_same_ranks(self, optimizer: Any) -> None:
        """Refuse an optimizer of other ranks, some of which would wait for ranks that never come.

        Raises:
            ConfigError: names both process sets.
        """
        if getattr(optimizer, "process_set", self._process_set) is not self._process_set:  # that for Adasum has none
            raise ConfigError(
                f"rank {hvd.rank()}: the optimizer uses process set {optimizer.process_set}, the compression "
                f"{self._process_set}; give both the same process_set="
            )

    def _check_run(self) -> None:
        """Refuse to go on in another run of Horovod than that which the ranks connected in.

        Raises:
            ConfigError: Horovod was started again, as elastic jobs do after every change; or this is a fork.
        """
        if self._run.forked():
            raise ConfigError(
                "this process is a fork of a rank: its compression has no threads here, and the connections are the "
                "rank's; exchange gradients in the rank itself"
            )
        if self._run.replaced():
            raise ConfigError(
                f"rank {hvd.rank()}: Horovod was shut down and started again, with other ranks perhaps, and this "
                f"compression belongs to the ranks before. Elastic jobs are not supported yet: create model, "
                f"compression and optimizer again after each reset, or restart the job from a checkpoint"
            )

    def _why_ended(self, optimizer: Any, said: str) -> HorovodCompressError | None:
        """Return the error for the end of Horovod in the middle of a step, None where nothing is known."""
        found = self._running().call_off(f"Horovod has ended and says {said!r}")
        if found is not None:
            self._under_way = 0  # nobody fetches the other results of this step
            forget_step(optimizer)
        return found

    def _begin_step(self) -> None:
        """While nothing is under way, let an adaptive schedule choose other buckets, and look at the weights."""
        self._check_run()
        if not self._compared_ways:
            with self._comparing:  # with two devices there are two threads of autograd, and both come here
                if not self._compared_ways:
                    self._compare_ways()
        if self._scaler is not None and not self._bridged and not self._under_way:
            self._bridge()
        if self._tuner and not self._under_way and self._tuner.begin_step():
            self._take_order()
        reducer = self._running()
        if not self._under_way:
            self._freeze(reducer)
        if self._rates and not self._under_way:
            self._rates.begin()
        if self._held and not self._under_way:
            self._held.begin(reducer.next_step())
        if self._exact_first and not self._under_way:
            reducer.next_steps(plain=reducer.next_step() < self._exact_first)
        if reducer.weights and not self._under_way:
            reducer.weights.take(reducer.next_step(), self._parameters)

    def _freeze(self, reducer: Reducer) -> None:
        """Exchange nothing for parameters that need no gradient in the step that begins."""
        frozen = [index for index, parameter in enumerate(self._parameters) if not parameter.requires_grad]
        self._frozen = [self._parameters[index] for index in frozen]
        reducer.freeze(frozen)

    def _leave_frozen(self, optimizer: Any) -> None:
        """Before the optimizer's own step, let it skip frozen parameters, as torch alone does.

        Horovod has given them gradients of zeros, with which momentum and weight decay would move them.
        """
        if not optimizer._handles:  # else Horovod has not fetched the results yet
            for parameter in self._frozen:
                parameter.grad = None

    def _share(self, value: Any) -> list[Any]:
        reducer = self._running()
        seconds, name = reducer.options.timeout, self._tuning_name
        reducer.meeting = True
        try:
            return allgather_object(value, name, self._process_set, seconds, failed=reducer.failed)
        except ExchangeError as error:
            raise reducer.call_off(str(error).removeprefix(f"rank {hvd.rank()}: ").rstrip(".")) or error from error
        finally:
            reducer.meeting = False

    def _offer(self, index: int, grad: Tensor) -> int:
        step = self._running().offer(index, grad)
        self._under_way += 1
        return step

    def _result(self, index: int, step: int, gain: float | None = None) -> Tensor:
        reducer = self._running()
        if self._settled != step:
            self._settled = step
            self._skip_sparse(reducer, step)
        try:
            result = reducer.result(index, step, gain)
        except HorovodCompressError:
            self._under_way = 0  # nobody fetches the other results of this step
            if optimizer := self._optimizer or calling_optimizer(self):
                forget_step(optimizer)
            raise
        self._under_way -= 1
        return result

    def _skip_sparse(self, reducer: Reducer, step: int) -> None:
        """Count in the parameters whose gradients Horovod reduces itself, as they are sparse."""
        reducer.settle(step - 1)  # a bucket of sparse gradients only is awaited by nobody else
        missing = set(reducer.missing(step))
        for index, name in enumerate(reducer.plan.names()):
            grad = self._parameters[index].grad
            if name in missing and grad is not None and grad.is_sparse:
                reducer.skip(index)

    def _token(self, index: int) -> Tensor:
        token = self._owners[index].grad
        assert token is not None
        return token.fill_(_value_of_token(self._running().rank))

    def _gain_of(self, token: float) -> float:
        """Return what Horovod's operation made of the ranks' tokens: the mean or the sum."""
        world = self._running().world
        values = [_value_of_token(rank) for rank in range(world)]
        total = sum(values)
        for gain in (1.0, float(world)):
            if abs(token - total * gain / world) < 1e-3:
                return gain
        op = getattr(calling_optimizer(self), "op", None)
        if op in (hvd.Average, hvd.Sum) and (who := uneven.joined(token, values, op == hvd.Average)):
            raise ConfigError(f"{who} called hvd.join() while rank {hvd.rank()} has a step left; {uneven.ADVICE}")
        raise ConfigError(
            f"rank {hvd.rank()}: tokens with the sum {total:g} came back as {token:g} from {world} "
            f"ranks; only op=hvd.Average and op=hvd.Sum are supported"
        )

    def _gain_for(self, op: Any) -> float:
        if op == hvd.Average:
            return 1.0
        if op == hvd.Sum:
            return float(self._running().world)
        raise ConfigError(f"only op=hvd.Average and op=hvd.Sum are supported, got {op}")


def trace(path: str | os.PathLike[str], steps: int | range | None = None, *, events: int = MAX_EVENTS) -> Trace:
    """Record a timeline of all compressions of this process, also of those created later.

        with hvc.trace("trace.json", steps=20):
            train()

    Each rank writes its own file: ``trace.rank3.json``, or with its number in place of ``{rank}`` if the path has
    that. chrome://tracing and https://ui.perfetto.dev open it; docs/timeline.md explains the rows. The file is written
    when the step after the last one begins, when the trace is closed, or at the end of the process, and appears
    complete or not at all. If that fails, it is logged, and training continues. ``HVC_TRACE=path`` in the environment
    does the same without changing the program, with ``HVC_TRACE_STEPS`` as "20" or "100:110".

    Args:
        path: of the file.
        steps: number of steps, from the next one on, or a range of step numbers as ``stats()["steps"]`` counts them;
            None for all, until ``close()``.
        events: largest number of events per compression; its recording then ends with a warning. An event takes about
            140 bytes in memory and in the file.

    Raises:
        ConfigError: the file cannot be written, ``steps`` is wrong, Horovod is not initialized, or another trace is
            being recorded.
    """
    if not hvd.is_initialized():
        raise ConfigError("hvc.trace() needs the number of this rank: call hvd.init() first")
    found = recording.begin(path, hvd.rank(), steps, events)
    for compression in list(_open):
        found.follow(compression._running(), compression.method)
    return found


def _value_of_token(rank: int) -> float:
    """Return the value of a rank's tokens. They differ, so that no other operation gives their mean or sum."""
    return 3.0 if rank else 1.0


def _attach(optimizer: Any, compression: Compression) -> None:
    """Replace the call that hands one gradient over; Horovod takes a callable as its handle."""
    stock = optimizer._allreduce_grad_async

    def hand_over(parameter: nn.Parameter) -> tuple[Any, Any]:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            return stock(parameter)
        if id(parameter) not in compression._index:
            raise ConfigError(compression._why_unknown(parameter.grad))
        if compression._is_repeat():
            return (lambda: parameter.grad), None
        compression._begin_step()
        index = compression._index[id(parameter)]
        step = compression._offer(index, parameter.grad)
        return (lambda: compression._result(index, step)), None

    optimizer._allreduce_grad_async = hand_over
    # The plan's buckets take the place of Horovod's groups, whose handles cannot be callables.
    optimizer._groups = None


def _check_process_set(given: object) -> None:
    """Refuse what is no process set that Horovod knows."""
    known = isinstance(given, hvd.ProcessSet) and given.process_set_id is not None
    if not known and given is not hvd.global_process_set:
        raise ConfigError(
            "process_set should be hvd.global_process_set, or what hvd.add_process_set([0, 1]) returned on every rank; "
            f"got {given if isinstance(given, hvd.ProcessSet) else repr(given)}"
        )


def _refuse_calls(function: Callable[..., Compression]) -> None:
    """Let a factory that Horovod is given in place of a compression say that it has to be called."""
    name = f"hvc.Compression.{function.__name__}"

    def refuse(*given: object, **options: object) -> Any:
        raise ConfigError(
            f"{name} is not a compression but makes one: write "
            f"compression = {name}({_WANTED.get(function.__name__, 'model.named_parameters()')}), "
            "and give that to the optimizer"
        )

    for attribute in ("compress", "decompress", "attach", "follow"):
        setattr(function, attribute, refuse)


_WANTED = {
    "create": '"marsit", model.named_parameters()',
    "per_layer": '{"*": "marsit"}, model.named_parameters()',
}


def _factory(method: str) -> Callable[..., Compression]:
    codec = registry.codec_class(method)

    def make(named_parameters: NamedParameters, **options: Any) -> Compression:
        return Compression.create(method, named_parameters, **options)

    make.__name__, make.__qualname__ = method, f"Compression.{method}"
    make.__doc__ = help_text.of_method(codec)
    make.__signature__ = help_text.signature(codec, hvd.global_process_set)  # type: ignore[attr-defined]
    return make


for _name in available():
    setattr(Compression, _name, staticmethod(_factory(_name)))
for _name in (*available(), "create", "per_layer"):
    _refuse_calls(getattr(Compression, _name))

_TAKEN = (
    "a compression serves one optimizer: make another one for DistributedUpdateOptimizer or for "
    "hvd.DistributedOptimizer"
)

_NO_ADASUM = "op=hvd.Adasum is not supported: it combines parameter updates, not gradients; use op=hvd.Average"

_open: weakref.WeakSet[Compression] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for compression in list(_open):
        try:
            compression.close()
        except Exception as error:  # noqa: BLE001  the others are to be closed all the same
            _log.warning("closing a compression at exit failed: %s", error)
