"""PyTorch's own tests of DistributedDataParallel and of its hooks pass with `none` where they pass without us.

They are those in PyTorch's wheel, as they are, with two ranks over Gloo. Most ask for two GPUs and get the CPU in their
place; `tests.support.cpu_as_gpus` says how. Every model gets a compression of its parameters right after it is wrapped.
Each test runs beside its control, without us.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import torch

from tests.support.suites import Suite, check_alike, opened

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

#: Whose list this is: another version has other tests.
VERSION = (2, 13)
#: Gradients are exchanged in these.
EXCHANGE = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_broadcast_buffer",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_compile_static_graph",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_control_flow_same_across_ranks",
    "test_ddp_create_graph",
    "test_ddp_forward_backward_hook",
    "test_ddp_ignore_params_arg",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_logging_data_cpu",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_sink_noclone",
    "test_ddp_static_graph_nested_types",
    "test_detect_ddp_is_actually_static",
    "test_different_graph_across_ranks",
    "test_grads_same_across_ranks_with_no_sync",
    "test_invalid_static_graph",
    "test_output_unused_in_loss_dict_module",
    "test_output_unused_in_loss_tuple_module",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
    "test_static_graph_api_cpu",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
)
#: These give one model a hook and compare it with another one without: that one gets a compression, at its first step.
BESIDE_HOOKS = (
    "test_ddp_hook_parity_allreduce",
    "test_ddp_hook_parity_allreduce_process_group",
    "test_ddp_hook_parity_post_localSGD",
    "test_ddp_hook_parity_powerSGD",
)
#: A model with a compression is wrapped, moved, refused or looked at, but nothing is exchanged.
NO_EXCHANGE = (
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
    "test_ddp_broadcast_buffers_deprecation_warning",
    "test_ddp_build_debug_param_to_name_mapping",
    "test_ddp_build_debug_param_to_name_mapping_requires_grad",
    "test_ddp_device_mesh_initialization",
    "test_ddp_multiple_nested_unused_params_err_ignore_params",
    "test_ddp_multiple_nested_unused_params_error",
    "test_ddp_namedtuple",
    "test_ddp_python_error_logged",
    "test_ddp_sync_module_states",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_ddp_zero_output_features",
    "test_get_data_parallel_params",
    "test_stateless_api_with_ddp",
    "test_verify_model_across_rank_with_logger",
    "test_verify_model_across_rank_without_logger",
)

_GPU = "needs GPUs that compute: "
_UNEVEN = "calls join() with uneven batches, which is refused: docs/ddp.md#uneven-batches"
LEFT_OUT = {
    **dict.fromkeys(
        (
            *(
                f"test_DistributedDataParallel_SyncBatchNorm{which}"
                for which in (
                    "",
                    "_2D_Input",
                    "_Channels_Last",
                    "_Diff_Input_Sizes_Running_Value",
                    "_Diff_Input_Sizes_gradient",
                    "_No_Affine",
                    "_Single_Input_Per_Process",
                    "_half",
                )
            ),
            "test_ddp_inference",
            "test_ddp_uneven_inputs_stop_iteration_sync_bn",
            "test_sync_bn_logged",
        ),
        _GPU + "SyncBatchNorm has no version for CPUs",
    ),
    **dict.fromkeys(
        (
            "test_ddp_apply_optim_in_backward",
            "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
            "test_ddp_apply_optim_in_backward_ignored_params",
            "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
            "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
            "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
            "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
        ),
        _GPU + "streams and events",
    ),
    "test_ddp_device": _GPU + "it compares devices",
    "test_ddp_logging_data_gpu": _GPU + "it compares devices",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd": "needs four ranks",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view": "needs four ranks",
    **dict.fromkeys(
        (
            "test_ddp_grad_div_uneven_inputs",
            "test_ddp_join_model_equivalence",
            "test_ddp_join_respects_forward_sync_buffers_false",
            "test_ddp_uneven_input_exception",
            "test_ddp_uneven_input_join_disable",
            "test_ddp_uneven_inputs",
        ),
        _UNEVEN,
    ),
    **dict.fromkeys(
        (
            "test_accumulate_gradients_no_sync_allreduce_hook",
            "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        ),
        "gives its only model a hook of torch's",
    ),
    "test_ddp_native_mixed_precision_ignored_params": "mixed_precision= is refused: docs/ddp.md#limits",
    "test_skip_all_reduce_unused_parameters": "skip_all_reduce_unused_params=True is refused: docs/ddp.md#limits",
    "test_ddp_profiling_torch_profiler": "it counts all-reduces in a profile, and our exchange is none of them",
    "test_ddp_comm_hook_logging": "expects the log of a model without a hook, and then those of torch's own",
    "test_DistributedDataParallel_requires_grad": "wraps no model that can be trained",
    "test_ddp_model_diff_num_params_across_ranks": "DistributedDataParallel itself refuses the model",
    **dict.fromkeys(
        (
            "test_DistributedDataParallel",
            "test_DistributedDataParallel_non_default_stream",
            "test_compute_bucket_assignment_by_size_sparse_error_with_logger",
            "test_ddp_has_finalized",
            "test_ddp_hook_pickling_powerSGD",
            "test_ddp_model_diff_shape_across_ranks",
            "test_ddp_profiling_autograd_profiler",
            "test_ddp_profiling_execution_trace",
            "test_ddp_sync_bn_training_vs_eval",
        ),
        "PyTorch skips it itself: it is flaky, fails or hangs there",
    ),
}


#: Of PyTorch's harness: seconds are for each test.
ENVIRONMENT = {
    "BACKEND": "gloo",
    "WORLD_SIZE": "2",
    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "300",
    "TEMP_DIR": tempfile.gettempdir(),
    "OMP_NUM_THREADS": "1",  # ranks share the cores of one machine
}


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    yield from opened("tests.support.torch_suite", ENVIRONMENT)


@pytest.mark.parametrize("name", [*EXCHANGE, *BESIDE_HOOKS, *NO_EXCHANGE])
def test_it_passes_with_none_as_without_us(name: str, suite: Suite) -> None:
    check_alike(suite, name, name not in NO_EXCHANGE, {"late": False}, {"late": name in BESIDE_HOOKS})


@pytest.mark.skipif(torch.__version__ < VERSION or torch.__version__ >= (VERSION[0], VERSION[1] + 1), reason="a list")
def test_every_test_that_wraps_a_model_is_run_or_left_out_for_a_reason(suite: Suite) -> None:
    listed = [*EXCHANGE, *BESIDE_HOOKS, *NO_EXCHANGE, *LEFT_OUT]
    assert sorted(listed) == suite.ask("list")
