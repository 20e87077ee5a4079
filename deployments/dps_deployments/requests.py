"""What a request of the OpenAI-compatible API says to the router: headers, body fields, prompt."""

from collections.abc import Mapping
from typing import Any

from dps_deployments.ray_adapter import PendingRequest
from dps_ray.fleet.ask import Ask, Floor
from dps_ray.fleet.prefixes import prefix_hashes

PRECISION_HEADER = "x-dps-precision"
SESSION_HEADER = "x-dps-session"
PRECISION_FIELD = "dps_precision"
"""Entry of the body's ``vllm_xargs``, for paths on which headers do not reach the router."""
MAX_SESSION_CHARS = 256
PREFIX_CHARS = 16384
"""So much of a prompt's beginning is looked at, characters."""


class BadRequestError(ValueError):
    """The request asks for something that does not exist; one line names it and the choices."""

    status_code = 400


def ask_of(pending_request: PendingRequest | None) -> Ask:
    """Read what matters to routing; anything that is not a request of this API asks for nothing.

    Raises
    ------
    BadRequestError
        On an unknown precision.
    """
    if pending_request is None or not pending_request.args:
        return Ask()
    body, *others = pending_request.args
    headers = getattr(others[0], "headers", None) if others else None
    return Ask(
        floor=floor_of(body, headers),
        session=_session_of(body, headers),
        prefix=prefix_hashes(_prompt_of(body)),
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
        extra = getattr(body, "vllm_xargs", None)
        value = extra.get(PRECISION_FIELD) if isinstance(extra, Mapping) else None
        where = f"vllm_xargs.{PRECISION_FIELD}"
    if value is None:
        return Floor.ANY
    try:
        return Floor(value)
    except ValueError:
        raise BadRequestError(
            f"{where} is {str(value)[:40]!r}: give one of {', '.join(Floor)}"
        ) from None


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
