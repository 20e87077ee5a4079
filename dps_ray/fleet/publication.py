"""What the controller's operator sets, and what its routers receive."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dps_ray.config import DpsConfigError, one_line
from dps_ray.fleet.aggregate import AggregateOptions
from dps_ray.fleet.policies import ModeAware, Policy
from dps_ray.fleet.snapshot import FleetSnapshot, FreshnessOptions


class ControllerOptions(BaseModel):
    """The controller's ``user_config``: every value can be changed while the fleet runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    routing: Policy = ModeAware()
    """Routing policy of every router, by ``name``, with its parameters."""
    ageing: AggregateOptions = AggregateOptions()
    """When silence makes a replica stale or forgotten, and how often versions are made."""


def parse_controller_options(user_config: Any) -> ControllerOptions:
    """Read and check a ``user_config``.

    Raises
    ------
    DpsConfigError
        One line that names each wrong field, its value and what is allowed.
    """
    if user_config is not None and not isinstance(user_config, dict):
        raise DpsConfigError(
            f"user_config is {user_config!r}: give a mapping, for example "
            "{'routing': {'name': 'mode_aware'}}"
        )
    try:
        return ControllerOptions(**(user_config or {}))
    except ValidationError as error:
        raise DpsConfigError(one_line(error, "user_config")) from None


class Publication(BaseModel):
    """One answer to a router that listens."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    snapshot: FleetSnapshot
    routing: Policy
    freshness: FreshnessOptions
