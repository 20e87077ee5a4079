"""Which code runs: the release, and a digest of the sources that are really there."""

import functools
from collections.abc import Iterable
from hashlib import blake2b
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("dps_ray", "dps_kernels", "dps_deployments", "dps_autoscaling")


@functools.cache
def revision() -> str:
    """The same wherever the same sources are installed; another one after any edit.

    Every replica reports it, so that the status tells old code from new where the release is the
    same. It is also among the router's arguments: ingress replicas keep a router class until these
    differ. Serve makes them anew only when ``args`` or ``runtime_env`` of the application change.
    """
    specs = [find_spec(package) for package in PACKAGES]
    folders = [spec.submodule_search_locations for spec in specs if spec is not None]
    roots = [Path(found[0]) for found in folders if found]
    return f"{version('dps-ray')}+{digest_of(roots)}"


def digest_of(roots: Iterable[Path]) -> str:
    """Eight characters that depend on names and contents of all Python files in these folders."""
    digest = blake2b(digest_size=4)
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{root.name}/{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
