"""The two libraries a CUDA driver stands on, each behind the smallest surface that serves."""

import importlib
import logging
import threading
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol

import torch

from dps_ray.config import DpsConfigError
from dps_ray.memory.dlpack import DLDeviceType
from dps_ray.memory.driver import VmmError

logger = logging.getLogger("vllm.dps")


def cuda_bindings() -> ModuleType:
    """The module ``cuda.bindings.driver``.

    Raises
    ------
    DpsConfigError
        When it is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DpsConfigError(
            f"additional_config.dps.driver is 'cuda' but cuda-python cannot be imported ({error}): "
            "pip install 'cuda-python>=13'"
        ) from None


class CudaCalls:
    """Calls of the driver API that raise what they return, in the context of one device.

    Parameters
    ----------
    bindings
        ``cuda.bindings.driver``, or what stands in for it.
    ordinal
        CUDA ordinal of the device.

    Raises
    ------
    VmmError
        When there is no CUDA driver, no such device, or it cannot map virtual memory.
    """

    def __init__(self, bindings: Any, ordinal: int) -> None:
        self.bindings = bindings
        self._threads = threading.local()
        self._raw("cuInit", "0", 0)
        self.device = self._raw("cuDeviceGet", f"device {ordinal}", ordinal)
        attribute = bindings.CUdevice_attribute
        managed = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._raw("cuDeviceGetAttribute", managed.name, managed, self.device):
            raise VmmError("cuDeviceGetAttribute", managed.name, f"0 on device {ordinal}")
        self._context = self._raw("cuDevicePrimaryCtxRetain", f"device {ordinal}", self.device)

    def __call__(self, name: str, sizes: str, *arguments: Any) -> Any:
        """Call ``name`` in the device's context and give back its result, if it has one.

        Raises
        ------
        VmmError
            With the call's name, ``sizes`` and CUDA's reason.
        """
        if not getattr(self._threads, "entered", False):
            self._raw("cuCtxSetCurrent", f"device {self.device}", self._context)
            self._threads.entered = True
        return self._raw(name, sizes, *arguments)

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Memory of the device that is free, and all of it."""
        free, total = self("cuMemGetInfo", "")
        return int(free), int(total)

    def close(self) -> None:
        """Release the context."""
        self._raw("cuDevicePrimaryCtxRelease", f"device {self.device}", self.device)

    def _raw(self, name: str, sizes: str, *arguments: Any) -> Any:
        try:
            status, *results = getattr(self.bindings, name)(*arguments)
        except RuntimeError as error:
            # The bindings load libcuda at the first call.
            raise VmmError(name, sizes, str(error)) from error
        if status != self.bindings.CUresult.CUDA_SUCCESS:
            raise VmmError(name, sizes, status.name)
        return results[0] if len(results) == 1 else tuple(results)


class TorchSide(Protocol):
    """What the driver needs of torch: views, and the streams torch computes on."""

    device: torch.device
    device_type: DLDeviceType

    def current_stream(self) -> int:
        """Handle of the stream that the calling thread launches kernels on."""

    def on(self, stream: int) -> AbstractContextManager[Any]:
        """Within this context, torch's operations go to ``stream``."""


class TorchCuda:
    """Torch on a CUDA device."""

    device_type = DLDeviceType.CUDA

    def __init__(self, ordinal: int) -> None:
        self.device = torch.device("cuda", ordinal)

    def current_stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def on(self, stream: int) -> AbstractContextManager[Any]:
        external = torch.cuda.ExternalStream(stream, device=self.device)
        context: AbstractContextManager[Any] = torch.cuda.stream(external)
        return context
