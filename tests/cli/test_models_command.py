"""``dps-ray models prepare`` makes a model where it is asked to and says where."""

import json
from pathlib import Path

import pytest

from dps_ray.cli.main import main


def test_tiny_model_is_made_and_its_folder_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["models", "prepare", "tiny:qwen3", "--root", str(tmp_path), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert status == 0
    assert printed["ok"] is True
    assert Path(printed["folder"]).parent == tmp_path
    assert (Path(printed["folder"]) / "config.json").is_file()


def test_default_root_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DPS_RAY_CACHE", str(tmp_path))
    assert main(["models", "prepare", "tiny:qwen3", "--json"]) == 0
    assert Path(json.loads(capsys.readouterr().out)["folder"]).parent == tmp_path / "models"


def test_unknown_model_is_one_line_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "prepare", "gpt2"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "choose one of smollm2, tiny:qwen3" in error
