"""Linear layers in both modes, and the operator that stands for them in a compiled graph.

``torch.ops.dps_kernels.elastic_linear(x, residual, bias)`` finds its layer by the address at which
the residual begins: a name would make each layer's graph its own. Which mode runs is asked at each
call, so that one graph serves both.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import Library, register_fake

from dps_kernels.library import available, native
from dps_kernels.linear import compiled_product, explained, prepare_linear
from dps_kernels.planes import Planes


class Access(Protocol):
    """Which residual weights the running step may read. Change it between steps alone."""

    all: bool
    """Every one."""
    addresses: set[int]
    """Those that begin at these addresses."""

    def may_read(self, address: int) -> bool:
        """Whether the residual weight that begins at ``address`` may be read."""


@dataclass
class _Access:
    all: bool = False
    addresses: set[int] = field(default_factory=set)

    def may_read(self, address: int) -> bool:
        return self.all or address in self.addresses


def new_access(device_type: str) -> Access:
    """Give an access that lets no residual weight be read.

    Parameters
    ----------
    device_type
        ``"cpu"`` or ``"cuda"``: where the layers are.
    """
    if device_type != "cpu" or not available():
        return _Access()
    access: Access = native().Access()
    return access


def prepare_elastic_linear(
    planes: Planes, dtype: torch.dtype, access: Access
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """``linear`` of one weight in the mode that is allowed at each call, both modes prepared once.

    ``torch.ops.dps_kernels.elastic_linear`` finds the layer as long as the result lives.

    Parameters
    ----------
    planes
        Of full mode.
    dtype
        Of the activations.
    access
        Of ``new_access``, for the weight's device; without it the lower plane is not touched.

    Returns
    -------
    Callable
        Takes ``x`` and ``bias``.
    """
    assert planes.lower is not None, "a layer without residual has one mode"
    product = compiled_product(planes, dtype)
    if product is not None:
        return explained(native().ElasticLinear(product, access), planes, dtype)
    return _ElasticLinear(planes, planes.lower.data_ptr(), dtype, access)


class _ElasticLinear:
    def __init__(self, planes: Planes, address: int, dtype: torch.dtype, access: Access) -> None:
        self._address, self._access = address, access
        self._full = prepare_linear(planes, dtype)
        self._fast = prepare_linear(planes._replace(lower=None), dtype)
        _layers[address] = self

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product = self._full if self._access.may_read(self._address) else self._fast
        return product(x, bias)


_layers: WeakValueDictionary[int, _ElasticLinear] = WeakValueDictionary()
"""By the address of the residual; the compiled library knows its own."""


def _run(x: Tensor, residual: Tensor, bias: Tensor | None) -> Tensor:
    layer = _layers.get(residual.data_ptr())
    if layer is None:
        raise RuntimeError(
            "residual: no elastic layer begins at this address; it must be the lower plane that "
            "the layer was prepared with"
        )
    return layer(x, bias)


def _result(x: Tensor, residual: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], residual.shape[0])


# The compiled library implements it for CPU tensors, in place of this.
_library = Library("dps_kernels", "FRAGMENT")
_library.define("elastic_linear(Tensor x, Tensor residual, Tensor? bias) -> Tensor")
_library.impl("elastic_linear", _run, "CompositeExplicitAutograd")
register_fake("dps_kernels::elastic_linear", _result, lib=_library)
