"""Requests that the fleet does not serve, as errors with an HTTP status of their own."""

import math

from fastapi.responses import JSONResponse


class RefusalError(Exception):
    """A request that is turned away.

    Ray's LLM ingress reads ``status_code``. All of it is in ``args``, so that it survives the way
    from one process to another.

    Parameters
    ----------
    message
        One line for the client.
    status_code
        HTTP status.
    retry_after_s
        When to try again, seconds; ``None`` where that would not help.
    """

    def __init__(self, message: str, status_code: int, retry_after_s: float | None = None) -> None:
        super().__init__(message, status_code, retry_after_s)
        self.message = message
        self.status_code = status_code
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class BadRequestError(RefusalError):
    """The request asks for something that does not exist; one line names it and the choices."""


class PrecisionUnavailableError(RefusalError):
    """No replica was in full mode in time for a request that insists on it."""


class NoReplicaError(RefusalError):
    """No replica could serve in time."""


class ReplicaLostError(RefusalError):
    """The replica died before it had answered anything: another one can take the request."""


class OverloadedError(RefusalError):
    """The queue before the replicas is full."""


def refusal_response(error: RefusalError) -> JSONResponse:
    """The HTTP response of a refusal, in the form of the OpenAI API."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    content = {
        "error": {"message": error.message, "type": type(error).__name__, "code": error.status_code}
    }
    return JSONResponse(content=content, status_code=error.status_code, headers=headers)


def bad_request(message: str) -> BadRequestError:
    return BadRequestError(message, 400)


def precision_unavailable(waited_s: float, retry_after_s: float) -> PrecisionUnavailableError:
    return PrecisionUnavailableError(
        f"no replica in full precision had a place within {waited_s:.1f} s: try again after "
        f"{retry_after_s:.0f} s, or accept X-DPS-Precision: prefer-full",
        503,
        retry_after_s,
    )


def no_replica(waited_s: float, retry_after_s: float) -> NoReplicaError:
    return NoReplicaError(
        f"no replica could serve within {waited_s:.1f} s: try again after {retry_after_s:.0f} s",
        503,
        retry_after_s,
    )


def replica_lost(cause: str) -> ReplicaLostError:
    return ReplicaLostError(f"the replica died before it answered ({cause})", 503, 1.0)


def overloaded(open_requests: int, retry_after_s: float) -> OverloadedError:
    return OverloadedError(
        f"{open_requests} requests are waiting or running: try again after {retry_after_s:.0f} s",
        503,
        retry_after_s,
    )
