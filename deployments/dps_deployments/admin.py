"""Who may call the controller's admin routes."""

import hmac
import os
from pathlib import Path

from fastapi import HTTPException

from dps_ray.fleet.publication import AdminOptions

MIN_TOKEN_CHARS = 16


def require_token(options: AdminOptions, authorization: str | None) -> None:
    """Let a call with the right token pass.

    Parameters
    ----------
    options
        Where the token is.
    authorization
        The call's ``Authorization`` header.

    Raises
    ------
    HTTPException
        403 where no usable token is configured, 401 for a call without the right one.
    """
    expected = _expected(options)
    scheme, _, given = (authorization or "").partition(" ")
    # Compared as bytes: the header may hold anything.
    same = hmac.compare_digest(given.strip().encode(), expected.encode())
    if scheme.lower() != "bearer" or not same:
        raise HTTPException(
            401,
            "this call needs the admin token: send 'Authorization: Bearer TOKEN'",
            {"WWW-Authenticate": "Bearer"},
        )


def _expected(options: AdminOptions) -> str:
    if options.token_env is not None:
        where = f"environment variable {options.token_env}"
        token = os.environ.get(options.token_env, "")
    elif options.token_file is not None:
        where = f"file {options.token_file}"
        try:
            token = Path(options.token_file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise _closed(f"the {where} cannot be read ({type(error).__name__})") from None
    else:
        raise _closed("set admin.token_env or admin.token_file in the controller's user_config")
    token = token.strip()
    if len(token) < MIN_TOKEN_CHARS:
        raise _closed(
            f"the token in the {where} has {len(token)} characters: give it {MIN_TOKEN_CHARS} "
            "or more"
        )
    return token


def _closed(why: str) -> HTTPException:
    return HTTPException(403, f"admin calls are off: {why}")
