"""Requests that insist on full precision: who they are, who waits, and what made whose tokens."""

from collections.abc import Iterable
from typing import Any

from vllm.v1.request import Request

from dps_ray.modes import Floor, Mode

PRECISION_ARGUMENT = "dps_precision"
"""Name among the extra arguments of a request's sampling parameters."""


def insists_on_full(request: Request) -> bool:
    """Whether the request takes full precision or nothing."""
    params = request.sampling_params
    extra = (params.extra_args or {}) if params is not None else {}
    return extra.get(PRECISION_ARGUMENT) == Floor.FULL


class TokenOrigins:
    """For every open request, how many of its tokens each mode has made."""

    def __init__(self) -> None:
        self._made: dict[str, dict[Mode, int]] = {}

    def credit(self, outputs: Iterable[Any], mode: Mode) -> None:
        """Count the tokens of one pass, and let the last output of a request carry the sums.

        Parameters
        ----------
        outputs
            vLLM's ``EngineCoreOutput`` of each request in the pass. They have a field for a KV
            connector's parameters, which reaches the caller and is free here: connectors are
            refused.
        mode
            Mode of the pass.
        """
        for output in outputs:
            made = self._made.setdefault(output.request_id, dict.fromkeys(Mode, 0))
            made[mode] += len(output.new_token_ids)
            if output.finish_reason is not None:
                del self._made[output.request_id]
                output.kv_transfer_params = {
                    "dps_tokens_full": made[Mode.FULL],
                    "dps_tokens_fast": made[Mode.FAST],
                }

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests that ended without a last output."""
        for request_id in request_ids:
            self._made.pop(request_id, None)
