"""What the demo sends: a burst, a quiet minute and a second burst of a real trace, made to fit."""

from dataclasses import dataclass

from dps_ray.bench.trace_files import read_trace
from dps_ray.bench.traces import TraceRequest, fit_context, resize, speed_up, window


@dataclass(frozen=True)
class DemoLoad:
    """Window and scaling of the bundled trace.

    The trace was recorded on GPU servers with contexts of 7,437 tokens; two CPU cores serve a model
    of 135 million parameters at a few dozen tokens per second. Arrivals keep their pattern, lengths
    shrink to a size that two cores finish within the demo's two minutes.
    """

    trace: str = "azure-2023-code-excerpt"
    start_s: float = 37.0
    end_s: float = 145.0
    speed: float = 1.2
    prompt_scale: float = 0.05
    max_prompt_tokens: int = 320
    output_scale: float = 0.6
    max_output_tokens: int = 48

    def requests(self, max_model_len: int) -> list[TraceRequest]:
        """The requests, fitted to the model's context."""
        chosen = window(read_trace(self.trace), self.start_s, self.end_s)
        sized = resize(
            speed_up(chosen, self.speed),
            prompt_scale=self.prompt_scale,
            output_scale=self.output_scale,
            max_prompt_tokens=self.max_prompt_tokens,
            max_output_tokens=self.max_output_tokens,
        )
        return fit_context(sized, max_model_len)


def warm_up(replicas: int) -> list[TraceRequest]:
    """A few short requests at once: they touch every code path and give the decode step time."""
    return [TraceRequest(0.0, prompt_tokens=24, output_tokens=16)] * (4 * replicas)
