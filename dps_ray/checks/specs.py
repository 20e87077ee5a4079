"""What a check asks of an engine, as plain data that crosses a process boundary."""

from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class EngineSpec:
    """One vLLM engine to build, use and take down."""

    label: str
    model: str
    """Folder of the model."""
    kv_bytes: int
    """Base KV memory of one rank, bytes."""
    dps: dict[str, Any] | None = None
    """``additional_config["dps"]``; ``None`` for plain vLLM."""
    tensor_parallel_size: int = 1
    max_model_len: int = 1024
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    """Tokens of one step; ``None``: vLLM's default."""
    block_size: int = 32
    enable_prefix_caching: bool = True
    scenario: str = "generate"
    """Name of a function in ``dps_ray.checks.scenarios``."""
    arguments: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        return cls(**raw)
