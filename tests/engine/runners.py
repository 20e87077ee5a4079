"""A process that asks a mixture's layers for their experts in both ways, and prints what it finds.

``direct`` layers of ``layers`` go past vLLM's runner; in ``equal`` of them the same bits come out
both ways; ``missed`` names what a runner can have to do and would be left out.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from dps_ray.checks.engine import engine
from dps_ray.checks.specs import AMPLE_KV_BYTES, AUTO, EngineSpec
from dps_ray.engine.moe_runner import shorten_runners
from dps_ray.models.cache import cache_root
from dps_ray.models.tiny import make_tiny

TO_DO: dict[str, Any] = {
    "routed_scaling_factor": 1.8,
    "_fse_fuse_gate": True,
    "_shared_experts": torch.nn.Identity(),
    "routed_input_transform": torch.nn.Identity(),
    "routed_output_transform": torch.nn.Identity(),
}
CONFIGURED = {"hidden_dim_unpadded": 8, "skip_final_all_reduce": True}
PARALLEL = {"dp_size": 2, "ep_size": 2, "pcp_size": 2, "sp_size": 2}


class OtherRunner(MoERunner):
    """As the Transformers backend has one, whose ``forward`` takes other arguments."""


@contextmanager
def changed(target: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


def is_missed(runner: MoERunner, target: Any, name: str, value: Any) -> bool:
    with changed(target, name, value):
        return shorten_runners(runner) > 0


def main() -> None:
    folder = make_tiny("qwen3-moe", cache_root(), dtype="bfloat16")
    spec = EngineSpec(label="runners", model=str(folder), kv_bytes=AMPLE_KV_BYTES, dps=AUTO)
    with engine(spec) as running:
        worker = running.core.model_executor.driver_worker.worker
        model = worker.model_runner.model
        runners = [module for module in model.modules() if isinstance(module, MoERunner)]
        equal = 0
        with set_forward_context(None, worker.vllm_config):
            for number, runner in enumerate(runners):
                x = torch.randn(5, 256, generator=torch.Generator().manual_seed(number)).bfloat16()
                direct, through = runner(x, x), MoERunner.forward(runner, x, x)
                equal += bool(torch.equal(direct, through) and direct.abs().sum() > 0)
        runner = runners[0]
        config = runner.moe_config
        duties = [(runner, name, value) for name, value in TO_DO.items()]
        duties += [(config, name, value) for name, value in CONFIGURED.items()]
        duties += [
            (config, "moe_parallel_config", replace(config.moe_parallel_config, **{name: value}))
            for name, value in PARALLEL.items()
        ]
        kernel, zero = runner._quant_method.moe_kernel, ZeroExpertRouter.__new__(ZeroExpertRouter)
        duties += [
            (runner, "router", zero),
            (runner, "__class__", OtherRunner),
            (kernel, "output_is_reduced", lambda: True),
            (type(runner._quant_method), "splits", False),
        ]
        missed = [repr(duty[1:]) for duty in duties if is_missed(runner, *duty)]
        direct_ones = sum("forward" in vars(runner) for runner in runners)
    print(
        json.dumps(
            {"layers": len(runners), "direct": direct_ones, "equal": equal, "missed": missed}
        )
    )


if __name__ == "__main__":
    main()
