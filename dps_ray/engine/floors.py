"""Requests that insist on full precision: who they are, who waits, and what made whose tokens."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.v1.request import Request

from dps_ray.modes import Floor, Mode

PRECISION_ARGUMENT = "dps_precision"
"""Name among the extra arguments of a request's sampling parameters."""
WAIT_ARGUMENT = "dps_wait_s"
"""How long a request that insists on full precision may wait for it, seconds; for ever without."""
GAVE_UP = "dps_gave_up_after_s"
"""Field of the last output of a request that waited for full mode in vain, seconds."""


def insists_on_full(request: Request) -> bool:
    """Whether the request takes full precision or nothing."""
    return bool(_extra_of(request).get(PRECISION_ARGUMENT) == Floor.FULL)


def _extra_of(request: Request) -> dict[str, Any]:
    params = request.sampling_params
    return (params.extra_args or {}) if params is not None else {}


class FullRequests:
    """The requests that insist on full precision, from their arrival to their end.

    Nothing is lent under such a request, so it must fit the base blocks: one that does not could
    never run, nor anything that waits behind it. Front processes refuse those; what comes past
    them ends here, and so does what has waited too long.

    Parameters
    ----------
    limit_tokens
        Most tokens of a request, prompt and output together.
    clock
        Monotonic time, seconds.
    """

    def __init__(self, limit_tokens: int, clock: Callable[[], float]) -> None:
        self.limit_tokens = limit_tokens
        self._clock = clock
        self._names: set[str] = set()
        self._arrived_s: dict[str, float] = {}
        """Of those that wait for their first step and will not do so for ever."""
        self._longest_wait_s: dict[str, float] = {}
        self._too_large: set[str] = set()
        self._gave_up: dict[str, float] = {}
        """How long those waited that have waited too long, seconds."""

    def __len__(self) -> int:
        return len(self._names)

    def admit(self, request: Request) -> bool:
        """Take in a request of any kind; whether it can ever run."""
        if not insists_on_full(request):
            return True
        name = request.request_id
        room = self.limit_tokens - request.num_prompt_tokens
        if room <= 0:
            self._too_large.add(name)
            return False
        self._names.add(name)
        request.max_tokens = min(request.max_tokens, room)
        wait_s = _extra_of(request).get(WAIT_ARGUMENT)
        if wait_s is not None:
            self._arrived_s[name], self._longest_wait_s[name] = self._clock(), wait_s
        return True

    def barred(self, mode: Mode) -> set[str]:
        """Requests that no step may compute now: in fast mode all of them, always those that are
        about to end."""
        if not (self._names or self._too_large or self._gave_up):
            return set()
        ending = self._too_large | self._gave_up.keys()
        return self._names | ending if mode is Mode.FAST else ending

    def started(self, names: Iterable[str]) -> None:
        """These are computed in the coming step: they wait no more."""
        if self._arrived_s:
            for name in self._arrived_s.keys() & names:
                self._forget_wait(name)

    def give_up(self, mode: Mode) -> list[str]:
        """Requests that have waited long enough for full mode: what they wait for now is their end.

        In full mode a request waits as all others do, for its turn.
        """
        if mode is Mode.FULL or not self._arrived_s:
            return []
        now_s = self._clock()
        late = [
            name
            for name, arrived_s in self._arrived_s.items()
            if now_s - arrived_s >= self._longest_wait_s[name]
        ]
        for name in late:
            self._gave_up[name] = now_s - self._arrived_s[name]
            self._names.discard(name)
            self._forget_wait(name)
        return late

    def gave_up(self) -> dict[str, float]:
        """Requests that are about to end because they waited in vain, and how long, seconds."""
        return dict(self._gave_up)

    def remove(self, name: str) -> None:
        """The request has ended."""
        self._names.discard(name)
        self._too_large.discard(name)
        self._gave_up.pop(name, None)
        self._forget_wait(name)

    def _forget_wait(self, name: str) -> None:
        self._arrived_s.pop(name, None)
        self._longest_wait_s.pop(name, None)


class TokenOrigins:
    """For every open request, how many of its tokens each mode has made."""

    def __init__(self) -> None:
        self._made: dict[str, list[int]] = {}
        """Tokens of full passes and of fast ones."""

    def credit(self, outputs: Iterable[Any], mode: Mode, gave_up: Mapping[str, float]) -> None:
        """Count the tokens of one pass, and let the last output of a request carry the sums.

        Parameters
        ----------
        outputs
            vLLM's ``EngineCoreOutput`` of each request in the pass. They have a field for a KV
            connector's parameters, which reaches the caller and is free here: connectors are
            refused.
        mode
            Mode of the pass.
        gave_up
            Requests that ended without a token because full mode did not come, and how long they
            waited for it, seconds.
        """
        place = 0 if mode is Mode.FULL else 1
        for output in outputs:
            made = self._made.get(output.request_id)
            if made is None:
                made = self._made[output.request_id] = [0, 0]
            made[place] += len(output.new_token_ids)
            if output.finish_reason is not None:
                del self._made[output.request_id]
                output.kv_transfer_params = {
                    "dps_tokens_full": made[0],
                    "dps_tokens_fast": made[1],
                }
                if output.request_id in gave_up:
                    output.kv_transfer_params[GAVE_UP] = gave_up[output.request_id]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests that ended without a last output."""
        for request_id in request_ids:
            self._made.pop(request_id, None)
