"""What a model folder tells before anything is started."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dps_ray.checks.process import run_engines
from dps_ray.checks.specs import EngineSpec
from dps_ray.config import DpsConfigError, DpsOptions
from dps_ray.engine.preflight import Preflight, preflight, require_few_units
from dps_ray.memory.geometry import plan_geometry
from dps_ray.models.tiny import TINY

from .conftest import Tiny

KV_BYTES = 3 << 20
BLOCK_TOKENS = 32
SUBJECTS = [(name, "float16") for name in TINY] + [("qwen3", "bfloat16")]


def look(folder: Path | str, **arguments: object) -> Preflight:
    """Run the preflight; options and engine arguments may be mixed."""
    names = DpsOptions.model_fields.keys() & arguments.keys()
    fields = {name: arguments.pop(name) for name in names}
    found = preflight(str(folder), options=DpsOptions(**fields), **arguments)  # type: ignore[arg-type]
    assert found is not None
    return found


class Model:
    """A one-layer folder to spoil."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.config: dict[str, object] = {
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size": 64,
            "torch_dtype": "float16",
        }
        rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}
        self.tensors = {
            f"model.layers.0.self_attn.{name}.weight": torch.full((size, 64), 0.5).half()
            for name, size in rows.items()
        }
        self.tensors["model.embed_tokens.weight"] = torch.ones(128, 64).half()
        self.write()

    def write(self) -> Path:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.folder / "model.safetensors")
        return self.folder


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path / "model")


# --- agreement with the engine -------------------------------------------------------------------


@pytest.mark.engine
def test_figures_are_those_of_the_engine(tiny: Tiny) -> None:
    folders = [tiny(name, dtype=dtype) for name, dtype in SUBJECTS]
    results = run_engines(
        [
            EngineSpec(
                label=folder.name,
                model=str(folder),
                kv_bytes=KV_BYTES,
                dps={"kernel": "exact"},
                max_model_len=256,
                block_size=BLOCK_TOKENS,
                scenario="burst",
                arguments={"count": 1, "prompt_tokens": 8, "max_tokens": 2},
            )
            for folder in folders
        ]
    )
    for folder, result in zip(folders, results, strict=True):
        found = look(folder, kv_cache_memory_bytes=KV_BYTES, block_size=BLOCK_TOKENS)
        assert found.geometry is not None
        status = result["status"]
        assert (
            found.residual_bytes,
            found.geometry.base_blocks,
            found.geometry.num_blocks,
            found.geometry.num_units,
        ) == (
            result["ranks"][0]["residual_bytes"],
            status["base_blocks"],
            status["total_blocks"],
            status["units"],
        ), folder.name


