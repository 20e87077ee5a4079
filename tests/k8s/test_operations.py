"""What keeps the service up: pinned versions, drain times, replica bounds, access and budgets."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps_ray.fleet.publication import DEFAULT_ADMIN_PORT, parse_controller_options

Manifest = dict[str, Any]


@pytest.fixture
def cluster(rayservice: Manifest) -> Manifest:
    found = rayservice["spec"]["rayClusterConfig"]
    assert isinstance(found, dict)
    return found


@pytest.fixture
def pods(cluster: Manifest) -> dict[str, Manifest]:
    """Pod templates by the operator's ``ray.io/node-type``, with the labels that it adds."""
    (group,) = cluster["workerGroupSpecs"]
    templates = {"head": cluster["headGroupSpec"]["template"], "worker": group["template"]}
    for node_type, template in templates.items():
        template["metadata"]["labels"]["ray.io/node-type"] = node_type
    return templates


def group_errors(group: Manifest) -> list[str]:
    """What the operator refuses and the schema cannot express."""
    low, now, high = group["minReplicas"], group["replicas"], group["maxReplicas"]
    found = []
    if low > high:
        found.append(f"minReplicas {low} is above maxReplicas {high}")
    if not low <= now <= high:
        found.append(f"replicas {now} is outside {low} to {high}")
    return found


def selected(pods: dict[str, Manifest], selector: Manifest) -> set[str]:
    wanted = selector["matchLabels"].items()
    return {name for name, pod in pods.items() if wanted <= pod["metadata"]["labels"].items()}


def test_replica_bounds_are_in_order(cluster: Manifest) -> None:
    assert group_errors(cluster["workerGroupSpecs"][0]) == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("minReplicas", 9, "minReplicas 9 is above maxReplicas"),
        ("replicas", 0, "replicas 0 is outside"),
    ],
)
def test_replica_bounds_out_of_order_are_found(
    cluster: Manifest, field: str, value: int, message: str
) -> None:
    group = cluster["workerGroupSpecs"][0]
    group[field] = value
    assert any(message in error for error in group_errors(group))


def test_head_runs_no_replica_and_receives_no_request(
    rayservice: Manifest, cluster: Manifest, pods: dict[str, Manifest]
) -> None:
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    assert "nvidia.com/gpu" not in pods["head"]["spec"]["containers"][0]["resources"]["limits"]
    assert rayservice["spec"]["excludeHeadPodFromServeSvc"] is True


def test_both_pods_run_one_image_pinned_to_the_versions_of_pyproject(
    root: Path, cluster: Manifest, pods: dict[str, Manifest]
) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    requirements = project["optional-dependencies"]["gpu"]
    pins = dict(line.split("==") for line in requirements if "==" in line)
    ray, vllm = pins["ray[llm]"], pins["vllm"]
    images = {pod["spec"]["containers"][0]["image"] for pod in pods.values()}
    assert len(images) == 1
    assert images.pop().endswith(f":{project['version']}-ray{ray}-vllm{vllm}")
    assert cluster["rayVersion"] == ray


def test_probes_are_left_to_the_operator(pods: dict[str, Manifest]) -> None:
    for pod in pods.values():
        for container in pod["spec"]["containers"]:
            assert {"livenessProbe", "readinessProbe", "startupProbe"}.isdisjoint(container)


def test_pods_meet_the_restricted_security_standard(
    cluster: Manifest, pods: dict[str, Manifest]
) -> None:
    contexts = [cluster["autoscalerOptions"]["securityContext"]]
    for pod in pods.values():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] > 0
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(pod["spec"])
        contexts += [container["securityContext"] for container in pod["spec"]["containers"]]
    for context in contexts:
        assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_readme_makes_the_namespace_before_it_is_used(root: Path) -> None:
    namespace = yaml.safe_load((root / "k8s/namespace.yaml").read_text())
    text = (root / "k8s/README.md").read_text()
    made = text.index("kubectl apply -f k8s/namespace.yaml")
    assert namespace["kind"] == "Namespace"
    uses = list(re.finditer(r"kubectl .*-n (\S+)", text))
    assert len(uses) >= 4
    assert {use.group(1) for use in uses} == {namespace["metadata"]["name"]}
    assert all(made < use.start() for use in uses)


def test_cluster_asks_for_a_token(cluster: Manifest) -> None:
    assert cluster["authOptions"] == {"mode": "token"}


def test_each_budget_guards_one_kind_of_pod_with_an_integer(
    manifests: list[Manifest], pods: dict[str, Manifest], cluster: Manifest
) -> None:
    budgets = {
        m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "PodDisruptionBudget"
    }
    assert selected(pods, budgets["dps-workers"]["selector"]) == {"worker"}
    assert selected(pods, budgets["dps-head"]["selector"]) == {"head"}
    for budget in budgets.values():
        assert isinstance(budget["minAvailable"], int)
        assert "maxUnavailable" not in budget
    smallest = cluster["workerGroupSpecs"][0]["minReplicas"]
    assert budgets["dps-workers"]["minAvailable"] < smallest, "no node could ever be drained"


def test_network_policy_covers_both_pods_and_opens_only_ports_they_have(
    manifests: list[Manifest], pods: dict[str, Manifest]
) -> None:
    (policy,) = [m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"]
    assert selected(pods, policy["podSelector"]) == {"head", "worker"}
    assert policy["policyTypes"] == ["Ingress"]
    own, *others = policy["ingress"]
    assert "ports" not in own
    (peer,) = own["from"]
    assert "namespaceSelector" not in peer
    assert selected(pods, peer["podSelector"]) == {"head", "worker"}
    listening = {
        port["containerPort"]
        for pod in pods.values()
        for port in pod["spec"]["containers"][0]["ports"]
    }
    opened = [port["port"] for rule in others for port in rule["ports"]]
    assert opened == [8000, 8265, DEFAULT_ADMIN_PORT, 8080]
    assert set(opened) <= listening


def test_orders_are_open_to_labelled_pods_of_the_namespace_only(
    manifests: list[Manifest], pods: dict[str, Manifest], serve_config: Manifest
) -> None:
    (policy,) = [m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"]
    (rule,) = [
        rule
        for rule in policy["ingress"]
        if {"protocol": "TCP", "port": DEFAULT_ADMIN_PORT} in rule.get("ports", ())
    ]
    (peer,) = rule["from"]
    assert "namespaceSelector" not in peer
    assert not selected(pods, peer["podSelector"])
    (controller,) = serve_config["applications"][0]["deployments"]
    admin = parse_controller_options(controller["user_config"]).admin
    assert (admin.host, admin.port) == ("127.0.0.1", DEFAULT_ADMIN_PORT)
    for pod in pods.values():
        variables = {each["name"] for each in pod["spec"]["containers"][0]["env"]}
        assert admin.token_env in variables
