"""``dps-ray bench pressure``: what is refused before an engine starts."""

import pytest

from dps_ray.cli.main import main


def test_bounds_in_the_wrong_order_are_refused_before_an_engine_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "pressure", "--prompt-tokens", "500", "100"]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert "--prompt-tokens is 500 100: give the smaller bound first" in said.err
