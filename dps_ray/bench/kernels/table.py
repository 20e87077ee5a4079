"""The kernels' figures as lines for people."""

from typing import Any

HEADER = (
    f"{'layer':<22}{'format':<10}{'M':>5}{'rival':>9}{'rival us':>11}"
    f"{'full x (quartiles)':>21}{'fast x (quartiles)':>21}{'rounds':>8}"
    f"{'share of stream: full, fast, rival':>38}"
)


def line(row: dict[str, Any]) -> str:
    """One row of the table; ``x`` above 1 is faster than the rival."""
    rival = row["rival"]
    text = (
        f"{row['shape']:<22}{row['format']:<10}{row['tokens']:>5}{rival:>9}"
        f"{row['us'][rival]:>11.1f}"
        f"{_spread(row['speedup']['full']):>21}{_spread(row['speedup']['fast']):>21}"
        f"{row['rounds']:>8}"
    )
    if "bandwidth_share" not in row:
        return text
    share = row["bandwidth_share"]
    shares = ", ".join(f"{share[name]['median']:.0%}" for name in ("full", "fast", rival))
    return f"{text}{shares:>20} of {row['stream_gbps']['median']:.1f} GB/s"


def _spread(figure: dict[str, float]) -> str:
    return f"{figure['median']:.2f} ({figure['low']:.2f}-{figure['high']:.2f})"
