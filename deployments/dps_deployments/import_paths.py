"""``import_path`` of an application: is there something in the code that Serve can deploy?"""

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from inspect import signature
from types import FunctionType
from typing import Any

from ray.serve import Application

from dps_ray.choices import nearest

_ELSEWHERE = ("working_dir", "py_modules")
"""What brings the code of an application to a cluster: it need not be on this machine."""


def import_faults(app: Mapping[str, Any], where: str) -> list[str]:
    """Import what an application names, from the working folder too, as ``serve run`` does.

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
    if not (module and name):
        return []
    field = f"{where}.import_path is {path!r}"
    try:
        with _from_working_folder():
            found: Any = importlib.import_module(module)
    # A module of any owner runs here, and Serve would meet the same error.
    except Exception as error:
        remedy = "give module:builder of an installed module, or of one in the working folder"
        return [f"{field}: {module} cannot be imported ({type(error).__name__}: {error}); {remedy}"]
    for part in name.split("."):
        if not hasattr(found, part):
            return [
                f"{field}: {module} has no {name}; {nearest(name, dir(found))}give the name of "
                "a builder or of an application"
            ]
        found = getattr(found, part)
    if isinstance(found, Application):
        taken = app.get("args")
        return [f"{where}.args is {taken!r}: {path} is built already, remove them"] if taken else []
    if not isinstance(found, FunctionType) or len(signature(found).parameters) != 1:
        return [
            f"{field}, which is a value of type {type(found).__name__}: give an application, or a "
            "function that takes args as its only parameter and returns one"
        ]
    return []


@contextlib.contextmanager
def _from_working_folder() -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, ".")
    try:
        yield
    finally:
        sys.path[:] = before
