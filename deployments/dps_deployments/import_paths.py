"""``import_path`` of an application: is there something in this package that Serve can deploy?"""

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from inspect import signature
from types import FunctionType
from typing import Any

from dps_deployments.late_refusals import TYPO
from dps_ray.choices import nearest

PACKAGE = "dps_deployments"
_ELSEWHERE = (
    "working_dir",
    "py_modules",
    "pip",
    "uv",
    "conda",
    "py_executable",
    "image_uri",
    "container",
)
"""What brings code to a cluster, perhaps another release of this package too."""


def import_faults(app: Mapping[str, Any], where: str) -> list[str]:
    """Look for the builder that an application names in this package.

    Other code is not imported: the cluster may have it and this machine not, and it would run
    here.

    Parameters
    ----------
    app
        The application's entry in the file.
    where
        Its dotted path, for the messages.
    """
    path, env = app.get("import_path"), app.get("runtime_env")
    brought = isinstance(env, Mapping) and any(env.get(name) for name in _ELSEWHERE)
    if not isinstance(path, str) or brought:
        return []
    module, _, name = path.rpartition(":" if ":" in path else ".")
    package = module.partition(".")[0]
    if not (package and name):
        return []
    field = f"{where}.import_path is {path!r}"
    if package != PACKAGE:
        meant = nearest(package, [PACKAGE], TYPO)
        unknown = meant and find_spec(package) is None
        return [f"{field}: there is no {package}; {meant}correct it"] if unknown else []
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        return [f"{field}: {error}; give module:builder, such as {PACKAGE}.app:build_fleet"]
    for part in name.split("."):
        if not hasattr(found, part):
            return [
                f"{field}: {module} has no {name}; {nearest(name, dir(found))}give the name of "
                "a builder"
            ]
        found = getattr(found, part)
    if not isinstance(found, FunctionType) or len(signature(found).parameters) != 1:
        return [
            f"{field}, which is a value of type {type(found).__name__}: give a function that takes "
            "args as its only parameter and returns an application"
        ]
    return []
