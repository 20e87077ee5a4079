"""Element orders: permutations of bytes within one matrix, the same for every plane."""

import pytest
import torch
from dps_kernels import K16, ROW_MAJOR, Layout, Planes, linear, preferred_layout, to_layout
from dps_kernels.planes import from_layout

from tests.kernels.weights import nested, normal, planes

LAYOUTS = [ROW_MAJOR, K16, Layout(32, 2), Layout(8, 4, True)]


def in_layout(weight: Planes, layout: Layout) -> Planes:
    lower = None if weight.lower is None else to_layout(weight.lower, layout)
    return weight._replace(upper=to_layout(weight.upper, layout), lower=lower, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_undone_exactly(layout):
    plane = torch.randint(0, 256, (3, 64, 48), dtype=torch.uint8)
    stored = to_layout(plane, layout)
    assert stored.is_contiguous()
    assert torch.equal(from_layout(stored, layout), plane)
    assert torch.equal(stored[1], to_layout(plane[1], layout))


def test_k16_puts_an_operand_of_the_tensor_core_side_by_side():
    stored = to_layout(torch.arange(32, dtype=torch.uint8).view(1, 32), K16)[0].tolist()
    for t in range(4):
        for i in range(2):
            for j in range(2):
                assert stored[4 * t + 2 * i + j] == 8 * i + 2 * t + j
                assert stored[16 + 4 * t + 2 * i + j] == 16 + 8 * i + 2 * t + j


def test_blocks_hold_the_interleaved_columns_of_their_rows():
    plane = torch.arange(4 * 6, dtype=torch.uint8).view(4, 6)
    stored = to_layout(plane, Layout(2, 3)).reshape(-1).tolist()
    assert stored[:6] == [0, 1, 2, 6, 7, 8]
    assert stored[6:12] == [3, 4, 5, 9, 10, 11]


@pytest.mark.parametrize("path", ["compiled", "torch"], indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_does_not_depend_on_the_layout(layout, path):
    weight = planes(nested((64, 96), "e4m3_row", torch.bfloat16), True)
    x = normal(3, 96, dtype=torch.bfloat16, seed=1)
    y = linear(x, in_layout(weight, layout))
    torch.testing.assert_close(y, linear(x, weight), rtol=2.0**-7, atol=1e-5)


def test_every_matrix_has_a_preferred_layout():
    assert preferred_layout("cuda", 8, 48, torch.float16) == K16
    assert preferred_layout("cuda", 8, 40, torch.float16) == ROW_MAJOR
    assert preferred_layout("cpu", 7, 31, torch.bfloat16) == ROW_MAJOR


def test_a_layout_that_does_not_divide_the_matrix_is_refused():
    with pytest.raises(ValueError, match="interleave is 4"):
        to_layout(torch.zeros(8, 6), Layout(1, 4))
    with pytest.raises(ValueError, match="k16 is set for 24 columns"):
        to_layout(torch.zeros(8, 24), K16)
