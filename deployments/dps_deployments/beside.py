"""What the router of a process knows that the ingress in the same process needs."""

from dataclasses import dataclass, field

from dps_ray.fleet.admission import AdmissionOptions


@dataclass(slots=True)
class Beside:
    """Figures of one application, kept up to date by its router."""

    admission: AdmissionOptions = field(default_factory=AdmissionOptions)
    """The operator's bounds."""
    places: int = 0
    """Requests that the replicas may hold together; 0 while none is known."""
    serves_full: bool = False
    """Some replica may take requests that insist on full precision."""


_BY_APPLICATION: dict[str, Beside] = {}


def beside(application: str) -> Beside:
    """The figures of an application in this process; its router and its ingress share them."""
    return _BY_APPLICATION.setdefault(application, Beside())
