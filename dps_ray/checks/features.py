"""Many features of vLLM at once on one elastic engine that is short of memory."""

import re
from typing import Any

from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams

from dps_ray.checks.engine import Engine
from dps_ray.checks.requests import prompts
from dps_ray.checks.tape import Recorder
from dps_ray.engine.floors import GAVE_UP, PRECISION_ARGUMENT, WAIT_ARGUMENT
from dps_ray.modes import Floor, Mode, Pin

SHARED_TOKENS = 96
"""Three blocks that the prefix cache can hold."""
HEAD_START_STEPS = 60
"""Most steps in which requests that can wait fill the memory before urgent ones arrive."""
URGENT = 4
PATTERN = "(ab|ba){4,12}"
KINDS = ("greedy", "samples", "pattern")
SAMPLES = 3


def features(
    engine: Engine, *, tape: str, waves: int = 2, per_wave: int = 14, max_tokens: int = 60
) -> dict[str, Any]:
    """Waves of requests: shared prefixes, prompts in chunks, priorities, n > 1, grammars, floors.

    Each wave asks for more memory than there is with all of the residual lent, so that requests
    are preempted. The last urgent request of each wave is a long one: full mode returns under it,
    which moves its blocks. Everything the worker is told goes to ``tape``.
    """
    recorder, outputs = Recorder(engine), _Outputs(engine)
    shared = prompts(1, SHARED_TOKENS, SHARED_TOKENS)[0]
    returned = 0
    for wave in range(waves):
        tails = [shared + tail for tail in prompts(per_wave, 20, 200, seed=wave)]
        for number, prompt in enumerate(tails[:-URGENT]):
            outputs.start(f"{wave}-{number}", prompt, KINDS[number % len(KINDS)], 5, max_tokens)
        outputs.step_until(Mode.FAST, HEAD_START_STEPS)
        # One of these waits for full mode, the other does not.
        outputs.start(f"{wave}-insists", tails[0], "insists", 5, max_tokens)
        outputs.start(f"{wave}-hasty", tails[0], "gives up", 5, max_tokens)
        for number, prompt in enumerate(tails[-URGENT:]):
            outputs.start(
                f"{wave}-urgent-{number}", prompt, KINDS[number % len(KINDS)], 0, max_tokens
            )
        outputs.start(f"{wave}-long", tails[1], "long", 0, 4 * max_tokens)
        outputs.finish(except_kind="long")
        returned += outputs.step_until(Mode.FULL)
    outputs.finish()
    beams = _beams(engine, shared)
    recorder.save(tape)
    steps = recorder.scheduled()
    counters = engine.scheduler.sum_manager.counters
    return {
        "requests": len(outputs.ended),
        "steps": {mode: sum(m is mode for _, m in steps) for mode in Mode},
        "blocks": engine.status.total_blocks,
        "preemptions": engine.preemptions(),
        "units_lent": counters.units_lent,
        "blocks_moved": counters.blocks_moved,
        "returned": returned,
        "ranks": engine.verify_ranks(),
        "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs.ended.values()),
        "chunked_prompts": _chunked(steps),
        "overtaken": outputs.overtaken(),
        "beams": beams,
        "waves": waves,
        "kinds": outputs.judged(),
    }


class _Outputs:
    """Requests of several kinds on one engine, and what became of them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[str, str] = {}
        self._kinds: dict[str, str] = {}
        self.ended: dict[str, Any] = {}
        """In the order in which they ended."""

    def start(
        self, name: str, prompt: list[int], kind: str, priority: int, max_tokens: int
    ) -> None:
        self._kinds[name] = self._open[name] = kind
        self._engine.llm.llm_engine.add_request(
            name,
            TokensPrompt(prompt_token_ids=prompt),
            _params(kind, len(self._kinds), max_tokens),
            priority=priority,
        )

    def step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self.ended[output.request_id] = output
                del self._open[output.request_id]

    def finish(self, except_kind: str | None = None) -> None:
        while any(kind != except_kind for kind in self._open.values()):
            self.step()

    def step_until(self, mode: Mode, max_steps: int = 20000) -> bool:
        """Whether ``mode`` comes."""
        for _ in range(max_steps):
            if self._engine.scheduler.mode is mode:
                return True
            self.step()
        return False

    def overtaken(self) -> int:
        """Urgent requests that ended before one of their kind that was there before them."""
        order = list(self.ended)
        return sum(
            any(
                order.index(name) < order.index(other)
                for other in order
                if other.split("-")[0] == name.split("-")[0]
                and "urgent" not in other
                and self._kinds[other] == self._kinds[name]
            )
            for name in order
            if "urgent" in name
        )

    def judged(self) -> dict[str, Any]:
        """Properties of each kind's outputs, as counts of those that have them and of all."""
        decode = self._engine.llm.get_tokenizer().decode
        tests = {
            "greedy": lambda output: len(output.outputs[0].token_ids) > 0,
            "samples": lambda output: (
                len({tuple(each.token_ids) for each in output.outputs}) == SAMPLES
            ),
            "pattern": lambda output: re.fullmatch(
                PATTERN, decode(output.outputs[0].token_ids, skip_special_tokens=True)
            ),
            "insists": lambda output: output.kv_transfer_params["dps_tokens_fast"] == 0,
            "gives up": lambda output: GAVE_UP in output.kv_transfer_params,
            "long": lambda output: output.kv_transfer_params["dps_tokens_full"] > 0,
        }
        return {
            kind: [
                sum(bool(test(self.ended[name])) for name in names),
                len(names),
            ]
            for kind, test in tests.items()
            if (names := [name for name in self.ended if self._kinds[name] == kind])
        }


def _beams(engine: Engine, prompt: list[int], width: int = 4, tokens: int = 8) -> int:
    """Different sequences that a beam search finds in fast mode, then in full mode."""
    found: set[tuple[int, ...]] = set()
    for pin in (Pin.FAST, Pin.AUTO):
        engine.pin(pin)
        (output,) = engine.llm.beam_search(
            [TokensPrompt(prompt_token_ids=prompt)],
            BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True),
        )
        found |= {tuple(sequence.tokens) for sequence in output.sequences}
    return len(found)


def _params(kind: str, seed: int, max_tokens: int) -> SamplingParams:
    common: dict[str, Any] = {
        "max_tokens": max_tokens,
        "logprobs": 1,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    if kind == "samples":
        return SamplingParams(n=SAMPLES, temperature=1.0, seed=seed, ignore_eos=True, **common)
    if kind == "pattern":
        grammar = StructuredOutputsParams(regex=PATTERN)
        return SamplingParams(temperature=0.0, structured_outputs=grammar, **common)
    extra = {
        "insists": {PRECISION_ARGUMENT: Floor.FULL.value},
        "gives up": {PRECISION_ARGUMENT: Floor.FULL.value, WAIT_ARGUMENT: 0.0},
    }.get(kind)
    return SamplingParams(temperature=0.0, ignore_eos=True, extra_args=extra, **common)


def _chunked(steps: list[tuple[Any, Mode]]) -> int:
    """Requests whose prompt took several steps."""
    return sum(
        orders.num_scheduled_tokens[new.req_id]
        < len(new.prompt_token_ids) - new.num_computed_tokens
        for orders, _ in steps
        for new in orders.scheduled_new_reqs
    )
