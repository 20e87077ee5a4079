"""Which driver serves a device."""

from typing import Literal

from dps_ray.config import DpsConfigError
from dps_ray.memory.cuda_driver import CudaDriver
from dps_ray.memory.driver import VmmDriver, VmmError
from dps_ray.memory.host_driver import HostDriver

DriverKind = Literal["host", "cuda"]

_CUDA_GRANULARITY_BYTES = 2 << 20


def open_driver(kind: DriverKind, ordinal: int) -> VmmDriver:
    """The driver of this process's memory.

    Parameters
    ----------
    kind
        ``host`` for the memory of a CPU engine, ``cuda`` for that of a GPU.
    ordinal
        CUDA ordinal of the device; of no account on a host.

    Raises
    ------
    DpsConfigError
        When cuda-python is not installed, or CUDA cannot drive the device.
    """
    if kind == "host":
        return HostDriver()
    try:
        return CudaDriver(ordinal)
    except VmmError as error:
        raise DpsConfigError(
            f"additional_config.dps.driver is 'cuda' but device {ordinal} cannot be driven "
            f"({error}): check the NVIDIA driver and CUDA_VISIBLE_DEVICES"
        ) from error


def planned_granularity_bytes(kind: DriverKind) -> int:
    """The driver's granularity, for plans made in a process that must not start CUDA.

    Every NVIDIA GPU so far maps pieces of 2 MiB. The worker asks its device and plans anew.
    """
    return _CUDA_GRANULARITY_BYTES if kind == "cuda" else HostDriver().granularity_bytes
