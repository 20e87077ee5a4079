"""Running Triton kernels on the CPU, in the process that also compiles them.

`TRITON_INTERPRET=1` acts when a kernel is decorated and for the whole process. `interpreted` sends
kernels that are decorated already, and what they call, through the same interpreter, and teaches it
their inline assembly.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    TensorHandle,
    _get_np_dtype,
)
from triton.runtime.jit import JITFunction

from tests.kernels.hopper import ptx

_RESULTS = {"=r": np.dtype(np.uint32), "=h": np.dtype(np.uint16)}


@contextmanager
def interpreted() -> Iterator[None]:
    """Interpret every kernel that is started inside, on CPU tensors."""

    @cache
    def of(function: Callable[..., Any]) -> InterpretedFunction:
        return InterpretedFunction(function)

    def start(kernel: JITFunction, *args: Any, **options: Any) -> Any:
        return of(kernel.fn).run(*args, **options)

    def call(kernel: JITFunction, *args: Any, **options: Any) -> Any:
        # Its own call would leave the language patched for the rest of the process.
        scope = interpreter._patch_lang(kernel.fn)
        try:
            return of(kernel.fn).rewrite()(*args, **options)
        finally:
            scope.restore()

    with (
        mock.patch.object(JITFunction, "run", start),
        mock.patch.object(JITFunction, "__call__", call),
        mock.patch.object(InterpreterBuilder, "create_inline_asm", _inline_assembly),
        mock.patch.object(interpreter, "_convert_float", _convert),
        knobs.runtime.scope(),
    ):
        knobs.runtime.interpret = True
        yield


_CONVERT = interpreter._convert_float
_NARROW = {
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8),
    tl.bfloat16: (torch.bfloat16, np.uint16),
}


def _convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
    """To and from FP8 and BF16 as the GPU does: Triton's interpreter truncates, among others."""
    contiguous = np.ascontiguousarray(data)
    if source in _NARROW and target in (tl.float16, tl.float32):
        values = torch.from_numpy(contiguous.view(np.uint8)).view(_NARROW[source][0])
        wide = values.to(torch.float16 if target == tl.float16 else torch.float32).numpy()
        return wide.reshape(data.shape)
    if source == tl.float32 and target in _NARROW:
        kind, bits = _NARROW[target]
        rounded = torch.from_numpy(contiguous).to(kind)
        return rounded.view(torch.uint8).numpy().view(bits).reshape(data.shape)
    return _CONVERT(data, source, target, rounding)


class _Results(list[TensorHandle]):
    """What the language expects of an operation with several results."""

    def get_result(self, index: int) -> TensorHandle:
        return self[index]


def _inline_assembly(
    builder: InterpreterBuilder,
    assembly: str,
    constraints: str,
    values: list[TensorHandle],
    types: list[tl.block_type],
    pure: bool,
    pack: int,
) -> _Results:
    """Pack ``pack`` elements of each value into 32-bit registers, run, and unpack the results.

    Results are 32-bit registers, or all 16-bit ones.
    """
    inputs = [register for value in values for register in _registers(value.data, pack)]
    kinds = [name.strip() for name in constraints.split(",")]
    kind = kinds[0]
    count = kinds.count(kind)
    if kind not in _RESULTS or kinds != [kind] * count + ["r"] * len(inputs):
        raise NotImplementedError(f"constraints {constraints!r} for {len(inputs)} input registers")
    outputs = ptx.run(assembly, inputs, count)
    results = _Results()
    for of_type in types:
        width = of_type.element_ty.primitive_bitwidth // 8
        register = _RESULTS[kind]
        registers = [outputs.pop(0) for _ in range(pack * width // register.itemsize)]
        data = np.stack(np.broadcast_arrays(*registers, inputs[0])[:-1], axis=-1).astype(register)
        elements = data.view(_get_np_dtype(of_type)).reshape(values[0].data.shape)
        results.append(TensorHandle(elements, of_type.element_ty))
    return results


def _registers(data: np.ndarray, pack: int) -> list[np.ndarray]:
    """32-bit registers that hold ``pack`` neighbours each time, the first in the low bits."""
    groups = np.ascontiguousarray(data).reshape(-1, pack).view(np.uint32)
    return list(groups.T)
