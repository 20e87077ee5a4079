"""``dps-ray validate``: every class of error at once, each with its line."""

import json
from pathlib import Path

import pytest

from dps_ray.cli.main import main

CONFIGS = sorted((Path(__file__).parents[2] / "deployments/configs").rglob("*.yaml"))

GOOD = """\
http_options:
  port: 8000
  request_timeout_s: 900
applications:
- name: dps-controller
  route_prefix: /dps
  import_path: dps_deployments.app:build_controller
  deployments:
  - name: FleetController
    user_config:
      routing: {name: mode_aware}
      ageing:
        stale_after_s: 3.5
        publish_period_s: 0.25
      leases: {ttl_s: 60, alone_after_s: 90}
- name: llm
  route_prefix: /
  import_path: dps_deployments.app:build_fleet
  args:
    controller_app: dps-controller
    request_timeout_s: 900
    report:
      heartbeat_s: 1.0
      lease_poll_s: 0.25
    ingress:
      num_replicas: 1
      max_ongoing_requests: 2048
    llm_config:
      model_loading_config: {model_id: m, model_source: ./no-such-model}
      accelerator_config: {kind: cpu}
      engine_kwargs:
        max_model_len: 512
        quantization: dps
        additional_config:
          dps: {low_watermark: 0.5}
      deployment_config:
        max_ongoing_requests: 64
        graceful_shutdown_timeout_s: 910
        health_check_period_s: 2
        autoscaling_config:
          min_replicas: 0
          max_replicas: 4
          target_ongoing_requests: 32
          look_back_period_s: 30
          upscale_delay_s: 30
          downscale_delay_s: 5
          policy:
            policy_function: dps_autoscaling.policy:ElasticScalingPolicy
            policy_kwargs:
              calm_s: 300
"""
FAULTS = [
    # Unknown names, which Ray would ignore.
    ("  port: 8000", "  prt: 8000", "http_options.prt is not an option"),
    ("  route_prefix: /dps", "  route_prefx: /dps", "applications.0.route_prefx is not an option"),
    ("  - name: FleetController", "  - name: FleetControler", "FleetControler"),
    (
        "      max_ongoing_requests: 2048",
        "      max_ongoing_reqs: 1024",
        "ingress.max_ongoing_reqs is",
    ),
    ("      accelerator_config:", "      acelerator_config:", "acelerator_config is not"),
    ("        max_model_len:", "        max_model_lenth:", "max_model_lenth is not an option"),
    ("          min_replicas: 0", "          min_replica: 0", "config.min_replica is not"),
    ("              calm_s: 300", "              calm: 300", "kwargs.calm is not"),
    # Impossible values and ranges.
    ("      routing: {name: mode_aware}", "      routing: {name: mode_awar}", "mean 'mode_aware'?"),
    ("          dps: {low_watermark: 0.5}", "          dps: {low_watermark: 5}", "watermark is 5"),
    ("          max_replicas: 4", "          max_replicas: -4", "max_replicas is -4"),
    ("    controller_app: dps-controller", "    controller_app: dps", "controller_app is 'dps'"),
    (
        "            policy_function: dps_autoscaling.policy:ElasticScalingPolicy",
        "            policy_function: dps_autoscaling.policy:ElasticPolicy",
        "ElasticPolicy', which cannot be imported",
    ),
    ("      max_ongoing_requests: 2048", "      max_ongoing_requests: 1280", "above 1280, the"),
    ("    request_timeout_s: 900", "    request_timeout_s: 120", "no_replica_wait_s (120)"),
    ("    request_timeout_s: 900", "    request_timeout_s: 100", "admission.queue_wait_s (120)"),
    (
        "      leases: {ttl_s: 60, alone_after_s: 90}",
        "      admission: {min_retry_after_s: 90}",
        "min_retry_after_s (90) must not be above",
    ),
    ("      num_replicas: 1", "      autoscaling_config: {max_replicas: 2}", "give num_replicas"),
    ("      num_replicas: 1", "      num_replicas: auto", "ingress.num_replicas is 'auto'"),
    ("        quantization: dps", "        scheduling_policy: lifo", "policy is 'lifo'"),
    ("        max_model_len: 512", "        max_model_len: -1", "max_model_len is -1: nothing"),
    ("        max_model_len: 512", "        max_num_seqs: 8", "max_model_len is None: nothing"),
    (
        "      max_ongoing_requests: 2048",
        "      max_queued_requests: 2048",
        "args.ingress.max_ongoing_requests is not set",
    ),
    ("    request_timeout_s: 900", "    limits: {max_body_bytes: 0}", "max_body_bytes is 0"),
    (
        "      leases: {ttl_s: 60, alone_after_s: 90}",
        "      admin: {token: x}",
        "admin.token is not an option",
    ),
    # Values of another kind, empty keys and keys that are numbers.
    ("          dps: {low_watermark: 0.5}", "          dps: {1: 2}", "dps.1 is"),
    ("      deployment_config:", "      deployment_config: 3\n      other:", "is 3: give"),
    ("      routing: {name: mode_aware}", "      1: 2", "user_config.1 is"),
    ("  port: 8000", "  8000: 1", "http_options.8000 is not an option"),
    ("        max_ongoing_requests: 64", "        1: 2\n        other: 3", "config.1 is not"),
    # Relations of intervals, also between two applications.
    (
        "        publish_period_s: 0.25",
        "        publish_period_s: 30",
        "publish_period_s (30) must be below stale_after_s (3.5)",
    ),
    (
        "      heartbeat_s: 1.0",
        "      heartbeat_s: 3.2",
        "heartbeat_s is 3.2: with poll_period_s (0.05)",
    ),
    (
        "      leases: {ttl_s: 60, alone_after_s: 90}",
        "      leases: {ttl_s: 60, alone_after_s: 0.2}",
        "alone_after_s (0.2) must be above ttl_s (60)",
    ),
    (
        "      leases: {ttl_s: 60, alone_after_s: 90}",
        "      leases: {ttl_s: 3}",
        "leases.ttl_s (3.0) must be above ageing.stale_after_s (3.5)",
    ),
    (
        "      lease_poll_s: 0.25",
        "      lease_poll_s: 500",
        "lease_poll_s (500) must not be above heartbeat_s (1)",
    ),
    (
        "        health_check_period_s: 2",
        "        health_check_period_s: 300",
        "health_check_period_s is 300: at most 10",
    ),
    (
        "        graceful_shutdown_timeout_s: 910",
        "        graceful_shutdown_timeout_s: 1",
        "deployment_config.graceful_shutdown_timeout_s is 1: it must be above",
    ),
    (
        "      num_replicas: 1",
        "      graceful_shutdown_timeout_s: 20",
        "ingress.graceful_shutdown_timeout_s is 20: it must be above",
    ),
    (
        "  route_prefix: /",
        "  route_prefix: /\n  deployments: [{name: LLMServer, graceful_shutdown_timeout_s: 5}]",
        "deployments.0.graceful_shutdown_timeout_s is 5: it must be above",
    ),
    ("      heartbeat_s: 1.0", "      heartbeat_s: 4.0", "below the controller's ageing.stale"),
    ("          look_back_period_s: 30", "          look_back_period_s: 8", "a mean needs"),
    (
        "          look_back_period_s: 30",
        "          look_back_period_s: 30\n          metrics_interval_s: 31",
        "look_back_period_s is 30: it must be above metrics_interval_s (31)",
    ),
    ("          upscale_delay_s: 30", "          upscale_delay_s: 20", "grows twice"),
    ("          downscale_delay_s: 5", "          downscale_delay_s: 600", "delay_s is 600"),
    ("    request_timeout_s: 900", "    request_timeout_s: 1200", "give both the same value"),
    ("    request_timeout_s: 900", "    report: {}", "args.request_timeout_s is 600 and"),
    ("              calm_s: 300", "              calm_s: 25", "calm_s is 25: it must be"),
    ("              calm_s: 300", "              calm_s: 45", "leases.ttl_s (60)"),
    # What Serve takes and the ingress never hears of.
    (
        "  import_path: dps_deployments.app:build_fleet",
        "  import_path: dps_deployments.app:build_fleet\n"
        "  deployments: [{name: DpsIngress, num_replicas: 2}]",
        "deployments.0.name is 'DpsIngress': options of the ingress under deployments do not reach",
    ),
    # YAML keeps the last of two equal keys in silence.
    ("  route_prefix: /", "  route_prefix: /\n  route_prefix: /", "stands already in line 17"),
]  # fmt: skip


