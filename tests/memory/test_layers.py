"""Layers of a model, read off the names of its weights."""

from dps_ray.memory.arena import Entry
from dps_ray.memory.layers import LayerResidual, layers_of

SIZES = {
    "model.layers.0.self_attn.qkv_proj": 100,
    "model.layers.0.mlp.experts.w13": 300,
    "model.layers.0.mlp.experts.w2": 200,
    "model.layers.10.mlp.down_proj": 50,
    "model.layers.1.mlp.down_proj": 70,
    "projector": 30,
    "visual.blocks.1.attn.qkv": 64,
    "visual.blocks.1": 10,
}


def entries(names: list[str]) -> list[Entry]:
    made, offset = [], 0
    for name in names:
        made.append(Entry(name, offset, SIZES[name]))
        offset += -(-SIZES[name] // 64) * 64
    return made


def test_weights_of_a_layer_return_together_and_weights_without_number_alone() -> None:
    layers = layers_of(entries(list(SIZES)))
    assert [layer.name for layer in layers] == [
        "model.layers.0", "model.layers.10", "model.layers.1", "projector", "visual.blocks.1",
    ]  # fmt: skip
    assert layers[0] == LayerResidual("model.layers.0", 0, 128 + 320 + 200, (0, 128, 448))


def test_a_layer_whose_weights_lie_apart_counts_as_two() -> None:
    names = [
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.0.mlp.experts.w2",
    ]
    layers = layers_of(entries(names))
    assert [layer.name for layer in layers] == [
        "model.layers.0",
        "model.layers.1",
        "model.layers.0",
    ]
