"""A module that is not wrapped: a hook of each parameter hands its gradient over as soon as autograd has added it up.

No bucket of torch's lies in between, and no copy into one. Autograd itself calls what ends a backward pass: it waits
for all results, so that gradients are those of all ranks when ``backward()`` returns.

A parameter that a pass has brought no gradient for is handed over at its end, as it is, or as zeros: every rank hands
over the same ones. Those that are frozen or have sparse gradients are known before, and no bucket waits for them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ...engine.optimizer.step_hooks import builds_state
from ...engine.shards import local
from ...errors import ConfigError, ExchangeError, HorovodCompressError, NonFiniteError, in_job, some_of
from ..fresh import FreshGradients, needing_gradient
from ..session import Session, before_each_step, drop_zeros, gradient_of, in_backward, weakly
from . import checks
from .backward import at_the_end, raising
from .hooks import GradientHook, Wrappers, keep


class _End:
    """What autograd calls at the end of a pass, and drops uncalled where an error has ended it."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


class Pass:
    """One backward pass, with those that run within it, as reentrant checkpoints do.

    Attributes:
        steps: of the gradients that were handed over, by the number of their parameters.
        skipped: parameters of which nothing is handed over, by number.
        cut_off: something has ended the wait for results.
    """

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        self.skipped: set[int] = set()
        self.cut_off = False
        self._ends: dict[int, weakref.ref[_End]] = {}  # that autograd has still to call, by the number of its task

    def has_end(self, task: int) -> bool:
        return task in self._ends

    def end_with(self, task: int, call: Callable[[], None]) -> None:
        """Have something called at the end of a task of autograd's, the one under way."""
        end = _End(partial(self._ended, task, call))
        self._ends[task] = weakref.ref(end)
        at_the_end(end)

    def _ended(self, task: int, call: Callable[[], None]) -> None:
        del self._ends[task]
        call()

    def interrupted(self) -> bool:
        """Return whether an error has ended this pass, or one within it, also while it waited."""
        return self.cut_off or any(end() is None for end in self._ends.values())

    def missing(self, count: int) -> list[int]:
        """Return the parameters that nothing is known of yet, out of so many."""
        return [index for index in range(count) if index not in self.steps and index not in self.skipped]


