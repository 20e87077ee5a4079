"""How many replicas a share of the fleet is."""


def share_of(live: int, share: float) -> int:
    """A share of the live replicas, rounded down, but at least one where the share is not 0."""
    # 0.29 * 100 is a little less than 29.
    return max(int(share * live + 1e-9), 1 if share else 0)
