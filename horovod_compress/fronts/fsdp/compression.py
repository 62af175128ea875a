"""The compression object for models that ``fully_shard`` divides, of which there are several replicas."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...engine.agreement import differences, handshake
from ...engine.agreement.notes import last_error
from ...engine.job import Job
from ...engine.names import in_arguments, listed, pairs
from ...engine.reducer import Hooks
from ...errors import ConfigError, MismatchError, in_job
from ..compression import BaseCompression
from ..factories import RanksOption, add_factories, of_an_object
from ..reports import Strangers
from ..session import Session, look_for_steps, weakly
from ..startup import Wrap, before_handshake, check_alone
from ..torch_dist.alike import begin_alike
from ..torch_dist.checks import not_exchanged, refuse_no_optimizer
from ..torch_dist.of_group import TorchCompression
from ..torch_dist.unwrapped import Unwrapped
from . import divided
from .checkpoints import Resharded, Sharded
from .grid import Column, Unmet
from .unfrozen import Unfrozen

Model = TypeVar("Model", bound=nn.Module)

_log = logging.getLogger("horovod_compress")

if TYPE_CHECKING:
    from .factory_types import Factories
else:
    Factories = object  # the functions are added below


class Compression(TorchCompression, Factories):
    """A compression between the replicas of a model, each of which ``fully_shard`` divides among ranks.

        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        compression = hvc.Compression.marsit(model.named_parameters())
        compression.register(model, optimizer, replicate=mesh["replicate"])

    Create one by the name of a method on every rank, when the model is divided and on its device. Its options are
    checked then; the ranks meet in :meth:`register`. Torch itself exchanges what the ranks of one replica have to, in
    full precision; each rank then exchanges the gradient of its shard with the ranks that have the same one.

    ``hvc.available()`` lists the methods; ``help(hvc.Compression.marsit)`` shows a method's options, and those of
    all methods, with their defaults.

    Raises:
        ConfigError: an option or the parameter list cannot work.
    """

    _what_copies_lack = (
        "a copy of a divided model has no compression; if it is trained, each replica trains its own: create one, and "
        'write compression.register(model, optimizer, replicate=mesh["replicate"])'
    )
    _how_to_use = (
        'a model; write compression.register(model, optimizer, replicate=mesh["replicate"]) before the first backward '
        "pass, or each replica trains its own"
    )
    _ranks_in_words = "mesh"
    _job: Column
    _sharded: Sharded
    _factors: divided.DivideFactors
    _unfrozen: Unfrozen | None = None
    _arguments: tuple[Any, ...] | None = None  # of a compression whose ranks have not met
    _end_look: Callable[[], object] = staticmethod(lambda: None)
    _ended = False  # by close()

    def _start(self, method: Any, named: Any, options: Mapping[str, Any], wrap: Wrap) -> None:
        """Check what needs no other ranks, which meet in :meth:`register`."""
        named = listed(named)
        given, own, others, _ = in_arguments(named, method, options)
        check_alone(own, given, others)
        self._given = pairs(given)
        divided.check_options(own, others, divided.shard_mesh(self._given).size())
        self._arguments = (method, named, options, wrap)
        trained = [parameter for _, parameter in self._given if parameter.requires_grad]
        self._end_look = look_for_steps(trained, weakly(self._why_unregistered))

    def _why_unregistered(self, tells: bool) -> str | None:
        """Return how to use this, if training goes on without it, until somebody is told."""
        if self._arguments is None or self._told or self._job.number:
            return None
        self._told = tells
        return f"{self.method} has compressed nothing: it was created, but never given to {self._how_to_use}"

    def _hooks(self, job: Job) -> Hooks:
        column = self._job
        return replace(super()._hooks(job), ranks_in_words=column.in_words, records=f"shard{column.row.rank}")

    def _begin(self, session: Session) -> None:
        self._strangers = Strangers(session)

    def __repr__(self) -> str:
        return super().__repr__() if self._session else f"<{type(self).__name__} {self.method}: not registered yet>"

    def _joined(self) -> Session | None:
        return self._here()

    def _here(self) -> Session:
        if self._session is None:
            raise ConfigError(
                'the ranks do not know each other yet: write compression.register(model, optimizer, replicate=mesh["'
                'replicate"]) first, on every rank'
            )
        return self._session

    # ---- the model and the optimizer ----

    def register(
        self,
        model: Model,
        optimizer: Any = None,
        *,
        replicate: DeviceMesh | None = None,
        second_moment: str = "auto",
        warmup_steps: int | None = None,
        rebuild_every: int | None = None,
        match_norm: bool = True,
        step: str = "auto",
    ) -> Model:
        """Meet the other ranks, and exchange the gradients of a model from now on; return the model.

        Gradients are those of all ranks when ``backward()`` returns: torch has averaged them over the ranks of a
        replica, and this over replicas. Call it on every rank, before the first backward pass. All replicas begin with
        the weights and buffers of replica 0.

        Args:
            model: the module whose parameters this compression was given, which ``fully_shard`` has divided.
            optimizer: the one that applies the results, or a list of several; other options than ``replicate`` are
                those of :meth:`attach`.
            replicate: the dimension of the mesh along which the model is replicated; it may be given to the
                compression instead.

        Raises:
            ConfigError: the model has other parameters, is not divided or along several dimensions, already has a
                compression, or uses something that is not supported; or some rank cannot start.
            MismatchError: ranks were given different options, parameters or versions.
            ExchangeError: not every rank arrived in time.
        """
        if self._unwrapped() or (self._session and self._session.exchanges == "updates"):
            raise ConfigError("this compression has a module already; a compression serves one, and is registered once")
        self._asked = True
        refuse_no_optimizer(optimizer)
        for module in divided.modules(model):
            module.reshard()  # a forward pass without a backward one leaves the root's parameters whole
        trained = [(name, one) for name, one in self._given if one.requires_grad]
        frozen = [one for one in self._given if not one[1].requires_grad]

        def check() -> None:
            divided.check_model(model, trained, frozen)
            if self._job.row.size == 1:
                divided.DivideFactors(model, self._job.size).refuse_twice()

        options: dict[str, Any] = {
            "second_moment": second_moment, "warmup_steps": warmup_steps, "rebuild_every": rebuild_every,
            "match_norm": match_norm, "step": step,
        }  # fmt: skip
        given = optimizer if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
        session = self._meet(replicate, check, options | {"optimizer": [type(each).__name__ for each in given]})
        with differences.explaining(self._job.in_words):
            begin_alike([*model.named_parameters(), *model.named_buffers()], session, self._job.group)
        self._attach_all(optimizer, **options)
        self._follow(model, session)
        return model

    def _meet(
        self, replicate: object, check: Callable[[], None], options: Mapping[str, Any] = MappingProxyType({})
    ) -> Session:
        """Let the ranks of all shards and replicas meet, unless they have; return the session of this rank's shard.

        Args:
            check: refuses what this rank was given.
            options: of register().
        """
        if self._arguments is None:  # what came after that has failed
            session = self._here()
            session.refuse_closed()
            check()
            return session
        if self._ended:
            raise ConfigError("this compression was closed before its ranks have met: create another one")
        job: Any = self._job
        self._job = Column(job.replicate if replicate is None else replicate, divided.shard_mesh(self._given))
        with differences.explaining(self._job.in_words):
            with before_handshake(self._job):
                check()
                divided.leave_others(self._given)
            super()._start(*self._arguments)
            try:
                mesh = self._compare_columns(session := self._here(), options)
            except BaseException:  # torch's own too, which makes the mesh
                try:
                    BaseCompression.close(self)  # nobody has failed to use it, which this class would say
                finally:
                    self._session = None
                raise
        self._sharded = Sharded(session, self._saved, mesh)
        self._arguments = None
        self._end_look()
        return session

    def _compare_columns(self, session: Session, options: Mapping[str, Any]) -> DeviceMesh:
        """See that all columns have the same options, and are a grid; return its mesh."""
        reducer = session.reducer
        shown = handshake.fields(session.methods, reducer.options, [], "", reducer.world)
        shown |= {f"{name}= of register()": f"{value!r:.100}" for name, value in options.items()}
        found = session.gather_all([self._job.place_in_grid(), shown, session.name], "hvc.grid")
        if told := differences.difference({place[-1]: theirs for place, theirs, _ in found}):
            raise in_job(MismatchError(told))
        mesh = self._job.mesh([place for place, *_ in found])
        session.met_all(name for *_, name in found)
        return mesh

    def _for_updates(self, replicate: object) -> Session | None:
        if self._arguments is None:
            return self._here()
        session = self._meet(replicate, lambda: None)
        with differences.explaining(self._job.in_words):
            begin_alike(self._given, session, self._job.group)
        return session

    def _follow(self, model: nn.Module, session: Session) -> None:
        """Take the gradients of a model from now on."""
        session.others = not_exchanged(model, session.steps.named)
        found = Unwrapped(model, session, self._begin_step, self._look, self._job.group)
        self._unwrapped = weakref.ref(found)
        self._watch(model)
        self._factors = divided.DivideFactors(model, self._job.size)
        self._factors.share()
        self._closing.add(self._factors.give_back)
        if self._job.size > 1:
            self._unfrozen = Unfrozen(session)
            self._closing.add(weakly(self._unfrozen.close))
        self._registered = True

    def _begin_step(self) -> Session:
        session = super()._begin_step()
        if not session.is_over():
            with session.failure.of_all("a backward pass"):
                self._factors.refuse_others()
        return session

    @of_an_object
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Within this, backward passes only add up gradients; the first one after it exchanges the sum.

            for number, batch in enumerate(batches):
                with compression.no_sync() if number + 1 < len(batches) else contextlib.nullcontext():
                    loss(model(batch)).backward()
            optimizer.step()

        Torch still averages each pass over the ranks of a replica, so that nothing but this rank's shard is kept.
        ``model.set_requires_gradient_sync(False)`` leaves that out, too, and keeps whole gradients on every rank.

        Raises:
            ConfigError: no model was registered.
        """
        self._here()
        if (unwrapped := self._unwrapped()) is None:
            raise ConfigError("no_sync() is for a model that was registered, and not for update mode")
        return unwrapped.paused()

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of a state that ``torch.distributed.checkpoint`` saves, between two steps.

            state = {"model": model_state, "optimizer": optimizer_state, "compression": compression}
            torch.distributed.checkpoint.save(state, checkpoint_id=folder)

        What waits is in it twice: once for the same grid of ranks, and once so that it can be divided anew.

        Raises:
            ConfigError: a step is under way; or this is update mode, where each rank has more to save.
        """
        if self._here().exchanges == "updates":
            raise ConfigError(
                "in update mode the optimizer has a part of the state that torch.distributed.checkpoint leaves out: "
                "save model and optimizer.state_dict() on each rank by torch.save(), and compression.save(folder)"
            )
        return self._sharded.state()

    def load_state_dict(self, state: Mapping[str, Any], residuals: str = "restore") -> None:
        """Restore a state on the same grid of ranks, completely or not at all; on every rank, between two steps.

        Args:
            residuals: "restore", or "reset" to continue with empty residuals.

        Raises:
            ConfigError: a step is under way.
            StateError: the state is malformed, or belongs to another method, grid of ranks, model or plan.
            CorruptFrameError: its checksums show that it has changed since it was saved.
        """
        self._here()
        self._sharded.load(state, residuals)

    def resharded(self, replicas: int) -> Resharded:
        """Return what stands for this compression where a checkpoint of another grid of ranks is loaded.

            state = {"model": ..., "optimizer": ..., "compression": compression.resharded(replicas=2)}
            torch.distributed.checkpoint.load(state, checkpoint_id=folder)

        What waits is divided anew, and every replica gets the mean over those that there were, so that a step applies
        what it would have; the steps that follow are not those of the same grid, bit by bit.

        Args:
            replicas: how many there were when the checkpoint was saved.
        """
        self._here()
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
            raise ConfigError(f"replicas should be a whole number, at least 1, got {replicas!r}")
        return Resharded(self._sharded, replicas)

    def close(self) -> None:
        # An error says why nothing was trained.
        quiet = self._asked or self._session or not self._arguments or last_error()
        if not quiet and (text := self._why_unregistered(True)):
            _log.warning("%s", text)
        self._end_look()
        self._ended = True
        super().close()


_REPLICATE = "the dimension of the mesh along which the model is replicated. Default: that given to register()."
add_factories(
    Compression,
    RanksOption("replicate", None, _REPLICATE, Unmet),
    refused=("register", "attach", "follow"),
)
