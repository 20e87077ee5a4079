"""Layers in both modes, and the operator that finds them by their residual."""

import pytest
import torch
from dps_kernels import available, elastic, library, linear, new_access, prepare_elastic_linear
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels import packed_cases
from tests.kernels.weights import nested, normal, planes

BF16 = torch.bfloat16
ROWS, COLUMNS = 64, 96
compiled = pytest.mark.skipif(not available(), reason="the compiled kernels are not installed")
operator = torch.ops.dps_kernels.elastic_linear


def full_planes(order="packed", seed=0):
    weight = planes(nested((ROWS, COLUMNS), "e4m3_row", BF16, seed), True)
    return packed_cases.packed(weight) if order == "packed" else weight


def run(path, *arguments):
    """As the operator does, which is the compiled library's wherever there is one."""
    return operator(*arguments) if path == "compiled" else elastic._run(*arguments)


@pytest.mark.parametrize("order", ["packed", "row-major"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layer_reads_its_residual_only_where_the_access_says_so(path, order, device):
    if path == "compiled" and device == "cuda":
        pytest.skip("the compiled kernels ask the compiled access")
    if order == "packed" and not library.has_packed():
        pytest.skip("no bfloat16 dot products here")
    weight, other = full_planes(order), full_planes(order, seed=1)
    access = new_access(device)
    layer = prepare_elastic_linear(weight, BF16, access)
    another = prepare_elastic_linear(other, BF16, access)
    x, bias = normal(5, COLUMNS, dtype=BF16, seed=2), normal(ROWS, dtype=BF16, seed=3)
    in_full, in_fast = (linear(x, each, bias) for each in (weight, weight._replace(lower=None)))
    assert not torch.equal(in_full, in_fast)
    here, there = weight.lower.data_ptr(), other.lower.data_ptr()
    for everything, addresses, wanted in (
        (False, set(), in_fast),
        (False, {there}, in_fast),
        (False, {here, there}, in_full),
        (True, set(), in_full),
        (False, set(), in_fast),
    ):
        access.all, access.addresses = everything, addresses
        assert access.may_read(here) == (wanted is in_full)
        assert torch.equal(layer(x, bias), wanted)
        assert torch.equal(run(path, x, weight.lower, bias), wanted)
    access.all = True
    assert torch.equal(run(path, x, other.lower, None), linear(x, other))
    assert torch.equal(another(x, None), linear(x, other))


def test_residual_of_no_living_layer_is_refused(path):
    weight = full_planes("row-major")
    x = normal(2, COLUMNS, dtype=BF16)
    layer = prepare_elastic_linear(weight, BF16, new_access("cpu"))
    run(path, x, weight.lower, None)
    del layer
    with pytest.raises(RuntimeError, match="residual: no elastic layer begins at this address"):
        run(path, x, weight.lower, None)


def test_layer_that_goes_leaves_the_place_to_the_one_that_has_taken_it(path):
    weight = full_planes("row-major")
    access = new_access("cpu")
    first = prepare_elastic_linear(weight, BF16, access)
    again = full_planes("row-major", seed=1)._replace(lower=weight.lower)
    second = prepare_elastic_linear(again, BF16, access)
    del first
    x = normal(2, COLUMNS, dtype=BF16)
    assert torch.equal(run(path, x, weight.lower, None), second(x, None))


@compiled
def test_wrong_argument_is_named_by_the_layer_and_by_the_operator():
    weight = full_planes("row-major")
    layer = prepare_elastic_linear(weight, BF16, new_access("cpu"))
    with pytest.raises(ValueError, match=r"x has shape \(2, 95\)"):
        layer(torch.empty(2, 95, dtype=BF16), None)
    with pytest.raises(RuntimeError, match=r"^x\b"):
        operator(torch.empty(2, 95, dtype=BF16), weight.lower, None)


@compiled
def test_operator_tells_of_its_result_what_torch_compile_has_to_know():
    weight = full_planes("row-major")
    layer = prepare_elastic_linear(weight, BF16, new_access("cpu"))
    for shape in ((3, COLUMNS), (2, 1, COLUMNS), (0, COLUMNS)):
        x = normal(*shape, dtype=BF16)
        with FakeTensorMode() as mode:
            traced = operator(mode.from_tensor(x), mode.from_tensor(weight.lower), None)
        real = layer(x, None)
        assert (traced.shape, traced.dtype) == (real.shape, real.dtype)
        assert traced.stride() == real.stride()


@compiled
def test_one_compiled_graph_serves_both_modes_of_every_layer():
    weights = [full_planes("row-major", seed=seed) for seed in range(3)]
    access = new_access("cpu")
    layers = [prepare_elastic_linear(weight, BF16, access) for weight in weights]
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    traced = torch.compile(lambda x, residual: operator(x, residual, None), backend=backend)
    x = normal(4, COLUMNS, dtype=BF16, seed=2)
    for everything in (True, False, True):
        access.all = everything
        for layer, weight in zip(layers, weights, strict=True):
            assert torch.equal(traced(x, weight.lower), layer(x, None))
    assert len(graphs) == 1
