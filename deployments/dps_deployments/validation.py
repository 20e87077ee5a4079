"""Everything that can be known to be wrong with a Serve config file before it is deployed.

Nothing is checked by rules of its own where a builder, a model of Ray or an options class can
refuse it; added are unknown names, which Ray ignores, and relations between the applications,
which no builder sees together.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from dps_deployments.app import build_controller, build_fleet, to_llm_config
from dps_deployments.config_file import (
    ConfigFile,
    Problem,
    UnreadableFileError,
    read_config_file,
)
from dps_deployments.controller_client import CONTROLLER_DEPLOYMENT
from dps_deployments.fleet_args import FleetArgs, override_faults, parse_fleet_args
from dps_deployments.import_paths import import_faults
from dps_deployments.late_refusals import port_faults, route_faults, runtime_env_faults
from dps_deployments.options import deployment_faults, unknown_names
from dps_deployments.relations import Controllers, Known, fleet_relations
from dps_ray.config import DpsConfigError
from dps_ray.faults import faults_of
from dps_ray.fleet.publication import ControllerOptions, parse_controller_options

FLEET_BUILDER = "dps_deployments.app.build_fleet"
CONTROLLER_BUILDER = "dps_deployments.app.build_controller"


def validate_file(path: Path, *, with_model: bool = False) -> list[Problem]:
    """Find everything wrong with a config file for ``serve run`` or ``serve deploy``.

    Parameters
    ----------
    path
        The file.
    with_model
        Build the application as Serve would, which looks into the model's folder; a relative one
        counts from the working folder.

    Returns
    -------
    list of Problem
        In order of lines; empty when the file can be deployed. One that cannot be read, or is no
        YAML, has one problem.
    """
    try:
        file = read_config_file(path)
    except UnreadableFileError as error:
        return [error.problem]
    if not isinstance(file.document, Mapping):
        return [Problem(1, "the file is no mapping: it needs 'applications'")]
    problems = list(file.duplicates)
    for fault in _faults(file.document, with_model):
        problems.append(_located(file, fault))
    return sorted(set(problems), key=lambda problem: (problem.line, problem.text))


def _located(file: ConfigFile, fault: str) -> Problem:
    text = fault.removeprefix("file.")
    return Problem(file.line_of(_field(text)), text)


def _faults(document: Mapping[str, Any], with_model: bool) -> Iterator[str]:
    """Sentences that begin with ``file.`` and the dotted path of a field."""
    yield from unknown_names(ServeDeploySchema, _without_deployments(document), "file")
    try:
        ServeDeploySchema.model_validate(_without_deployments(document))
    except ValidationError as error:
        yield from faults_of(error, "file")
    for section in ("http_options", "grpc_options"):
        yield from port_faults(document.get(section), f"file.{section}")
    applications = document.get("applications")
    if applications == []:
        yield "file.applications is []: name at least one, or Serve would stop all that run"
    fleets: dict[str, tuple[FleetArgs, Any]] = {}
    controllers: Controllers = {}
    for index, app in enumerate(applications if isinstance(applications, list) else ()):
        if not isinstance(app, Mapping):
            continue
        where = f"file.applications.{index}"
        found: list[str] = []
        args = app.get("args", {})
        # Serve takes a colon or a dot before the builder's name.
        builder = str(app.get("import_path")).replace(":", ".")
        yield from import_faults(app, where)
        yield from route_faults(app, where)
        yield from runtime_env_faults(app.get("runtime_env"), f"{where}.runtime_env")
        if builder == FLEET_BUILDER:
            parsed, found = _fleet(args, with_model)
            if parsed is not None:
                fleets[where] = parsed, app.get("deployments")
        elif builder == CONTROLLER_BUILDER:
            controllers[str(app.get("name"))], found = _controller(app)
        yield from (f"{where}.{fault}" for fault in found)
        overrides = app.get("deployments")
        for number, override in enumerate(overrides if isinstance(overrides, list) else ()):
            if isinstance(override, Mapping):
                yield from deployment_faults(override, f"{where}.deployments.{number}")
                if builder == FLEET_BUILDER:
                    yield from override_faults(args, override, f"{where}.deployments.{number}")
    http_options = document.get("http_options")
    for where, (fleet, overrides) in fleets.items():
        yield from fleet_relations(where, fleet, controllers, http_options, overrides)


def _without_deployments(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document less what ``deployment_faults`` looks at."""
    applications = document.get("applications")
    if not isinstance(applications, list):
        return dict(document)
    return {
        **document,
        "applications": [
            {name: value for name, value in app.items() if name != "deployments"}
            if isinstance(app, Mapping)
            else app
            for app in applications
        ],
    }


