"""Layers that keep their 16-bit weight whatever its values are."""

_REASONS = {
    ".gate": "router: its choice of experts must not depend on the mode",
    ".shared_expert_gate": "router: its weight on the shared expert must not depend on the mode",
    ".kv_b_proj": "absorbed into the attention at load (MLA)",
}


def reason_to_keep(name: str) -> str | None:
    """Why the layer called ``name`` stays whole, or ``None`` where it may be split."""
    return next((why for end, why in _REASONS.items() if name.endswith(end)), None)
