"""A real vLLM engine with its scheduler in this process, so that checks can look inside."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from dps_ray.checks.specs import EngineSpec
from dps_ray.engine.floors import PRECISION_ARGUMENT
from dps_ray.modes import Mode, Pin
from dps_ray.status import EngineStatus

IDLE_STEP_PAUSE_S = 0.001
"""Leaves the CPU to the copies while memory comes back."""


@dataclass
class Engine:
    """One running engine; ``elastic`` says whether it has a SUM manager."""

    spec: EngineSpec
    llm: LLM
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def elastic(self) -> bool:
        return self.spec.dps is not None

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def status(self) -> EngineStatus:
        status = self.scheduler._page.read()
        assert status is not None
        return status

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        logprobs: int | None = None,
        precision: str | None = None,
    ) -> list[str]:
        """Queue greedy requests, with a precision floor if given; ``finish`` runs them."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=logprobs,
            extra_args={PRECISION_ARGUMENT: precision} if precision else None,
        )
        names = []
        for prompt in prompts:
            name = f"check-{next(self._numbers)}"
            self.llm.llm_engine.add_request(
                name, TokensPrompt(prompt_token_ids=list(prompt)), params
            )
            names.append(name)
        return names

    def step(self) -> list[Any]:
        """One engine step; the outputs it produced."""
        return self.llm.llm_engine.step()

    def prefill(self) -> None:
        """Step until every request has its first token."""
        while self.scheduler.waiting or any(
            not request.num_output_tokens for request in self.scheduler.running
        ):
            self.step()

    def finish(self, names: Sequence[str]) -> dict[str, Any]:
        """Step until the named requests have ended; the final outputs of these and of others."""
        missing, done = set(names), {}
        while missing:
            for output in self.step():
                if output.finished:
                    done[output.request_id] = output
                    missing.discard(output.request_id)
        return done

    def return_to_full(self, max_steps: int = 20000) -> bool:
        """Keep stepping until full mode is back; whether it came."""
        for _ in range(max_steps):
            if self.scheduler.mode is Mode.FULL and not self.status.restoring:
                return True
            self.step()
            time.sleep(IDLE_STEP_PAUSE_S)
        return False

    def pin(self, pin: Pin) -> None:
        self.scheduler._page.set_pin(pin)

    def verify_ranks(self) -> list[dict[str, Any]]:
        """Every rank's own comparison of its residual with the backup."""
        return self.llm.collective_rpc("dps_verify")

    def preemptions(self) -> int:
        """vLLM's own counter."""
        return sum(
            int(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name == "vllm:num_preemptions"
        )


def llm_arguments(spec: EngineSpec) -> dict[str, Any]:
    """What vLLM's ``LLM`` is called with for ``spec``."""
    elastic: dict[str, Any] = {}
    if spec.dps is not None:
        elastic = {"quantization": "dps", "additional_config": {"dps": spec.dps}}
    backend = spec.attention_backend
    return {
        "model": spec.model,
        "enforce_eager": not spec.compiled,
        "attention_backend": AttentionBackendEnum[backend] if backend else None,
        "disable_log_stats": False,
        "kv_cache_memory_bytes": spec.kv_bytes,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "block_size": spec.block_size,
        "enable_prefix_caching": spec.enable_prefix_caching,
        "seed": 0,
        **elastic,
        **spec.engine_arguments,
    }


@contextmanager
def engine(spec: EngineSpec) -> Iterator[Engine]:
    """Build the engine of ``spec`` and take it down again."""
    llm = LLM(**llm_arguments(spec))
    try:
        yield Engine(spec, llm)
    finally:
        # It takes down what vLLM holds in this process, too.
        llm.llm_engine.engine_core.shutdown()