def problems(
    file: Path, text: str, capsys: pytest.CaptureFixture[str], status: int
) -> list[tuple[int, str]]:
    file.write_text(text)
    assert main(["validate", "--json", str(file)]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (status == 0)
    return [(problem["line"], problem["text"]) for problem in found["problems"]]


def test_shipped_configs_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", *map(str, CONFIGS)]) == 0
    said = capsys.readouterr().out
    assert all(f"ok   {path}" in said for path in CONFIGS)


def test_good_file_has_no_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(tmp_path / "good.yaml", GOOD, capsys, 0) == []


@pytest.mark.parametrize(("good", "bad", "message"), FAULTS, ids=[fault[2] for fault in FAULTS])
def test_one_fault_is_named_with_its_line(
    good: str, bad: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = GOOD.splitlines()
    (index,) = [i for i, line in enumerate(lines) if line == good or line.startswith(f"{good} ")]
    lines[index] = lines[index].replace(good, bad)
    found = problems(tmp_path / "bad.yaml", "\n".join(lines), capsys, 1)
    assert any(message in text for _, text in found), found
    moved = {line for line, text in found if message in text}
    assert moved <= {index + 1, index + 2, *_parents(lines, index)}


def _parents(lines: list[str], index: int) -> set[int]:
    """Lines of the mappings around a line: a fault of several fields is a fault of theirs."""
    depth, found = len(lines[index]) - len(lines[index].lstrip()), set()
    for above in range(index, -1, -1):
        indent = len(lines[above]) - len(lines[above].lstrip())
        if indent <= depth:
            found.add(above + 1)
            depth = indent
    return found


def test_all_faults_are_found_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = GOOD
    chosen = [*FAULTS[:8], FAULTS[9]]
    for good, bad, _ in chosen:
        text = text.replace(f"\n{good}", f"\n{bad}", 1)
    found = problems(tmp_path / "bad.yaml", text, capsys, 1)
    for _, _, message in chosen:
        assert any(message in text for _, text in found), message
    lines = [line for line, _ in found]
    assert lines == sorted(lines)
    assert len(set(lines)) >= 9


def test_wrong_sections_hide_no_relations_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = {
        "alone_after_s (0.2) must be above ttl_s (60)",
        "publish_period_s (30) must be below stale_after_s (3.5)",
        "policy is 'lifo'",
        "request_timeout_s is 100: it must be above",
        "deployment_config.graceful_shutdown_timeout_s is 1: it must be above",
        "health_check_period_s is 300: at most 10",
    }
    text = GOOD.replace("    request_timeout_s: 900", "    request_timeout_s: 100", 1)
    for good, bad, message in FAULTS:
        if message in messages:
            text = text.replace(f"\n{good}", f"\n{bad}", 1)
    found = problems(tmp_path / "bad.yaml", text, capsys, 1)
    for message in messages:
        assert any(message in problem for _, problem in found), (message, found)
    assert not any("controller_app" in problem for _, problem in found)


def test_model_folder_is_looked_for_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    assert main(["validate", "--with-model", str(file)]) == 1
    assert f"{file}:29: applications.1.args.llm_config.model_loading_config" in (
        capsys.readouterr().out
    )
