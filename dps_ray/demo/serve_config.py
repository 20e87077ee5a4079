"""The demo's copy of a Serve configuration: a free port, and the model where it was prepared."""

import copy
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dps_deployments.config_file import read_config_file

from dps_ray.config import DpsConfigError

BUILDER = "dps_deployments.app:build_fleet"


@dataclass(frozen=True)
class FleetConfig:
    """A Serve configuration with one fleet in it."""

    content: dict[str, Any]

    @property
    def fleet(self) -> dict[str, Any]:
        """Arguments of the fleet's application."""
        for application in self.content["applications"]:
            if application.get("import_path") == BUILDER:
                return application["args"]["llm_config"]
        raise DpsConfigError(f"applications: none has import_path {BUILDER!r}: add the fleet's")

    @property
    def replicas(self) -> int:
        """Replicas at the start."""
        deployment = self.fleet["deployment_config"]
        scaling = deployment.get("autoscaling_config")
        return int(scaling["min_replicas"] if scaling else deployment["num_replicas"])

    @property
    def max_replicas(self) -> int:
        """Most replicas there will be."""
        scaling = self.fleet["deployment_config"].get("autoscaling_config")
        return int(scaling["max_replicas"]) if scaling else self.replicas

    @property
    def model_id(self) -> str:
        return str(self.fleet["model_loading_config"]["model_id"])

    @property
    def model_source(self) -> str:
        return str(self.fleet["model_loading_config"]["model_source"])

    @property
    def max_model_len(self) -> int:
        return int(self.fleet["engine_kwargs"]["max_model_len"])

    @property
    def dps_options(self) -> dict[str, Any]:
        """Options of elastic memory that the configuration gives the engines."""
        config = self.fleet["engine_kwargs"].get("additional_config") or {}
        return dict(config.get("dps") or {})

    def placed(self, *, port: int, model_source: str) -> "FleetConfig":
        """Copy with another HTTP port and model folder."""
        content = copy.deepcopy(self.content)
        content.setdefault("http_options", {})["port"] = port
        placed = FleetConfig(content)
        placed.fleet["model_loading_config"]["model_source"] = model_source
        return placed


def read_config(path: Path) -> FleetConfig:
    """Read a Serve configuration file.

    Raises
    ------
    DpsConfigError
        The file is missing, no YAML, or lacks something the demo needs to know.
    """
    config = FleetConfig(read_config_file(path).document)
    try:
        _ = config.replicas, config.model_id, config.model_source, config.max_model_len
    except (KeyError, TypeError, AttributeError) as error:
        raise DpsConfigError(
            f"config {path}: {error} is missing: the demo needs applications, model_loading_config "
            "(model_id, model_source), deployment_config.num_replicas, engine_kwargs.max_model_len"
        ) from None
    return config


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
