"""The serve config file is the one source of truth of what the overlay serves."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

MINIMAL = "applications:\n- name: llm\n  import_path: package.module:app\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one overlay, ``tiny``, whose serve config is minimal."""
    (tmp_path / "k8s/overlays/tiny").mkdir(parents=True)
    (tmp_path / "deployments/configs").mkdir(parents=True)
    (tmp_path / "deployments/configs/tiny.yaml").write_text(MINIMAL)
    return tmp_path


def run(root: Path, checkout: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = root / "k8s/embed_serve_config.py"
    command = [sys.executable, str(script), "--root", str(checkout), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_committed_patch_is_what_the_generator_makes(root: Path) -> None:
    done = run(root, root, "--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_rendered_string_is_the_file_word_for_word(
    rayservice: dict[str, Any], serve_config_text: str
) -> None:
    assert rayservice["spec"]["serveConfigV2"] == serve_config_text


def test_comments_and_blank_lines_survive_embedding(embedder: ModuleType) -> None:
    text = f"# why\n\n{MINIMAL}\n# a tail: with a colon\n"
    patch = yaml.safe_load(embedder.serve_config_patch(text, "some.yaml"))
    assert patch["spec"]["serveConfigV2"] == text


def test_missing_patch_is_reported_written_and_then_in_date(root: Path, checkout: Path) -> None:
    target = "k8s/overlays/tiny/serve-config.yaml"
    stale = run(root, checkout, "--check")
    assert (stale.returncode, stale.stdout) == (1, f"out of date: {target}\n")
    assert not (checkout / target).exists()
    assert run(root, checkout).stdout == f"wrote: {target}\n"
    assert run(root, checkout, "--check").returncode == 0


def test_changed_serve_config_makes_the_patch_out_of_date(root: Path, checkout: Path) -> None:
    run(root, checkout)
    (checkout / "deployments/configs/tiny.yaml").write_text(MINIMAL + "# more\n")
    assert run(root, checkout, "--check").returncode == 1


def test_overlay_without_a_serve_config_is_one_line_naming_the_file(
    root: Path, checkout: Path
) -> None:
    (checkout / "deployments/configs/tiny.yaml").unlink()
    done = run(root, checkout)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "deployments/configs/tiny.yaml" in done.stderr


@pytest.mark.parametrize(
    ("prefix", "field"),
    [
        ("proxy_location: HeadOnly\n", "proxy_location is 'HeadOnly'"),
        ("proxy_location: Disabled\n", "proxy_location is 'Disabled'"),
        ("http_options: {host: 127.0.0.1}\n", "http_options.host is '127.0.0.1'"),
        ("http_options: {port: 9000}\n", "http_options.port is 9000"),
    ],
)
def test_serve_config_that_cannot_work_behind_the_service_is_refused(
    root: Path, checkout: Path, prefix: str, field: str
) -> None:
    (checkout / "deployments/configs/tiny.yaml").write_text(prefix + MINIMAL)
    done = run(root, checkout)
    assert done.returncode == 2
    assert field in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["applications: []\n", "- a list\n", ""])
def test_serve_config_without_an_application_is_refused(embedder: ModuleType, text: str) -> None:
    with pytest.raises(embedder.ServeConfigError, match="applications"):
        embedder.serve_config_patch(text, "some.yaml")
