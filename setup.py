"""Packages of every top-level code folder, and the compiled CPU kernels."""

import importlib.util
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOTS = ("kernels", "deployments", "autoscaling")
CSRC = Path("kernels/csrc")
# The only files that see torch's headers.
BINDINGS = ("binding.cpp", "binding_packed.cpp", "binding_route.cpp", "layer.cpp", "module.cpp")

FLAGS = ["-std=c++20", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-Wno-psabi"]
# Each instruction set has a file of its own, the only one compiled with its flags: the CPU is
# asked at run time which of them it can run.
_AVX512 = [
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mfma", "-mf16c"),
    # GCC 12's own intrinsics set off its warning about uninitialised values.
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
]
_AVX512_BF16 = [*_AVX512, "-mavx512dq", "-mavx512vbmi", "-mgfni", "-mavx512bf16"]
ISA_FLAGS = {
    "avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "avx512.cpp": _AVX512,
    "avx512_bf16.cpp": _AVX512_BF16,
    "amx.cpp": [*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"],
}
REASON = "not_compiled.txt"
"""Beside the package's modules, which quote it: pip shows nothing of a build that succeeds."""


class BuildKernels(build_ext):
    """Compile the kernels, or explain why not: the package works without them."""

    def run(self) -> None:
        # setuptools takes `inplace` back while it builds.
        self._serves_checkout = bool(self.inplace or self.editable_mode)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        if importlib.util.find_spec("torch") is None:
            self._leave_out(ext, "torch is not installed where the build ran; install it")
            return
        try:
            self._compile(ext)
        except Exception as error:
            self._leave_out(
                ext, f"compiling failed ({error}); install g++ 11 or newer and Python's headers"
            )
        else:
            for folder in self._packages(ext):
                (folder / REASON).unlink(missing_ok=True)

    def _compile(self, ext: Extension) -> None:
        from torch.utils.cpp_extension import include_paths

        compiler: Any = self.compiler

        def compile_one(source: str) -> list[str]:
            name = Path(source).name
            torch_flags = ["-fopenmp"] if name in BINDINGS else []
            objects: list[str] = compiler.compile(
                [source],
                output_dir=self.build_temp,
                include_dirs=include_paths() if name in BINDINGS else [],
                extra_postargs=FLAGS + torch_flags + ISA_FLAGS.get(name, []),
                depends=ext.depends,
            )
            return objects

        with ThreadPoolExecutor() as pool:
            objects = [path for paths in pool.map(compile_one, ext.sources) for path in paths]
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler.link_shared_object(
            objects,
            str(target),
            library_dirs=[str(self._torch_libraries())],
            libraries=["c10", "torch_cpu", "torch", "torch_python"],
            extra_postargs=[str(self._openmp())],
            target_lang="c++",
        )

    @staticmethod
    def _torch_libraries() -> Path:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("torch")
        return Path(spec.origin).parent / "lib"

    def _openmp(self) -> Path | str:
        """Torch's own OpenMP runtime: a second one would not know torch's threads."""
        bundled = self._torch_libraries()
        for folder in (bundled, bundled.parent.parent / "torch.libs"):
            for library in sorted(folder.glob("libgomp*.so*")):
                return library
        return "-lgomp"

    def _leave_out(self, ext: Extension, why: str) -> None:
        for folder in self._packages(ext):
            # A library of an earlier build would not match these sources.
            for stale in folder.glob("_C.*"):
                stale.unlink()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / REASON).write_text(why)
        print(f"dps_kernels: {why}: the compiled CPU kernels are left out", file=sys.stderr)

    def _packages(self, ext: Extension) -> list[Path]:
        """Where the package is built, and where an editable installation imports it from."""
        folders = [Path(self.get_ext_fullpath(ext.name)).parent]
        if self._serves_checkout:
            folders.append(Path("kernels/dps_kernels"))
        return folders


def kernels() -> list[Extension]:
    """The extension, on the platforms whose compilers take its flags."""
    if platform.system() != "Linux":
        return []
    names = [*BINDINGS, "portable.cpp", "dispatch.cpp", "stream.cpp", "checksum.cpp"]
    if platform.machine() == "x86_64":
        names += ISA_FLAGS
    headers = [str(path) for pattern in ("*.h", "*.inl") for path in sorted(CSRC.glob(pattern))]
    sources = [str(CSRC / name) for name in names]
    return [Extension("dps_kernels._C", sources, depends=headers, optional=True)]


setup(
    packages=find_packages(include=["dps_ray", "dps_ray.*"])
    + [package for root in ROOTS for package in find_packages(root)],
    ext_modules=kernels(),
    cmdclass={"build_ext": BuildKernels},
)
