"""The Ray release that the deployments and policies are written for."""

from importlib.metadata import version

from dps_ray.config import DpsConfigError

SUPPORTED = "2.60."


def require_supported_ray(found: str | None = None) -> None:
    """Refuse any release whose alpha and private interfaces were not checked.

    Raises
    ------
    DpsConfigError
        One line with the version found and the one to install.
    """
    found = found or version("ray")
    if not found.startswith(SUPPORTED):
        raise DpsConfigError(
            f"ray is {found}, but dps_ray is written for {SUPPORTED}x: "
            f"install ray[serve]=={SUPPORTED}0"
        )
