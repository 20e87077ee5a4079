"""Embed each overlay's serve config into the patch that kustomize applies.

A ``RayService`` carries its serve config as one string, and kustomize reads no file outside its own
folder without a flag that ``kubectl apply -k`` lacks. So the text of
``deployments/configs/<overlay>.yaml``, the one source of truth, is embedded once, word for word, in
``k8s/overlays/<overlay>/serve-config.yaml``, and that patch is committed.

    python k8s/embed_serve_config.py           # rewrite the patches
    python k8s/embed_serve_config.py --check   # exit 1 if one is out of date
"""

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PATCH = "serve-config.yaml"
SERVE_PORT = 8000
"""The port that the operator's Service and readiness probe and the NetworkPolicy use."""


class ServeConfigError(ValueError):
    """A serve config that cannot work inside a RayService; one line naming field and remedy."""


def check_serve_config(config: Any, name: str) -> None:
    """Refuse what is valid for ``serve run`` and cannot work behind the operator's Service.

    Parameters
    ----------
    config : Any
        The parsed serve config.
    name : str
        What to call it in the message.

    Raises
    ------
    ServeConfigError
        No application, no proxy on the workers, or a proxy the Service cannot reach.
    """
    if not isinstance(config, dict) or not config.get("applications"):
        raise ServeConfigError(f"{name}: applications is missing or empty: list at least one")
    location = config.get("proxy_location", "EveryNode")
    if location != "EveryNode":
        raise ServeConfigError(
            f"{name}: proxy_location is {location!r}: use 'EveryNode', or no worker becomes ready"
        )
    http = config.get("http_options") or {}
    if http.get("host", "0.0.0.0") != "0.0.0.0":
        raise ServeConfigError(
            f"{name}: http_options.host is {http['host']!r}: use '0.0.0.0', or leave it out; "
            "the Service cannot reach another address"
        )
    if http.get("port", SERVE_PORT) != SERVE_PORT:
        raise ServeConfigError(
            f"{name}: http_options.port is {http['port']!r}: use {SERVE_PORT}, or leave it out; "
            "the Service and the readiness probe ask there"
        )


def serve_config_patch(text: str, name: str) -> str:
    """Wrap the text of a serve config into a merge patch of the RayService ``dps``.

    The text stays as it is, comments included: the operator's string equals the file.
    """
    check_serve_config(yaml.safe_load(text), name)
    body = textwrap.indent(text.rstrip("\n") + "\n", "    ")
    return (
        f"# Made by k8s/embed_serve_config.py from {name}: change that file and run it again.\n"
        "apiVersion: ray.io/v1\n"
        "kind: RayService\n"
        "metadata:\n"
        "  name: dps\n"
        "spec:\n"
        f"  serveConfigV2: |\n{body}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Embed the serve configs into the k8s overlays.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="root of the checkout")
    args = parser.parse_args(argv)
    stale = []
    try:
        for overlay in sorted(
            path for path in (args.root / "k8s/overlays").iterdir() if path.is_dir()
        ):
            source = args.root / "deployments/configs" / f"{overlay.name}.yaml"
            if not source.is_file():
                raise ServeConfigError(
                    f"overlay {overlay.name} has no serve config: create {source}"
                )
            patch = serve_config_patch(source.read_text(), source.relative_to(args.root).as_posix())
            target = overlay / PATCH
            if target.is_file() and target.read_text() == patch:
                continue
            stale.append(target)
            if not args.check:
                target.write_text(patch)
    except ServeConfigError as error:
        print(f"embed_serve_config: {error}", file=sys.stderr)
        return 2
    for target in stale:
        print(f"{'out of date' if args.check else 'wrote'}: {target.relative_to(args.root)}")
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
