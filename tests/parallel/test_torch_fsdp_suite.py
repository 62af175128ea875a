"""PyTorch's own tests of fully_shard pass with ``none`` between replicas, as they do without it.

They are those in PyTorch's sources, as they are, which the wheel lacks: HVC_TEST_TORCH_SOURCES names a checkout of the
version that is installed. Those that ask for GPUs get the CPU in their place, as in ``test_torch_suite.py``. A test
that divides a model among all ranks has it divided among half of them and replicated by us; one that has torch
replicate it has us do so instead. The compression is registered at the model's first call, with its optimizer if there
is one by then. Each test runs beside its control, without us.

    HVC_TEST_TORCH_SOURCES=~/pytorch python -m pytest tests/parallel/test_torch_fsdp_suite.py
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from tests.support.suites import Suite, check_alike, opened

SOURCES = os.environ.get("HVC_TEST_TORCH_SOURCES", "")
#: Whose list this is: another version has other tests.
VERSION = (2, 13)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,  # up to eight ranks, which have to finish in time
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not SOURCES, reason="HVC_TEST_TORCH_SOURCES names no checkout of PyTorch's sources"),
]

_CORE, _COMPOSE = "training.TestFullyShard1DTrainingCore.", "training.TestFullyShard1DTrainingCompose."
#: Gradients are exchanged in these.
EXCHANGE = (
    "autograd.TestFullyShardAutograd.test_nontensor_activations",
    "clip_grad_norm_.TestClipGradNormWorldSize2.test_clip_grad_norm_1d",
    "comm.TestFullyShardCommunication.test_manual_reshard_with_reshard_after_forward_false",
    "comm.TestFullyShardPrefetch.test_backward_misprefetch",
    "comm.TestFullyShardPrefetch.test_fully_shard_multi_module_unused_module",
    "frozen.TestFullyShardFrozen.test_multi_forward_mixed_requires_grad",
    "frozen.TestFullyShardFrozen.test_train_mixed_requires_grad_across_groups",
    "frozen.TestFullyShardFrozen.test_train_mixed_requires_grad_per_group",
    "mixed_precision.TestFullyShardMixedPrecisionTraining.test_grad_acc_with_reduce_dtype",
    _CORE + "test_explicit_prefetching",
    _CORE + "test_multi_forward_module",
    _CORE + "test_train_parity_single_group_shard_dim0",
    _CORE + "test_train_parity_single_group_shard_largest_dim",
    _COMPOSE + "test_double_forward_with_nested_fsdp_and_checkpoint",
    _COMPOSE + "test_grouped_module_cast_forward_inputs",
    _COMPOSE + "test_partial_group_forward_grad_accum_chunked",
    _COMPOSE + "test_partial_group_forward_then_standalone",
    _COMPOSE + "test_partial_group_reshard_toggle",
    _COMPOSE + "test_reset_iter_state_after_exception",
    "training.TestFullyShardCustomForwardMethod.test_register_fsdp_forward_method",
    "training.TestFullyShardGradientAccumulation.test_1f1b_microbatching",
    "training.TestFullyShardHSDPTraining.test_train_parity_hsdp",
    "training.TestFullyShardShardPlacementFnMultiProcess.test_train_parity_shard_placement_fn_shard_largest_dim",
    "training.TestFullyShardShareCommContext.test_share_comm_context",
    "training.TestFullyShardSharedParams.test_layer_by_layer_shard_no_false_positive",
    "training.TestFullyShardSharedParams.test_train_parity_with_shared_params",
    "training.TestFullyShardSharedParams.test_train_shared_params_uneven_shard",
    "training.TestFullyShardWorldSize1.test_train_parity_single_worldsize1",
)
#: A model with a compression is called, but nothing is exchanged.
NO_EXCHANGE = (
    "state_dict.TestFullyShardStateDictMultiProcess.test_dp_state_dict_save_load",
    "training.TestFullyShardSharedParams.test_shared_params_separate_fsdp_groups_error",
)
#: How many ranks these get: more than two, so that replicas are divided, where they look at what torch gathers or
#: reduces, or take ``full_tensor()`` for a copy; fewer than eight where a shard would be divided again, which hangs
#: (docs/fsdp.md#limits).
RANKS = {
    _CORE + "test_multi_forward_module": 4,
    "clip_grad_norm_.TestClipGradNormWorldSize2.test_clip_grad_norm_1d": 4,
    _COMPOSE + "test_partial_group_forward_then_standalone": 4,
    "training.TestFullyShardShareCommContext.test_share_comm_context": 4,
}

_ZEROS = "expects no gradient, and no step of Adam, for parameters that no rank uses: docs/fsdp.md#what-works"
_TENSOR_PARALLEL = "uses tensor parallelism too, which is refused: docs/fsdp.md#limits"
_FAILS = "fails here without us, or is skipped, with CPUs in place of GPUs"
LEFT_OUT = {
    **dict.fromkeys(
        (
            "autograd.TestFullyShardAutograd.test_unused_forward_module",
            "autograd.TestFullyShardAutograd.test_unused_forward_output",
            _CORE + "test_non_root_forward_backward",
            _COMPOSE + "test_double_partial_forward_then_backward",
        ),
        _ZEROS,
    ),
    **dict.fromkeys(
        (
            "clip_grad_norm_.TestClipGradNormWorldSize4.test_clip_grad_norm_2d",
            "grad_scaler.TestFullyShardGradientScaler.test_gradient_scaler",
            "state_dict.TestFullyShardStateDictMultiProcess.test_2d_state_dict_correctness",
            "state_dict.TestFullyShardStateDictMultiProcess.test_dp_tp_state_dict_save_load",
            "state_dict.TestFullyShardStateDictMultiProcess.test_hsdp_tp_state_dict_save_load",
            "training.TestFullyShardHSDP3DTraining.test_3d_mlp_with_nd_mesh",
            "training.TestFullyShardNDTraining.test_2d_mlp_with_nd_mesh",
            "training.TestFullyShardNDTraining.test_shard_placement_fn_tp_ep",
        ),
        _TENSOR_PARALLEL,
    ),
    **dict.fromkeys(
        (
            "comm.TestFullyShardCommunication.test_fully_shard_communication_count",
            "comm.TestFullyShardPrefetch.test_fully_shard_backward_prefetch",
            "comm.TestFullyShardPrefetch.test_fully_shard_multi_module_backward_prefetch",
            "comm.TestFullyShardPrefetch.test_set_modules_to_backward_prefetch",
            "comm.TestFullyShardPrefetch.test_set_modules_to_forward_prefetch",
            "state_dict.TestFullyShardStateDictMultiProcess.test_dp_state_dict_cpu_offload",
            "training.TestFullyShardCudaGraph.test_two_layer_fully_shard_cudagraph",
            _CORE + "test_post_optim_event",
        ),
        _FAILS,
    ),
    **dict.fromkeys(
        (
            _CORE + "test_train_parity_multi_group",
            _CORE + "test_train_parity_multi_group_cpu_offload_eager",
            _CORE + "test_train_parity_multi_group_unshard_async_op",
            _COMPOSE + "test_train_parity_with_activation_checkpointing",
        ),
        "not tried to its end: it takes minutes, with delays or many models",
    ),
    "training.TestFullyShardGradientAccumulation.test_gradient_accumulation": (
        "counts the all-reduces of a mesh that replicates, and our exchange is none of them; with more ranks, it "
        "divides shards again, which hangs: docs/fsdp.md#limits"
    ),
    "autograd.TestFullyShardPostAccGradHookMultiProcess.test_post_acc_grad_hook_optim_parity": (
        "makes the optimizer's step inside the backward pass, which is refused: docs/fsdp.md#limits"
    ),
    "comm.TestFullyShardUnshardMultiProcess.test_unshard_async": (
        "leaves some parameters to DDP, which is refused: docs/fsdp.md#limits"
    ),
    "extensions.TestFullyShardAllGatherExtensionsMultiProcess.test_all_gather_extensions_train_parity": (
        "trains parameters of a subclass of Tensor, which is refused: docs/fsdp.md#limits"
    ),
}
#: Files whose tests are not in these lists.
OTHER_FILES = {
    "ignore_params": "leaves some parameters to DDP, which is refused: docs/fsdp.md#limits",
    **dict.fromkeys(("compile", "memory", "overlap"), "about GPUs: their compiler, their memory, their streams"),
    **dict.fromkeys(("init", "logging", "state"), "not looked at yet"),
}

#: Of PyTorch's harness: seconds are for each test.
ENVIRONMENT = {
    "BACKEND": "gloo",
    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "300",
    "TEMP_DIR": tempfile.gettempdir(),
    "OMP_NUM_THREADS": "1",  # ranks share the cores of one machine
}


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    yield from opened("tests.support.fsdp_suite", ENVIRONMENT)


@pytest.mark.parametrize("name", [*EXCHANGE, *NO_EXCHANGE])
def test_it_passes_with_none_as_without_us(name: str, suite: Suite) -> None:
    how = {"ranks": RANKS.get(name)}
    check_alike(suite, name, name not in NO_EXCHANGE, how, how)


@pytest.mark.skipif(torch.__version__ < VERSION or torch.__version__ >= (VERSION[0], VERSION[1] + 1), reason="a list")
def test_every_test_is_run_or_left_out_for_a_reason(suite: Suite) -> None:
    """Of those whose ranks are threads of one process, which has one engine, all are left out."""
    found = [name for name, by_threads in suite.ask("list").items() if not by_threads]
    listed = {*EXCHANGE, *NO_EXCHANGE, *LEFT_OUT}
    assert {name for name in found if name.split(".")[0] not in OTHER_FILES} <= listed
