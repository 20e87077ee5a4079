"""What the controller's operator sets, and what its routers receive."""

from ipaddress import ip_address
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from dps_ray.config import DpsConfigError
from dps_ray.faults import faults_of
from dps_ray.fleet.admission import AdmissionOptions
from dps_ray.fleet.aggregate import AggregateOptions
from dps_ray.fleet.budget import BudgetOptions
from dps_ray.fleet.leases import LeaseOptions
from dps_ray.fleet.policies import ModeAware, Policy
from dps_ray.fleet.snapshot import FleetSnapshot, FreshnessOptions
from dps_ray.fleet.tally import DryRun
from dps_ray.modes import Pin

DEFAULT_ADMIN_PORT = 8300


def _no_name(host: str) -> str:
    """To look a name up would block the controller, again with every try to listen."""
    try:
        ip_address(host)
    except ValueError:
        raise ValueError(
            "give an IP address: 127.0.0.1 for the node itself, 0.0.0.0 for all its interfaces"
        ) from None
    return host


Address = Annotated[str, AfterValidator(_no_name)]


class AdminOptions(BaseModel):
    """Where admin calls are taken, and where the token is that they must bring; without one there
    are no such calls."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token_env: str | None = None
    """Environment variable of the controller's process that holds the token."""
    token_file: str | None = None
    """File that holds it, read at every call, so that it can be replaced at any time."""
    host: Address = "127.0.0.1"
    """IP address, on the node of the controller, at which calls are taken. They travel unencrypted:
    another than the node itself needs a network that only operators reach."""
    port: Annotated[int, Field(ge=1, le=65535)] = DEFAULT_ADMIN_PORT
    """Port for them. No proxy of Serve leads there."""

    @property
    def place(self) -> tuple[str, int] | None:
        """Host and port; ``None`` where no token is named."""
        if self.token_env is None and self.token_file is None:
            return None
        return self.host, self.port

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.token_env is not None and self.token_file is not None:
            raise ValueError("token_env and token_file are both given: keep one of the two")
        return self


class DirectOptions(BaseModel):
    """Where replicas and routers call the controller without Serve in between."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    """``false``: all calls go over Serve's handle, which costs the controller several times as
    much for each."""
    host: Address | None = None
    """IP address, on the node of the controller. Default: the one that Ray knows the node by."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port; 0 for any that is free. Give one where a firewall must let it through."""


class ControllerOptions(BaseModel):
    """The controller's ``user_config``: every value can be changed while the fleet runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    routing: Policy = ModeAware()
    """Routing policy of every router, by ``name``, with its parameters."""
    dry_run: DryRun | None = None
    """A policy to try beside it: it decides too, its picks are compared and moved nowhere."""
    ageing: AggregateOptions = AggregateOptions()
    """When silence makes a replica stale or forgotten, and how often versions are made."""
    admission: AdmissionOptions = AdmissionOptions()
    """How long requests wait to be placed."""
    leases: LeaseOptions = LeaseOptions()
    """Who may restore at once."""
    budget: BudgetOptions = BudgetOptions()
    """How much of the fleet may be in fast mode."""

    admin: AdminOptions = AdminOptions()
    """Who may give orders by calls."""
    direct: DirectOptions = DirectOptions()
    """Where the fleet's own calls are taken."""
    pins: dict[str, Pin] = {}
    """Mode pins by replica id, ``*`` for all others. A replica that is no longer named goes back to
    the pin it was started with."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        stale_s, ttl_s = self.ageing.stale_after_s, self.leases.ttl_s
        if self.leases.enabled and ttl_s <= stale_s:
            raise ValueError(
                f"leases.ttl_s ({ttl_s}) must be above ageing.stale_after_s ({stale_s}), or a "
                "lease would run out before its holder counts as silent"
            )
        both_listen = self.direct.enabled and self.admin.place is not None
        if both_listen and self.direct.port == self.admin.port:
            raise ValueError(
                f"direct.port and admin.port are both {self.admin.port}: give two ports"
            )
        return self


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
        return ControllerOptions.model_validate(user_config or {})
    except ValidationError as error:
        raise DpsConfigError(*faults_of(error, "user_config")) from None


class Publication(BaseModel):
    """One answer to a router that listens."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    snapshot: FleetSnapshot
    routing: Policy
    dry_run: DryRun | None = None
    admission: AdmissionOptions = AdmissionOptions()
    freshness: FreshnessOptions
