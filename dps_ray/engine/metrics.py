"""Prometheus metrics of an elastic engine, read off its status page in the server process.

vLLM's own statistics have no room for them, and it drops every foreign collector named ``vllm:*``:
these are named ``dps:*``.
"""

from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from dps_ray.engine.configure import engine_options
from dps_ray.engine.status_page import StatusPage
from dps_ray.modes import Mode

GAUGES = {
    "base_blocks": "KV blocks that exist without lending",
    "used_blocks": "KV blocks held by live requests",
    "free_blocks": "KV blocks free without lending more",
    "headroom_blocks": "KV blocks free or obtainable by lending",
    "units_backed": "Units that hold their residual segment",
    "units_kv": "Units lent to the KV cache",
    "units_restoring": "Units whose residual segment is on its way back",
    "restore_progress": "Share of residual segments in place",
    "restore_bytes_per_s": "Bytes per second at which the latest segments came back, all ranks",
    "restore_left_s": "Seconds until all segments are in place, at the pace so far",
    "layers": "Layers that can return to full precision one by one",
    "layers_full": "Layers that the latest step ran in full precision",
    "backup_bytes": "Host memory of the residual's backup in bytes, all ranks, pinned for a GPU",
    "last_restore_s": "Duration of the latest return to full mode in seconds",
}
COUNTERS = {
    "tokens_full": "Tokens sampled by full-mode passes",
    "tokens_fast": "Tokens sampled by fast-mode passes",
    "tokens_mixed": "Those of the fast mode's tokens that passes with some full layers sampled",
    "switches_to_fast": "Switches to fast mode",
    "switches_to_full": "Returns to full mode",
    "restore_busy_s": "Time spent copying and verifying residual bytes in seconds, slowest rank",
    "restored_bytes": "Residual bytes restored from host memory",
    "resumed_bytes": "Residual bytes that a burst held up and that were not copied again",
    "restores_cancelled": "Restores ended by a new burst or by the fleet",
    "restores_failed": "Restores that some rank could not complete",
    "preemptions": "Requests preempted",
    "blocks_moved": "Live KV blocks moved out of lent units",
    "prefixes_saved": "Cached prefix blocks moved out of units before these were restored",
}


class DpsStatLogger(StatLoggerBase):
    """Registers the collector once a server process; plain engines get nothing."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        if vllm_config.model_config.quantization != "dps":
            return
        key = engine_options(vllm_config).key
        assert key is not None
        self._collector = StatusCollector(key, str(engine_index))
        REGISTRY.register(self._collector)

    def record(self, *_: Any, **__: Any) -> None:
        """Nothing to do a step: metrics are read when they are scraped."""

    def log_engine_initialized(self) -> None:
        """Nothing to say: the load report is in the worker's log."""


class StatusCollector(Collector):
    """Turns one reading of a status page into Prometheus metrics."""

    def __init__(self, key: str, engine: str) -> None:
        self._page = StatusPage.attach(key)
        self._engine = engine

    def collect(self) -> list[Metric]:
        """Metrics of the latest status; none before the first, none for what is not known."""
        status = self._page.read()
        if status is None:
            return []
        families: list[Metric] = []
        for names, family in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, text in names.items():
                value = getattr(status, name)
                if value is not None:
                    metric = family(f"dps:{name}", text, labels=["engine"])
                    metric.add_metric([self._engine], float(value))
                    families.append(metric)
        for name, text, on in (
            ("mode_fast", "1 in fast mode, 0 in full mode", status.mode is Mode.FAST),
            (
                "fault",
                "1 from a restore's failure until one of that segment succeeds or the pin changes",
                status.fault is not None,
            ),
        ):
            gauge = GaugeMetricFamily(f"dps:{name}", text, labels=["engine"])
            gauge.add_metric([self._engine], float(on))
            families.append(gauge)
        return families
