"""Compiling Triton kernels for a GPU that is not there, and measuring what came out.

`compile_launches` runs a launcher's own code on meta tensors: what is compiled is exactly what the
launcher would start on the device, with its tiles, its argument types and their alignment.
`needed_compilations` asks only what would be compiled.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.kernels.hopper import sass

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Compiled:
    """One kernel in machine code.

    Attributes
    ----------
    name
        Of the Triton function.
    constants
        Compile-time arguments by name.
    warps, shared_bytes
        What a launch takes: warps of the block, its dynamic shared memory.
    key
        The same for launches that share one compilation.
    """

    def __init__(self, kernel: Any) -> None:
        self.name: str = kernel.metadata.name
        names = kernel.src.fn.arg_names
        self.constants = {names[i]: v for (i, *_), v in kernel.src.constants.items()}
        self.warps: int = kernel.metadata.num_warps
        self.shared_bytes: int = kernel.metadata.shared
        self.key: str = kernel.hash
        self._cubin: bytes = kernel.asm["cubin"]

    @cached_property
    def listing(self) -> str:
        """Machine code as ``nvdisasm`` prints it."""
        return self._inspect("nvdisasm", "-c")

    @cached_property
    def code(self) -> list[sass.Instruction]:
        """All instructions."""
        return sass.parse(self.listing)[0]

    @cached_property
    def loop(self) -> sass.Loop:
        """The main loop: where the matrix instructions are."""
        return sass.main_loop(sass.parse(self.listing)[1])

    @cached_property
    def registers(self) -> int:
        """Registers per thread."""
        usage = self._inspect("cuobjdump", "--dump-resource-usage")
        (registers,) = re.findall(r"\bREG:(\d+)", usage)
        return int(registers)

    @property
    def spills(self) -> int:
        """Instructions that touch local memory: registers that did not fit, or dynamic indexing."""
        return sum(instruction.name in sass.LOCAL for instruction in self.code)

    def has(self, name: str) -> bool:
        """Whether the main loop holds instructions of this name."""
        return self.loop.count((name,)) > 0

    def integer_per_weight(self, tile: tuple[int, int, int], warps: int | None = None) -> float:
        """Integer operations per weight of the main loop.

        Parameters
        ----------
        tile
            ``(BM, BN, BK)``: what one step of the loop multiplies.
        warps
            Warps that run the loop, if not all of the block do.
        """
        warps = warps or self.warps
        steps = self.loop.steps(tile, warps)
        return self.loop.count(sass.INTEGER) * warps * 32 / (tile[1] * tile[2] * steps)

    def summary(self, tile: tuple[int, int, int]) -> str:
        """One line for a table of figures."""
        matrix = {name: n for name, n in self.loop.histogram().items() if name in sass.MATRIX}
        shape = "x".join(map(str, tile))
        return (
            f"{self.name} {shape}, {self.warps} warps: {self.registers} registers, "
            f"{self.spills} spills, {self.shared_bytes >> 10} KiB shared, "
            f"{self.integer_per_weight(tile):.2f} integer operations per weight, {matrix}"
        )

    def _inspect(self, tool: str, option: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self._cubin)
            file.flush()
            command = [str(_TOOLS / tool), option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compile_launches(launch: Callable[[], object], arch: int) -> list[Compiled]:
    """Compile, without starting them, the kernels that ``launch`` starts.

    Parameters
    ----------
    launch
        Calls a launcher with meta tensors. Its kernels were not decorated for the interpreter.
    arch
        80 for sm_80, 90 for sm_90a.
    """
    compiled = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(Compiled(run(kernel, *args, grid=grid, warmup=True, **options)))

    with (
        mock.patch.object(driver, "_active", _AbsentDevice(arch)),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        launch()
    return compiled


def needed_compilations(launch: Callable[[], object], arch: int) -> set[tuple[str, str]]:
    """Give name and key of every compilation that ``launch`` needs, without making any."""
    needed = set()
    run = JITFunction.run

    def note(kernel: Any, key: str, *_: object) -> None:
        needed.add((kernel.fn.__name__, key))

    def look_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        run(kernel, *args, grid=grid, warmup=True, **options)

    with (
        mock.patch.object(driver, "_active", _AbsentDevice(arch, "never compiled for")),
        mock.patch.object(JITFunction, "run", look_only),
        mock.patch.object(JITFunction, "_do_compile", note),
    ):
        launch()
    return needed


class _AbsentDevice:
    """What Triton asks its driver while it compiles. Devices of another name share no kernels."""

    def __init__(self, arch: int, name: str = "compiled for") -> None:
        self._arch = arch
        self._name = name

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> str:
        return f"{self._name} sm_{self._arch}"

    def get_current_stream(self, device: str) -> int:
        return 0
