"""The rendered ``RayService`` against the operator's own schema, unknown fields refused."""

import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

Schema = dict[str, Any]


def crd_path(root: Path) -> Path:
    folder = os.environ.get("DPS_KUBERAY_CRDS") or root.parent / "shared/data/kuberay/crds"
    return Path(folder) / "ray.io_rayservices.yaml"


def strict(node: Any) -> Any:
    """Turn a structural OpenAPI schema into a JSON schema that refuses unknown fields.

    An API server prunes fields that a schema does not name; here they are errors, as they are
    under ``kubectl --validate=strict``.
    """
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    schema = {key: strict(value) for key, value in node.items()}
    if schema.get("x-kubernetes-int-or-string") is True:
        schema.pop("anyOf", None)
        schema["type"] = ["integer", "string"]
    if schema.get("nullable") is True:
        schema["type"] = [schema["type"], "null"]
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") is True
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        schema.setdefault("additionalProperties", open_ended)
    return schema


@pytest.fixture(scope="module")
def validator(root: Path) -> jsonschema.Draft7Validator:
    path = crd_path(root)
    if not path.is_file():
        pytest.skip(f"no CRD at {path}: set DPS_KUBERAY_CRDS to the folder that holds it")
    crd = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = [entry for entry in crd["spec"]["versions"] if entry["name"] == "v1"]
    schema: Schema = strict(version["schema"]["openAPIV3Schema"])
    # The API server checks metadata itself: a CRD says only that it is an object.
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(schema)


def errors(validator: jsonschema.Draft7Validator, manifest: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


def maps(node: Any) -> Iterator[dict[str, Any]]:
    """Every map below ``spec`` whose keys the schema names one by one."""
    if isinstance(node, list):
        for item in node:
            yield from maps(item)
    elif isinstance(node, dict):
        yield node
        for key, value in node.items():
            if key not in FREE_MAPS:
                yield from maps(value)


FREE_MAPS = {"rayStartParams", "labels", "annotations", "requests", "limits"}
"""Fields whose keys the user chooses."""


def test_rendered_rayservice_has_no_error(
    validator: jsonschema.Draft7Validator, rayservice: dict[str, Any]
) -> None:
    assert errors(validator, rayservice) == []


def test_unknown_field_is_reported_in_every_map_of_the_spec(
    validator: jsonschema.Draft7Validator, rayservice: dict[str, Any]
) -> None:
    places = list(maps(rayservice["spec"]))
    assert len(places) > 30
    for place in places:
        place["replicaz"] = 2
        found = errors(validator, rayservice)
        assert len(found) == 1, f"{place} accepts an unknown field"
        assert "replicaz" in found[0]
        del place["replicaz"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "rayClusterDeletionDelaySeconds"], "an hour"),
        (["spec", "rayClusterDeletionDelaySeconds"], -1),
        (["spec", "rayClusterConfig", "authOptions", "mode"], "password"),
        (["spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"], 0),
        (["spec", "rayClusterConfig", "workerGroupSpecs", 0, "replicas"], "2"),
        (["spec", "serveConfigV2"], {"applications": []}),
    ],
)
def test_wrong_value_is_reported_at_its_path(
    validator: jsonschema.Draft7Validator,
    rayservice: dict[str, Any],
    path: list[str | int],
    value: Any,
) -> None:
    broken: Any = deepcopy(rayservice)
    *parents, last = path
    place = broken
    for part in parents:
        place = place[part]
    place[last] = value
    (found,) = errors(validator, broken)
    assert str(last) in found


def test_missing_required_field_is_reported(
    validator: jsonschema.Draft7Validator, rayservice: dict[str, Any]
) -> None:
    del rayservice["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplicas"]
    (found,) = errors(validator, rayservice)
    assert "maxReplicas" in found
