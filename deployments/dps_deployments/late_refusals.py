"""What Serve takes in silence from a config file and fails with when it deploys."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from ray.runtime_env import RuntimeEnv

from dps_ray.choices import nearest

MAX_PORT = 65535
TYPO = 0.85
"""Likeness from which an unknown name is taken for another: Ray's plugins have names of their
own."""
_FILES = ("pip", "uv", "conda")
"""Texts under these names are files, of the cluster."""


def port_faults(options: Any, where: str) -> list[str]:
    """Of ``http_options`` or ``grpc_options``: any whole number passes, until a proxy listens.

    0 turns gRPC off.
    """
    port = options.get("port") if isinstance(options, Mapping) else None
    if not isinstance(port, int) or 0 <= port <= MAX_PORT:
        return []
    return [f"{where}.port is {port}: give a number from 0 to {MAX_PORT}"]


def route_faults(app: Mapping[str, Any], where: str) -> list[str]:
    """Of an application's ``route_prefix``."""
    route = app.get("route_prefix")
    if not isinstance(route, str):
        return []
    if route.startswith("/") and not set("{}") & set(route) and (route == "/" or route[-1] != "/"):
        return []
    return [
        f"{where}.route_prefix is {route!r}: begin it with '/', without one at its end and without "
        "braces"
    ]


def runtime_env_faults(env: Any, where: str) -> list[str]:
    """Of a ``runtime_env``: misspelt names, which Ray ignores, and values that it refuses."""
    if not isinstance(env, Mapping):
        return []
    known = {*RuntimeEnv.known_fields, *signature(RuntimeEnv).parameters} - {"kwargs"}
    faults = [
        f"{where}.{name} is not an option: {meant}remove it or correct its spelling"
        for name in env
        if name not in known and (meant := nearest(name, known, TYPO))
    ]
    checked = {
        name: value
        for name, value in env.items()
        if name in known and not (name in _FILES and isinstance(value, str))
    }
    try:
        RuntimeEnv(**checked)
    except (TypeError, ValueError) as error:
        faults.append(f"{where}: {' '.join(str(error).split())}")
    return faults
