"""The kernels' figures as lines for people."""

from typing import Any

HEADER = (
    f"{'layer':<22}{'format':<10}{'M':>5}{'rival':>9}{'rival us':>11}"
    f"{'full x (quartiles)':>21}{'fast x (quartiles)':>21}{'rounds':>8}"
    f"{'share of ceiling: full, fast, rival':>38}"
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
    if "fast_over_fp8" in row:
        text += f"  fast {_spread(row['fast_over_fp8'])} x fp8"
    if "bandwidth_share" in row:
        text += _shares(row["bandwidth_share"], row, f"{row['stream_gbps']['median']:.1f} GB/s")
    if "peak_share" in row:
        text += _shares(row["peak_share"], row, f"{row['peak_tflops']['median']:.0f} TFLOP/s")
    if "scaling" in row:
        scaling = row["scaling"]
        speedups = (f"{name} {_spread(figure)}" for name, figure in scaling["x"].items())
        text += f"\n    {row['threads']} threads over {scaling['from']}: {', '.join(speedups)}"
    return text


def _shares(share: dict[str, Any], row: dict[str, Any], of: str) -> str:
    shares = ", ".join(f"{share[name]['median']:.0%}" for name in ("full", "fast", row["rival"]))
    return f"{shares:>20} of {of}"


def _spread(figure: dict[str, float]) -> str:
    return f"{figure['median']:.2f} ({figure['low']:.2f}-{figure['high']:.2f})"