def _fleet(args: Any, with_model: bool) -> tuple[FleetArgs | None, list[str]]:
    """The arguments of a fleet, as far as they can be read, and what is wrong with them."""
    if not isinstance(args, dict):
        return None, [f"args is {args!r}: give a mapping"]
    faults: list[str] = []
    try:
        fleet = parse_fleet_args(args)
    except DpsConfigError as error:
        faults += error.faults
        given = args.get("llm_config")
        if not isinstance(given, dict) or not isinstance(given.get("engine_kwargs", {}), dict):
            return None, faults
        # Without the parts already found wrong, so that the rest can be looked at.
        wrong = {_field(fault).split(".")[1] for fault in faults}
        deployment = _without(given.get("deployment_config"), faults)
        safe = {**given, "deployment_config": deployment}
        others = {name: args[name] for name in args if name not in wrong}
        try:
            fleet = FleetArgs.model_validate({**others, "llm_config": safe})
        except ValidationError:
            return None, faults
    faults += _llm_faults(fleet)
    if with_model and not faults:
        try:
            build_fleet(args)
        except DpsConfigError as error:
            faults += error.faults
    return fleet, faults


def _without(deployment_config: Any, faults: Iterable[str]) -> dict[str, Any]:
    """A model's Serve options less those that are wrong, with what none can do without."""
    given = deployment_config if isinstance(deployment_config, dict) else {}
    paths = [_field(fault).split(".") for fault in faults]
    inner = ["llm_config", "deployment_config"]
    wrong = {name for path in paths if path[1:3] == inner for name in path[3:4]}
    return {**_SAFE_DEPLOYMENT, **{k: v for k, v in given.items() if str(k) not in wrong}}


_SAFE_DEPLOYMENT = {"max_ongoing_requests": 1}


def _field(fault: str) -> str:
    """The dotted path a fault begins with."""
    return fault.split(" ", 1)[0].rstrip(":")


def _llm_faults(fleet: FleetArgs) -> list[str]:
    """Build the real ``LLMConfig``, and again without the names it does not know: they hide the
    faults of later stages."""
    from ray.serve.llm import LLMConfig

    given = fleet.llm_config
    known = {name: value for name, value in given.items() if name in LLMConfig.model_fields}
    faults: list[str] = []
    for llm_config in [given] if known == given else [given, known]:
        try:
            to_llm_config(fleet.model_copy(update={"llm_config": llm_config}))
        except DpsConfigError as error:
            faults += [fault for fault in error.faults if fault not in faults]
    return faults


def _controller(app: Mapping[str, Any]) -> tuple[Known, list[str]]:
    """The controller's options, as far as they can be read, and what is wrong with them."""
    faults: list[str] = []
    try:
        build_controller(app.get("args", {}))
    except DpsConfigError as error:
        faults += error.faults
    known = Known(ControllerOptions())
    overrides = app.get("deployments")
    for number, override in enumerate(overrides if isinstance(overrides, list) else ()):
        where = f"deployments.{number}"
        if not isinstance(override, Mapping):
            continue
        if override.get("name") != CONTROLLER_DEPLOYMENT:
            faults.append(
                f"{where}.name is {override.get('name')!r}: the only deployment of this "
                f"application is {CONTROLLER_DEPLOYMENT}"
            )
            continue
        for name in ("num_replicas", "autoscaling_config"):
            if override.get(name) not in (None, 1):
                faults.append(
                    f"{where}.{name} is {override[name]!r}: a fleet has one controller; leave it "
                    "out"
                )
        known, found = _controller_options(override.get("user_config"))
        faults += [f"{where}.{fault}" for fault in found]
    return known, faults


def _controller_options(user_config: Any) -> tuple[Known, list[str]]:
    try:
        return Known(parse_controller_options(user_config)), []
    except DpsConfigError as error:
        faults = list(error.faults)
    if not isinstance(user_config, dict):
        return Known(None), faults
    # Without the sections already found wrong, so that relations of the others can be looked at.
    wrong = {_field(fault).partition(".")[2].partition(".")[0] for fault in faults}
    others = {name: user_config[name] for name in user_config if str(name) not in wrong}
    try:
        return Known(parse_controller_options(others), frozenset(wrong)), faults
    except DpsConfigError as error:
        return Known(None), faults + [fault for fault in error.faults if fault not in faults]
