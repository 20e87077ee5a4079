#!/usr/bin/env bash
# Builds the CPU environment from the lock: torch first (it is the one package whose CPU build has
# its own version), then everything else by hash, then this project with its compiled kernels.
set -euo pipefail
venv=${1:?usage: install.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
torch_version=2.13.0

"${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "install: ${PYTHON:-python3} is too old: Python 3.11 or newer is needed (set PYTHON=...)" >&2; exit 1; }
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
# Byte code is compiled afterwards, on all cores: pip would use one.
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile)

"${pip[@]}" --upgrade "pip>=26" "setuptools==77.0.3" wheel
if ! "${pip[@]}" --no-deps "torch==${torch_version}+cpu" 2>/dev/null; then
    echo "install: torch ${torch_version}+cpu is not to be had here; installing the plain torch ${torch_version}" >&2
    "${pip[@]}" "torch==${torch_version}"
fi
if [ "$("$venv/bin/python" -c 'import platform, sys; print(*sys.version_info[:2], platform.machine())')" = "3 11 x86_64" ]; then
    "${pip[@]}" --no-deps --require-hashes -r "$here/cpu.lock"
else
    echo "install: the lock's hashes are of wheels for CPython 3.11 on x86_64; installing the same versions without them" >&2
    sed -e 's/ *\\$//' -e '/--hash=/d' "$here/cpu.lock" >"$venv/unhashed.lock"
    "${pip[@]}" --no-deps -r "$venv/unhashed.lock"
fi
# Some packages carry files for other Python versions, which do not compile: no reason to stop.
"$venv/bin/python" -m compileall -q -j 0 -x '/(tests?|testing)/' "$venv/lib" >/dev/null || true
"${pip[@]}" --no-deps --no-build-isolation --editable "$here/.."
# Says, as a warning, if the kernels could not be compiled, and why.
"$venv/bin/python" -c 'import dps_kernels; dps_kernels.available()'
