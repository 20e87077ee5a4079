"""The shortest way from a model's layer to its split experts (CPU, eager).

Between the two stands vLLM's ``MoERunner``. For every layer of every step it asks what there may be
to pad, transform, dispatch, overlap, combine and reduce, which takes longer than the experts of a
small layer. For most mixtures all answers are known once the model is loaded, and all are no.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from dps_ray.engine.moe import DpsMoEMethod


def shorten_runners(model: torch.nn.Module) -> int:
    """Let all layers of split experts whose runner adds nothing call them directly.

    Parameters
    ----------
    model
        Loaded, and not to be compiled: ``torch.compile`` makes one graph of the runner as it is.

    Returns
    -------
    int
        How many layers do so.
    """
    runners = [module for module in model.modules() if isinstance(module, MoERunner)]
    plain = [runner for runner in runners if _adds_nothing(runner)]
    for runner in plain:
        runner.forward = _direct(runner)
    return len(plain)


def _adds_nothing(runner: MoERunner) -> bool:
    """Whether all that stands around the runner's experts is the router before them, and the sum
    over the ranks of a tensor-parallel group after them.

    A runner's method and configuration are replaced for LoRA and elastic expert parallelism alone,
    which are refused: the answer stays what it is.
    """
    method, config = runner._quant_method, runner.moe_config
    return (
        type(runner) is MoERunner
        and isinstance(method, DpsMoEMethod)
        and method.is_monolithic
        and method.splits
        and runner.shared_experts is None
        and not runner._fse_fuse_gate
        and runner.routed_input_transform is None
        and runner.routed_output_transform is None
        and runner.routed_scaling_factor == 1.0
        and not isinstance(runner.router, ZeroExpertRouter)
        and config.hidden_dim == config.hidden_dim_unpadded
        and config.dp_size == config.ep_size == config.pcp_size == 1
        and not config.is_sequence_parallel
        and not config.skip_final_all_reduce
        and not runner._fused_output_is_reduced
    )


def _direct(runner: MoERunner) -> Callable[..., torch.Tensor]:
    experts, gate, compute = runner.routed_experts, runner.gate, runner._quant_method.compute
    several_ranks = runner.moe_config.tp_size > 1

    @wraps(runner.forward)
    def forward(
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> Any:
        if gate is not None:
            router_logits, _ = gate(hidden_states)
        output = compute(experts, hidden_states, router_logits)
        return tensor_model_parallel_all_reduce(output) if several_ranks else output

    return forward