class Unwrapped:
    """Exchanges the gradients of one module.

    Args:
        begin_step: begins a step of the compression, before its first gradient is handed over.
        look: called at the end of each pass.
        group: the process group, in which torch reduces sparse gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        session: Session,
        begin_step: Callable[[], object],
        look: Callable[[], None],
        group: Any,
    ) -> None:
        self._session, self._begin_step, self._look, self._group = session, begin_step, look, group
        self._pass: Pass | None = None
        self._paused = False
        self._local: set[int] = set()  # parameters with what passes have added up on this rank, by identity
        weakref.finalize(self, before_each_step(weakly(self._refuse_step))).atexit = False
        self._sparse = checks.sparse_in(module)
        session.steps.sparse = [name for name, parameter in session.steps.named if id(parameter) in self._sparse]
        self._wrappers = Wrappers(session.steps.parameters)
        self._fresh, hook = FreshGradients(session.steps.parameters), GradientHook(self)
        for parameter in session.steps.parameters:
            with needing_gradient(parameter):
                parameter.register_post_accumulate_grad_hook(hook)
        keep(module, self)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let backward passes only add up gradients."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
            self._wrappers.leave_begun()

    def close(self) -> None:
        """Take from parameters what is not needed any more; the hook that hands over says when it is called."""
        self._fresh.close()

    def is_over(self) -> bool:
        """Return whether nothing will be exchanged any more, so that the module can have another compression."""
        return self._session.is_over()

    # ---- in a backward pass ----

    def take(self, parameter: nn.Parameter) -> None:
        """Hand a gradient over, to which autograd has just added what this pass brings.

        Raises:
            ConfigError: it cannot be exchanged.
            ExchangeError: an earlier exchange failed, or an error has ended the last pass in the middle.
        """
        if self._paused:
            self._local.add(id(parameter))
            return
        checks.refuse_compiled_autograd()
        if not in_backward():
            raise self._outside(parameter)
        session = self._session
        with session.lock:
            under_way, grad = self._under_way(), None if parameter.grad is None else local(parameter.grad)
            index = session.steps.index[id(parameter)]  # not before: a step that begins may change it
            if index in under_way.skipped:
                if id(parameter) not in self._sparse:  # but frozen: what passes before have left would move the weight
                    parameter.grad = None
                return
            if grad is None:
                if self._fresh.is_none(parameter):
                    return  # zeros are handed over at the end
                raise self._used_up(index)
            if grad.is_sparse:
                raise ConfigError(
                    f"{self._called(index)} is sparse, and no embedding with sparse=True has it as weight"
                )
            if grad.requires_grad:
                raise ConfigError(
                    f"{self._called(index)} has a graph of its own, as backward(create_graph=True) makes it; only the "
                    "gradients of one rank are its outputs: write create_graph=False"
                )
            if index in under_way.steps:
                raise ConfigError(
                    f"{self._called(index)} has come twice in one backward pass: a module that runs in several "
                    "reentrant checkpoints brings it once for each: write checkpoint(..., use_reentrant=False); under "
                    "fully_shard(), so does one that runs twice after set_requires_gradient_sync(False): accumulate "
                    "within compression.no_sync() instead; or after set_reduce_scatter_unused_params(True): leave that "
                    "out"
                )
            under_way.steps[index] = session.offer(index, grad)

    def _under_way(self) -> Pass:
        """Return the pass that this call belongs to; the first gradient begins one, and a step."""
        if (found := self._pass) is None:
            self._begin_step()
            found = self._pass = Pass()
            self._end_with(found)
            self._skip(found)
        elif found.interrupted():
            self._stop(found)
        elif not found.has_end(torch._C._current_graph_task_id()):
            self._end_with(found)
        return found

    def _end_with(self, under_way: Pass) -> None:
        task = torch._C._current_graph_task_id()
        under_way.end_with(task, partial(self._end, under_way, task))

    def _skip(self, begun: Pass) -> None:
        """Let no bucket wait for what is not exchanged: frozen parameters, and those that torch reduces."""
        reducer = self._session.reducer
        for index, parameter in enumerate(self._session.steps.parameters):
            frozen = index in reducer.buckets.frozen
            if frozen and id(parameter) in self._local:
                parameter.grad = None  # it would move the weight, on each rank elsewhere
            if frozen or id(parameter) in self._sparse:
                begun.skipped.add(index)
                reducer.skip(index)
        self._local.clear()
        drop_zeros(self._session.steps.frozen)

    def _stop(self, interrupted: Pass) -> None:
        """Fail, with the other ranks: they would wait for the rest of the pass before."""
        failure, rank = self._session.failure, self._session.job.number
        failure.raise_if_failed()
        error = ExchangeError(
            f"rank {rank}: an error has ended a backward pass in the middle, after {len(interrupted.steps)} of "
            f"{len(self._session.steps.parameters)} gradients were handed over"
            f"{' and while it waited for results' if interrupted.cut_off else ''}, so that ranks no longer agree on "
            "the weights; restart the job from a checkpoint, and let a batch that is to be skipped be skipped before "
            "backward(), on every rank"
        )
        failure.report("a backward pass", in_job(error))
        raise error

    def _used_up(self, index: int) -> ConfigError:
        return ConfigError(
            f"{self._called(index)} was applied or taken away in the backward pass, as by an optimizer's step in a "
            "hook (register_post_accumulate_grad_hook); gradients are those of all ranks only when backward() returns: "
            "let the optimizer make its step after that"
        )

    def _outside(self, parameter: nn.Parameter) -> ConfigError:
        return ConfigError(
            f"{self._called(self._session.steps.index[id(parameter)])} comes outside of backward(), as schedules of "
            "torch.distributed.pipelining bring it, so nothing says when all gradients are there: call backward() on "
            "the stages yourself"
        )

    def _called(self, index: int) -> str:
        """Return a gradient in words."""
        return f"rank {self._session.job.number}: the gradient of {self._session.reducer.plan.names()[index]}"

    # ---- at its end ----

    def _end(self, under_way: Pass, task: int) -> None:
        """Complete a pass after what others end it with, which was asked for since this one was.

        There, fully_shard() reduces gradients of modules whose inputs need none, and DistributedDataParallel hands its
        means back.

        Raises:
            ConfigError: there are such.
        """
        if self._wrappers.average():
            self._pass = None
            error = ConfigError(
                f"rank {self._session.job.number}: this model is trained in DistributedDataParallel, which averages "
                "its gradients too: register the wrapped model, compression.register(ddp_model, optimizer); or drop "
                "the wrapper, and keep one for an evaluation under torch.no_grad() only"
            )
            self._session.failure.report("a backward pass", in_job(error))
            raise error
        under_way.end_with(task, partial(self._complete, under_way))

    def _complete(self, ended: Pass) -> None:
        """Hand over what is missing, on the thread that ends the pass.

        Nothing is waited for before other modules have handed over theirs: ranks may come to these in another order.
        """
        if ended is not self._pass:
            return  # the last gradient came within a pass that this one has run, and that has waited
        session = self._session
        missing = ended.missing(len(session.steps.parameters))
        if missing and torch._C._current_autograd_node() is not None:
            return  # another pass runs this one, and brings more
        try:
            for index in missing:
                ended.steps[index] = session.offer(index, gradient_of(session.steps.parameters[index]))
            self._reduce_sparse(ended)
        except Exception as error:
            self._pass = None
            session.failure.report("a backward pass", error)
            raise
        except BaseException:
            ended.cut_off = True
            raise
        ended.end_with(torch._C._current_graph_task_id(), partial(self._fetch, ended))

    def _fetch(self, ended: Pass) -> None:
        """Wait for all results.

        Raises:
            HorovodCompressError: see :meth:`~horovod_compress.engine.reducer.Reducer.result`; or a gradient was
                applied before it was that of all ranks.
        """
        try:
            error = self._await(ended)
            if self._session.reducer.options.nonfinite == "raise":
                error = self._session.agree(error)
            if error:
                at_the_end(raising(error))  # training may go on: let other modules end this pass
        except HorovodCompressError:
            self._pass = None
            raise
        except BaseException:  # none of ours, such as KeyboardInterrupt: results come, and nobody waits for them
            ended.cut_off = True
            raise
        self._pass = None
        self._look()

    def _await(self, ended: Pass) -> NonFiniteError | None:
        """Wait for all results; return the error that training can go on after."""
        session = self._session
        try:
            for index, step in ended.steps.items():
                session.result(index, step)
                if session.steps.parameters[index].grad is None:
                    session.failure.report("a backward pass", error := in_job(self._used_up(index)))
                    raise error
            if ended.skipped:  # a bucket that is skipped whole is awaited by nobody else
                session.reducer.settled()
        except NonFiniteError as error:
            return error
        return None

    def _reduce_sparse(self, ended: Pass) -> None:
        """Let torch reduce sparse gradients, in an order that all ranks have."""
        for index in sorted(ended.skipped):
            parameter = self._session.steps.parameters[index]
            if id(parameter) not in self._sparse or not parameter.requires_grad:
                continue
            grad = parameter.grad
            if grad is None:
                grad = torch.zeros_like(parameter, layout=torch.sparse_coo)
            if not grad.is_sparse:
                raise ConfigError(
                    f"{self._called(index)} is dense, and an embedding with sparse=True has it as weight; it is used "
                    "elsewhere too: write sparse=False"
                )
            parameter.grad = checks.mean_of(grad, self._group).wait()

    def _refuse_step(self, optimizer: Any) -> None:
        """Refuse an optimizer's step with gradients of this rank, or with some that are still being exchanged.

        Raises:
            ConfigError: it has some of these parameters, and comes within a backward pass, or after one without an end.
            ExchangeError: an error has ended the last pass in the middle.
        """
        within, left = in_backward() and not self._paused, self._pass
        if not (within or left) or self._session.is_over():
            return
        index, of = self._session.steps.index, (p for group in optimizer.param_groups for p in group["params"])
        found = [index[id(parameter)] for parameter in of if id(parameter) in index]
        if found and within:
            self._session.failure.report("a backward pass", error := in_job(self._used_up(found[0])))
            raise error
        if found and left and not builds_state():
            self._refuse_open(left)

    def _refuse_open(self, left: Pass) -> None:
        """Refuse a step with gradients of a pass that has come to no end, and say why."""
        if left.interrupted():
            self._stop(left)
        plan = self._session.reducer.plan.names()
        names = [plan[index] for index in left.missing(len(plan))]
        raise ConfigError(
            f"rank {self._session.job.number}: the last backward pass has ended in a reentrant checkpoint, where "
            f"{len(names)} parameter(s) have got no gradient, {some_of(names)}, or others have got two; "
            "write checkpoint(..., use_reentrant=False)"
        )
