"""vLLM's asynchronous scheduler made elastic, over a model that writes known bytes.

Scheduler, block pool, SUM manager, rank and memory are real; the model is a writer of known bytes
on a device that runs behind the host (``late_device``). Its outputs are made by hand.
"""

import random
import uuid
from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from dps_ray.config import DpsOptions
from dps_ray.engine import rank as ranks
from dps_ray.engine.floors import PRECISION_ARGUMENT
from dps_ray.engine.scheduler import DpsAsyncScheduler
from dps_ray.memory.geometry import plan_geometry
from dps_ray.memory.region import ResidualMismatchError
from dps_ray.modes import Floor, Mode

from .late_device import LateDriver, LateStream, Reached, slow

BLOCK_BYTES = 4096
BLOCK_TOKENS = 32
DEPTH = 2
"""Steps scheduled ahead, as in vLLM's engine core without pipeline parallelism."""
STOP, TOKEN = 9, 7


@dataclass
class Flight:
    """A step that was scheduled and launched."""

    output: Any
    blocks: set[int]
    samples: dict[str, bool]
    done: Reached


class AsyncEngine:
    """The engine core's loop over a scheduler and one rank, with two steps in flight."""

    def __init__(self, config: VllmConfig, driver: LateDriver, seed: int) -> None:
        self.rng = random.Random(seed)
        key = uuid.uuid4().hex[:16]
        options = DpsOptions(key=key, min_fast_dwell_s=0.0, restore_max_inflation=1.0)
        config.additional_config = {"dps": options.model_dump(mode="json")}
        self.rank = ranks.begin(options, 0, torch.device("cpu"))
        weights = torch.randint(0, 256, (16 * BLOCK_BYTES,), dtype=torch.uint8)
        self.rank.arena.add("layer", weights)
        geometry = plan_geometry(
            kv_bytes=12 * BLOCK_BYTES,
            residual_bytes=self.rank.arena.used_bytes,
            block_bytes=BLOCK_BYTES,
            granularity_bytes=driver.granularity_bytes,
            unit_bytes=2 * BLOCK_BYTES,
        )
        self.kv = self.rank.build_region(geometry)
        self.stream: LateStream = driver.stream
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=16, dtype=torch.float16
        )
        config.cache_config.num_gpu_blocks = geometry.num_blocks
        self.scheduler = DpsAsyncScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=geometry.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
        )
        self.flights: deque[Flight] = deque()
        self.late_writes = 0
        self.full_steps_on_wrong_weights = 0
        self.modes: set[Mode] = set()
        self.ends: dict[str, FinishReason | None] = {}

    def add(self, tokens: int, max_tokens: int, floor: Floor = Floor.ANY) -> str:
        name = f"request-{self.rng.random()}"
        params = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=[STOP],
            extra_args={PRECISION_ARGUMENT: str(floor)},
        )
        params.update_from_generation_config({}, None)
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        request = Request(name, [TOKEN] * tokens, params, None, block_hasher=hasher)
        self.scheduler.add_request(request)
        return name

    def turn(self) -> None:
        """Schedule while there is room in flight, else settle the oldest step."""
        if self.scheduler.has_requests() and len(self.flights) < DEPTH:
            self._launch()
        else:
            self._settle()

    def run_dry(self) -> None:
        """Turn until nothing is left to compute or to restore."""
        for _ in range(20_000):
            if not self.flights and not self.scheduler.has_requests():
                return
            self.turn()
        raise AssertionError("the engine never comes to rest")

    def close(self) -> None:
        while self.flights:
            self._settle()
        self.scheduler.shutdown()
        self.stream.synchronize()
        self.rank.close()
        self.stream.stop()

    def _launch(self) -> None:
        output = self.scheduler.schedule()
        command = output.dps
        self.modes.add(command.mode)
        touched = set[int]().union(
            *(flight.blocks for flight in self.flights if not flight.done.event.is_set())
        )
        first, per_unit = self._first_elastic, 2
        for task in command.restore:
            unit_blocks = {first + task.unit * per_unit + index for index in range(per_unit)}
            self.late_writes += bool(unit_blocks & touched)
        self.rank.apply(command)
        writes: list[tuple[int, int]] = []
        samples = {}
        for name in output.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            (ids,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            tag = 1 + hash(name) % 255
            writes += [(block, tag) for block in ids]
            samples[name] = not request.is_prefill_chunk
        full = command.mode is Mode.FULL
        done = self.stream.launch(slow(lambda: self._step(full, writes)))
        self.flights.append(Flight(output, {block for block, _ in writes}, samples, done))

    def _step(self, full: bool, writes: list[tuple[int, int]]) -> None:
        if full:
            assert self.rank.memory is not None
            try:
                self.rank.memory.verify_all()
            except ResidualMismatchError:
                self.full_steps_on_wrong_weights += 1
        for block, tag in writes:
            self.kv[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = tag

    def _settle(self) -> None:
        if not self.flights:
            return
        flight = self.flights.popleft()
        flight.done.wait()
        names = list(flight.samples)
        sampled = [
            [STOP if self.rng.random() < 0.1 else TOKEN] if flight.samples[name] else []
            for name in names
        ]
        answers = self.scheduler.update_from_output(
            flight.output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        for answer in chain.from_iterable(answer.outputs for answer in answers.values()):
            self.ends[answer.request_id] = answer.finish_reason

    @property
    def _first_elastic(self) -> int:
        return self.scheduler._pool.first_elastic