@pytest.mark.parametrize("name", TINY)
def test_two_ranks_share_all_that_vllm_shards(tiny: Tiny, name: str) -> None:
    folder = tiny(name)
    one, two = look(folder), look(folder, tensor_parallel_size=2)
    tensors = load_file(folder / "model.safetensors")
    whole = sum(
        tensor.numel()
        for key, tensor in tensors.items()
        if key.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight"))
    )
    assert two.residual_bytes == (one.residual_bytes - whole) // 2 + whole
    assert one.block_bytes is not None
    latent = name == "glm4-moe-lite"
    assert two.block_bytes == (one.block_bytes if latent else one.block_bytes // 2)


def test_key_heads_are_copied_to_ranks_beyond_their_number(model: Model) -> None:
    two, four = (look(model.folder, tensor_parallel_size=ranks) for ranks in (2, 4))
    assert two.residual_bytes == (64 + 32 + 32 + 64) * 64 // 2
    assert four.residual_bytes == (64 + 64) * 64 // 4 + (32 + 32) * 64 // 2
    assert four.block_bytes == two.block_bytes


# --- what is looked at ---------------------------------------------------------------------------


def test_hub_id_is_not_looked_up() -> None:
    assert preflight("someone/some-model", options=DpsOptions()) is None


def test_folder_without_safetensors_is_left_to_the_loader(model: Model) -> None:
    (model.folder / "model.safetensors").unlink()
    assert preflight(str(model.folder), options=DpsOptions()) is None


def test_draft_layers_beyond_the_depth_do_not_count(model: Model) -> None:
    before = look(model.folder).residual_bytes
    model.tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(64, 64).half()
    assert look(model.write()).residual_bytes == before


def test_tensors_outside_the_index_do_not_count(model: Model) -> None:
    names = [name for name in model.tensors if "o_proj" not in name]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (model.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert look(model.folder).residual_bytes == (64 + 32 + 32) * 64


def test_small_layers_stay_out_of_the_residual(model: Model) -> None:
    stacked_bytes = 2 * (64 + 32 + 32) * 64
    assert look(model.folder, min_split_bytes=stacked_bytes).residual_bytes == stacked_bytes // 2


def test_memory_is_not_planned_where_layers_cache_differently(model: Model) -> None:
    model.config |= {"num_hidden_layers": 2}
    model.tensors["model.layers.1.linear_attn.in_proj.weight"] = torch.ones(64, 64).half()
    found = look(model.write(), kv_cache_memory_bytes=1)
    assert (found.block_bytes, found.geometry) == (None, None)


def test_geometry_needs_a_size_of_the_kv_cache(model: Model) -> None:
    assert look(model.folder).geometry is None
    assert look(model.folder, kv_cache_memory_bytes=1 << 20).geometry is not None


def test_eight_bit_kv_cache_halves_a_block(model: Model) -> None:
    whole = look(model.folder).block_bytes
    assert whole is not None
    assert look(model.folder, kv_cache_dtype="fp8_e5m2").block_bytes == whole // 2


def test_all_weights_are_read_before_a_model_is_refused(model: Model) -> None:
    for name in model.tensors:
        if name.endswith(("q_proj.weight", "k_proj.weight", "o_proj.weight")):
            model.tensors[name] = model.tensors[name] * 8
    found = look(model.write(), formats=("e4m3",))
    assert found.eligible == "model.layers.0.self_attn.qkv_proj"


def test_float32_checkpoint_served_in_16_bits_is_eligible(model: Model) -> None:
    model.config["torch_dtype"] = "float32"
    model.tensors = {name: tensor.float() for name, tensor in model.tensors.items()}
    assert look(model.write(), dtype="auto").residual_bytes == (64 + 32 + 32 + 64) * 64
    assert look(model.folder, dtype="half").residual_bytes == (64 + 32 + 32 + 64) * 64


# --- refusals ------------------------------------------------------------------------------------


def refusal(folder: Path | str, **arguments: object) -> str:
    with pytest.raises(DpsConfigError) as caught:
        look(folder, **arguments)
    return str(caught.value)


@pytest.mark.parametrize("path", ["./missing-model", "/nowhere/model", "~/no-such-model"])
def test_missing_folder_names_model_source(path: str) -> None:
    assert refusal(path) == (
        f"model_source is {path!r}: there is no config.json in that folder; give a Hugging Face "
        "model folder or id"
    )


def test_model_without_eligible_layer_is_refused(model: Model) -> None:
    model.tensors = {name: tensor * 8 for name, tensor in model.tensors.items()}
    assert refusal(model.write(), formats=("e4m3",)) == (
        f"model {str(model.folder)!r} has no layer that a nested format fits "
        "(additional_config.dps.formats is ['e4m3']): serve it without quantization 'dps', or "
        "allow more formats"
    )


def test_model_of_small_layers_is_refused(model: Model) -> None:
    assert refusal(model.folder, min_split_bytes=1 << 20) == (
        "additional_config.dps.min_split_bytes is 1048576: no layer of model "
        f"{str(model.folder)!r} is that large; lower it"
    )


def test_float32_serving_is_refused(model: Model) -> None:
    assert refusal(model.folder, dtype="float32") == (
        "dtype is 'float32': nested formats split 16-bit weights; use 'float16' or 'bfloat16'"
    )


def test_quantized_configuration_is_refused(model: Model) -> None:
    model.config["quantization_config"] = {"quant_method": "fp8"}
    assert refusal(model.write()) == (
        f"model {str(model.folder)!r} is quantized already (quantization_config.quant_method is "
        "'fp8'): give its 16-bit checkpoint, or leave out quantization 'dps'"
    )


def test_quantized_weights_are_refused(model: Model) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    model.tensors[name] = model.tensors[name].to(torch.float8_e4m3fn)
    assert refusal(model.write()) == (
        f"model {str(model.folder)!r} is quantized already ({name} is F8_E4M3): give its 16-bit "
        "checkpoint, or leave out quantization 'dps'"
    )


def test_unit_larger_than_the_residual_is_refused(model: Model) -> None:
    assert refusal(model.folder, unit_bytes=99_999_999_999) == (
        "additional_config.dps.unit_bytes is 99999999999: the residual of 12288 bytes fills less "
        "than one unit; use at most 12288"
    )


def test_too_little_memory_is_refused(model: Model) -> None:
    message = refusal(model.folder, kv_cache_memory_bytes=1000, block_size=16)
    assert message.startswith("kv_cache_memory_bytes is 1000: no room for 2 base KV blocks")
    assert "; give kv_cache_memory_bytes at least " in message
    assert "\n" not in message


def test_too_many_units_are_refused() -> None:
    geometry = plan_geometry(
        kv_bytes=1 << 20,
        residual_bytes=8 << 20,
        block_bytes=4096,
        granularity_bytes=4096,
        unit_bytes=1,
    )
    with pytest.raises(DpsConfigError) as caught:
        require_few_units(geometry)
    assert str(caught.value) == (
        "additional_config.dps.unit_bytes gives 2048 units of 4096 bytes: at most 1024; use "
        "larger units"
    )


def test_unreadable_weights_are_refused(model: Model) -> None:
    (model.folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    message = refusal(model.folder)
    assert message.startswith(f"model {str(model.folder)!r} cannot be read (")
    assert message.endswith("): make or download the folder again")
    assert "\n" not in message
