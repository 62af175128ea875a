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

from tests.support.suites import Suite

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
    "training.TestFullyShardShardPlacementFnMultiProcess.test_train_parity_shard_placement_fn_shard_largest_dim",
    "training.TestFullyShardShareCommContext.test_share_comm_context",
    "training.TestFullyShardSharedParams.test_layer_by_layer_shard_no_false_positive",
    "training.TestFullyShardSharedParams.test_train_parity_with_shared_params",
    "training.TestFullyShardSharedParams.test_train_shared_params_uneven_shard",
    "training.TestFullyShardWorldSize1.test_train_parity_single_worldsize1",
)
#: A model with a compression is called, but nothing is exchanged.
NO_EXCHANGE = ("training.TestFullyShardSharedParams.test_shared_params_separate_fsdp_groups_error",)
#: How many ranks these get in place of two, so that replicas are divided: where a shard is the whole tensor, torch
#: gathers nothing, reduces no norm, and ``full_tensor()`` makes no copy, all of which these look at.
RANKS = {
    "clip_grad_norm_.TestClipGradNormWorldSize2.test_clip_grad_norm_1d": 4,
    _COMPOSE + "test_partial_group_forward_then_standalone": 4,
    "training.TestFullyShardShareCommContext.test_share_comm_context": 4,
}

_ZEROS = "expects no gradient, and no step of Adam, for parameters that no rank uses: docs/fsdp.md#what-works"
