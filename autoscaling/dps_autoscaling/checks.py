"""Checks of an ``autoscaling_config``: names, ranges, windows that would make a fleet thrash."""

from collections.abc import Iterator, Mapping
from inspect import isclass
from typing import Any

from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from dps_autoscaling.scaler import ScalingOptions
from dps_ray.config import DpsConfigError
from dps_ray.faults import faults_of


def autoscaling_faults(raw: Mapping[str, Any], where: str) -> list[str]:
    """Build Ray's ``AutoscalingConfig`` and its policy, and say what is wrong with them.

    Parameters
    ----------
    raw
        An ``autoscaling_config`` as a config file gives it.
    where
        Dotted path of ``raw``, for the messages.
    """
    policy = raw.get("policy")
    options, faults = _policy(policy, f"{where}.policy")
    faults += _unknown(raw, AutoscalingConfig, where)
    try:
        config = AutoscalingConfig(**{name: raw[name] for name in raw if name != "policy"})
    except ValidationError as error:
        return faults + faults_of(error, where)
    return faults + (list(_relations(config, options, where)) if options is not None else [])


def scaling_options(raw: Any) -> ScalingOptions | None:
    """Options of the elastic policy in an ``autoscaling_config``; ``None`` where it has none."""
    return _policy(raw.get("policy"), "policy")[0] if isinstance(raw, Mapping) else None


def _policy(policy: Any, where: str) -> tuple[ScalingOptions | None, list[str]]:
    """Build Ray's ``AutoscalingPolicy``, and the policy itself."""
    options: ScalingOptions | None = None
    faults = _unknown(policy, AutoscalingPolicy, where) if isinstance(policy, Mapping) else []
    try:
        built = AutoscalingPolicy(**policy) if isinstance(policy, Mapping) else AutoscalingPolicy()
        found = built.get_policy()
        if isclass(found):
            scaling = found(**built.policy_kwargs)
            # Not by the policy's class: Ray pickles it by value and gives a copy back.
            given = getattr(scaling, "options", None)
            options = given if isinstance(given, ScalingOptions) else None
    except ValidationError as error:
        faults += faults_of(error, where)
    except DpsConfigError as error:
        faults += [f"{where}.{fault}" for fault in error.faults]
    except (ImportError, AttributeError, ValueError) as error:
        function = policy.get("policy_function") if isinstance(policy, Mapping) else None
        faults.append(
            f"{where}.policy_function is {function!r}, which cannot be imported ({error}): "
            "give module:name"
        )
    except TypeError as error:
        faults.append(f"{where}.policy_kwargs do not fit the policy: {error}")
    return options, faults


def _unknown(raw: Mapping[str, Any], model: Any, where: str) -> list[str]:
    return [
        f"{where}.{name} is not an option: remove it or correct its spelling"
        for name in raw
        if name not in model.model_fields
    ]


def _relations(config: AutoscalingConfig, options: ScalingOptions, where: str) -> Iterator[str]:
    """Relations between Serve's windows and the policy's."""
    # Ray 2.60 calls it deprecated in favour of environment variables, but does not read those.
    push_s = config.metrics_interval_s
    push = f"metrics_interval_s ({push_s:g})"
    look_back = f"look_back_period_s ({config.look_back_period_s:g})"
    kwargs = "policy.policy_kwargs."
    windows = (
        ("look_back_period_s", config.look_back_period_s, push, push_s, "a mean needs reports"),
        (
            f"{kwargs}silent_after_s",
            options.silent_after_s,
            push,
            push_s,
            "every replica would count as silent between two of its reports",
        ),
        (
            f"{kwargs}calm_s",
            options.calm_s,
            look_back,
            config.look_back_period_s,
            "the fleet would shrink on figures of the larger load before it",
        ),
        (
            f"{kwargs}calm_s",
            options.calm_s,
            f"upscale_delay_s ({config.upscale_delay_s:g})",
            config.upscale_delay_s,
            "the fleet would shrink sooner than it grows back",
        ),
        (
            f"{kwargs}idle_s",
            options.idle_s,
            look_back,
            config.look_back_period_s,
            "the last replica would stop while its latest requests still count",
        ),
    )
    for name, value, other, limit, why in windows:
        if value <= limit:
            yield f"{where}.{name} is {value:g}: it must be above {other}: {why}"
    if config.upscale_delay_s < config.look_back_period_s:
        yield (
            f"{where}.upscale_delay_s is {config.upscale_delay_s:g}: it must not be below "
            f"{look_back}, or the fleet grows twice for the same burst"
        )
    if config.downscale_delay_s >= options.calm_s:
        yield (
            f"{where}.downscale_delay_s is {config.downscale_delay_s:g}: set it to a few seconds, "
            f"below calm_s ({options.calm_s:g}) of the policy: it starts anew whenever a step down "
            "is postponed, and calm_s does not"
        )
    for name in ("upscaling_factor", "downscaling_factor"):
        if getattr(config, name) not in (None, 1.0):
            yield (
                f"{where}.{name} is {getattr(config, name):g}: remove it; max_step_up and "
                "max_step_down of the policy bound its steps"
            )
