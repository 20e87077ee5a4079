"""What a request of the OpenAI-compatible API says to the router: headers, body fields, prompt."""

import math
from collections.abc import Mapping
from typing import Any

from dps_deployments.ray_adapter import PendingRequest
from dps_deployments.refusals import bad_request
from dps_ray.fleet.ask import Ask
from dps_ray.fleet.prefixes import prefix_hashes
from dps_ray.modes import Floor

PRECISION_HEADER = "x-dps-precision"
WAIT_HEADER = "x-dps-wait-s"
SESSION_HEADER = "x-dps-session"
PRIORITY_HEADER = "x-vllm-priority"
"""vLLM's own name; it beats the body's ``priority`` there too."""
READ_HEADERS = frozenset(
    name.encode() for name in (PRECISION_HEADER, WAIT_HEADER, SESSION_HEADER, PRIORITY_HEADER)
)
PRECISION_FIELD = "dps_precision"
"""Entry of the body's ``vllm_xargs``, for paths on which headers do not reach the router."""
WAIT_FIELD = "dps_wait_s"
"""Entry of ``vllm_xargs`` with the seconds that the request may still wait to be placed: what the
client says, then what each stage on the way has left of it for the next."""
MAX_SESSION_CHARS = 256
PREFIX_CHARS = 16384
"""So much of a prompt's beginning is looked at, characters."""


def ask_of(pending_request: PendingRequest | None) -> Ask:
    """Read what matters to routing; anything that is not a request of this API asks for nothing.

    Raises
    ------
    BadRequestError
        On an unknown precision or a wait that is no number.
    """
    if pending_request is None or not pending_request.args:
        return Ask()
    body, *others = pending_request.args
    headers = getattr(others[0], "headers", None) if others else None
    return Ask(
        floor=floor_of(body, headers),
        session=_session_of(body, headers),
        prefix=prefix_hashes(_prompt_of(body)),
        wait_s=wait_of(body, headers),
    )


def floor_of(body: Any, headers: Mapping[str, str] | None) -> Floor:
    """Precision floor of a request: the header, else the body's ``vllm_xargs``, else ``any``.

    Raises
    ------
    BadRequestError
        On a value that is no floor.
    """
    value = _header(headers, PRECISION_HEADER)
    where = "header X-DPS-Precision"
    if value is None:
        value = _extra_of(body).get(PRECISION_FIELD)
        where = f"vllm_xargs.{PRECISION_FIELD}"
    if value is None:
        return Floor.ANY
    try:
        return Floor(value)
    except ValueError:
        raise bad_request(
            f"{where} is {str(value)[:40]!r}: give one of {', '.join(Floor)}"
        ) from None


def wait_of(body: Any, headers: Mapping[str, str] | None) -> float | None:
    """How long the request is willing to wait to be placed, seconds; ``None`` for the default.

    The shorter counts of the header and the body's ``vllm_xargs``: what has been waited is taken
    off the body alone.

    Raises
    ------
    BadRequestError
        On anything but a number of seconds.
    """
    told: list[float] = []
    value = _header(headers, WAIT_HEADER)
    if value is not None:
        try:
            told.append(float(value))
        except ValueError:
            told.append(math.nan)
        _check_seconds(told[-1], value, "header X-DPS-Wait-S")
    extra = _extra_of(body).get(WAIT_FIELD)
    if extra is not None:
        is_number = isinstance(extra, int | float) and not isinstance(extra, bool)
        told.append(float(extra) if is_number else math.nan)
        _check_seconds(told[-1], extra, f"vllm_xargs.{WAIT_FIELD}")
    return min(told, default=None)


def leave_wait(body: Any, left_s: float) -> None:
    """Tell the next stage how much longer a request may wait, seconds.

    A body without ``vllm_xargs`` is of a kind that makes no tokens and waits for no mode.
    """
    if hasattr(body, "vllm_xargs"):
        body.vllm_xargs = {**_extra_of(body), WAIT_FIELD: max(0.0, left_s)}


def priority_of(body: Any, headers: Mapping[str, str] | None) -> int:
    """Priority of a request, lower is sooner: the header, else the body's field, else 0.

    Raises
    ------
    BadRequestError
        On a header that is no whole number of 64 bits; vLLM would ignore it.
    """
    value = _header(headers, PRIORITY_HEADER)
    if value is None:
        return getattr(body, "priority", None) or 0
    try:
        priority = int(value)
    except ValueError:
        priority = 2**63
    if not -(2**63) <= priority < 2**63:
        raise bad_request(
            f"header X-Vllm-Priority is {value[:40]!r}: give a whole number, lower is sooner"
        )
    return priority


def _extra_of(body: Any) -> Mapping[str, Any]:
    extra = getattr(body, "vllm_xargs", None)
    return extra if isinstance(extra, Mapping) else {}


def _check_seconds(seconds: float, value: Any, where: str) -> None:
    if not 0.0 <= seconds < math.inf:
        raise bad_request(f"{where} is {str(value)[:40]!r}: give seconds, such as 2.5")


def _session_of(body: Any, headers: Mapping[str, str] | None) -> str | None:
    session = _header(headers, SESSION_HEADER) or getattr(body, "user", None)
    return session[:MAX_SESSION_CHARS] if isinstance(session, str) and session else None


def _prompt_of(body: Any) -> str:
    """The beginning of the prompt as text: equal prompts give equal texts, no more is needed."""
    prompt = getattr(body, "prompt", None)
    if isinstance(prompt, str):
        return prompt[:PREFIX_CHARS]
    if isinstance(prompt, list):
        return repr(prompt[: PREFIX_CHARS // 4])
    text = ""
    for message in getattr(body, "messages", None) or ():
        text += repr(message)[: PREFIX_CHARS - len(text)]
        if len(text) >= PREFIX_CHARS:
            break
    return text


def _header(headers: Mapping[str, str] | None, name: str) -> str | None:
    if headers is None:
        return None
    for key, value in headers.items():
        if key.lower() == name:
            return value
    return None
