"""Tensors over bare addresses, by way of a DLPack capsule.

``__cuda_array_interface__`` would do for mapped memory only: torch then asks CUDA which device an
address belongs to, and a reserved address without memory behind it belongs to none. DLPack names
the device itself. The structures are those of dlpack.h, version 0.8 (unversioned capsules).
"""

import ctypes
from enum import IntEnum

import torch


class DLDeviceType(IntEnum):
    """Where the bytes are."""

    CPU = 1
    CUDA = 2


_UINT, _BITS, _LANES = 1, 8, 1
_CAPSULE_NAME = b"dltensor"


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

# Torch reads the descriptor when the last view is dropped, which may be at interpreter exit, so
# descriptors are never freed: a hundred bytes for each address range a process reserves.
_descriptors: list[tuple[_DLManagedTensor, ctypes.Array[ctypes.c_int64]]] = []


def tensor_at(address: int, nbytes: int, device: DLDeviceType, ordinal: int) -> torch.Tensor:
    """View ``nbytes`` at ``address`` as 1-D uint8; nothing is read, and nothing is owned.

    Parameters
    ----------
    address, nbytes
        Addresses of the device, with or without memory behind them.
    device, ordinal
        Whose addresses they are.
    """
    shape = (ctypes.c_int64 * 1)(nbytes)
    managed = _DLManagedTensor(
        tensor=_DLTensor(
            data=address,
            device_type=int(device),
            device_id=ordinal,
            ndim=1,
            type_code=_UINT,
            type_bits=_BITS,
            type_lanes=_LANES,
            shape=shape,
        )
    )
    _descriptors.append((managed, shape))
    capsule = _new_capsule(ctypes.addressof(managed), _CAPSULE_NAME, None)
    tensor: torch.Tensor = torch.from_dlpack(capsule)
    return tensor
