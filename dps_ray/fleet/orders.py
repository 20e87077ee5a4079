"""Mode pins that an operator sets by calls while the fleet runs.

The controller keeps no disk. Every reply hands its orders to a replica and every report hands them
back, so that a new controller takes the latest ones over from any replica that has heard them.
"""

from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict

from dps_ray.modes import Pin

FLEET = "*"
"""Stands for every replica that is not named itself."""


class Orders(BaseModel):
    """Pins by replica id, ``*`` for all others. The highest revision counts."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    revision: int = 0
    pins: dict[str, Pin] = {}

    def pinned(self, target: str, pin: Pin | None, now_ms: int) -> Self:
        """The next revision, in which a replica or the fleet has this pin; ``None`` for no order.

        Parameters
        ----------
        target
            Replica id, or ``*``.
        pin
            The pin.
        now_ms
            Wall clock, milliseconds: revisions grow over restarts of the controller.
        """
        pins = {name: known for name, known in self.pins.items() if name != target}
        if pin is not None:
            pins[target] = pin
        return self.model_copy(
            update={"revision": max(self.revision + 1, now_ms), "pins": pins},
        )

    def without(self, replica_id: str) -> Self:
        """These orders less those for a replica that is gone for ever."""
        if replica_id not in self.pins:
            return self
        pins = {name: pin for name, pin in self.pins.items() if name != replica_id}
        return self.model_copy(update={"pins": pins})

    def pin_of(self, replica_id: str, configured: Mapping[str, Pin]) -> Pin | None:
        """The pin of a replica; its own beats ``*``, and an order beats the configuration.

        Parameters
        ----------
        replica_id
            The replica.
        configured
            ``pins`` of the controller's configuration.
        """
        for name in (replica_id, FLEET):
            for pins in (self.pins, configured):
                if name in pins:
                    return pins[name]
        return None
