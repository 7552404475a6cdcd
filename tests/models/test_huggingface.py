"""Checkpoint folders: read into any mesh, every tensor matched once, written as servers load them."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dflash_jax.errors import UserError
from dflash_jax.models import weights
from dflash_jax.models.architecture import FULL, SLIDING, Llama3Scaling, Rope, parse_drafter
from dflash_jax.models.huggingface import (
    load_drafter,
    load_target,
    read_stop_ids,
    resolve_folder,
    save_drafter,
    save_target,
)
from dflash_jax.models.target import Target
from dflash_jax.parallel import mesh_of
from tests.fixtures import random_tensors, save_tiny_drafter, save_tiny_target, target_config
from tests.helpers import make_drafter, make_target, tiny_drafter, tiny_target

MESH_SHAPES = [(1, 1, 1), (2, 2, 2)]
ARCH = tiny_target()
FAMILIES = [
    ARCH,
    tiny_target(family="qwen2", qk_norm=False, qkv_bias=True, tie_word_embeddings=True),
    tiny_target(family="llama", qk_norm=False),
    tiny_target(family="llama", qk_norm=False, qkv_bias=True, output_bias=True),
]


def family_id(arch):
    return f"{arch.family}{'-bias' if arch.output_bias else ''}"


def save_target_of(folder, arch, tensors):
    bias = {"attention_bias": True} if arch.qkv_bias else {}
    return save_tiny_target(folder, arch, tensors, **bias)


def save_sharded(folder, arch, tensors):
    """Two files and an index, as large checkpoints come."""
    folder.mkdir()
    names = sorted(tensors)
    table = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(table.values())):
        save_file({name: tensors[name] for name in names if table[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    (folder / "config.json").write_text(json.dumps(target_config(arch)))
    return folder


def assert_equal_params(params, tensors):
    loaded = weights.by_name(params)
    assert loaded.keys() == tensors.keys()
    for name, array in loaded.items():
        np.testing.assert_array_equal(np.asarray(array), tensors[name], err_msg=name)


def refusal(folder, mesh_shape=(1, 1, 1)):
    """The one line that refuses a target folder."""
    with pytest.raises(UserError) as error:
        load_target(folder, mesh_of(mesh_shape), jnp.float32)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def tensors():
    return random_tensors(Target(ARCH))


class TestLoadTarget:
    @pytest.mark.parametrize("mesh_shape", MESH_SHAPES)
    @pytest.mark.parametrize("arch", FAMILIES, ids=family_id)
    def test_every_family_on_every_mesh(self, tmp_path, arch, mesh_shape):
        tensors = random_tensors(Target(arch))
        target = load_target(save_target_of(tmp_path / "target", arch, tensors), mesh_of(mesh_shape), jnp.float32)
        assert target.arch == arch
        assert_equal_params(target.params, tensors)

    @pytest.mark.parametrize("mesh_shape", MESH_SHAPES)
    def test_sharded_folder(self, tmp_path, tensors, mesh_shape):
        folder = save_sharded(tmp_path / "target", ARCH, tensors)
        assert_equal_params(load_target(folder, mesh_of(mesh_shape), jnp.float32).params, tensors)

    def test_each_device_holds_its_shard(self, tmp_path, tensors):
        mesh = mesh_of((2, 2, 2))
        target = load_target(save_tiny_target(tmp_path / "target", ARCH, tensors), mesh, jnp.float32)
        _, specs = weights.split(Target(ARCH))
        assert jax.tree.map(lambda array: array.sharding, target.params) == weights.shardings(specs, mesh)
        query = weights.by_name(target.params)["model.layers.0.self_attn.q_proj.weight"]
        assert {shard.data.shape for shard in query.addressable_shards} == {(16, 16)}

    @pytest.mark.parametrize("mesh_shape", MESH_SHAPES)
    def test_bfloat16_files_are_read_exactly(self, tmp_path, tensors, mesh_shape):
        halves = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
        folder = save_tiny_target(tmp_path / "target", ARCH, halves)
        for dtype in (jnp.float32, jnp.bfloat16):
            target = load_target(folder, mesh_of(mesh_shape), dtype)
            assert {array.dtype for array in jax.tree.leaves(target.params)} == {jnp.dtype(dtype)}
            assert_equal_params(target.params, halves)

    def test_tied_target_may_carry_its_projection_twice(self, tmp_path):
        arch = tiny_target(tie_word_embeddings=True)
        tensors = random_tensors(Target(arch))
        doubled = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
        folder = save_tiny_target(tmp_path / "target", arch, doubled)
        assert_equal_params(load_target(folder, mesh_of((1, 1, 1)), jnp.float32).params, tensors)

    def test_rotary_buffers_of_old_files_are_passed_over(self, tmp_path, tensors):
        old = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
        folder = save_tiny_target(tmp_path / "target", ARCH, old)
        assert_equal_params(load_target(folder, mesh_of((1, 1, 1)), jnp.float32).params, tensors)

    def test_save_target_writes_what_load_target_reads(self, tmp_path):
        target, mesh = make_target(ARCH)
        save_target(tmp_path / "target", target.params, target_config(ARCH))
        rounded = {
            name: np.asarray(array).astype(ml_dtypes.bfloat16) for name, array in weights.by_name(target.params).items()
        }
        assert_equal_params(load_target(tmp_path / "target", mesh, jnp.float32).params, rounded)


class TestMismatches:
    def test_missing_tensor(self, tmp_path, tensors):
        del tensors["model.layers.2.mlp.up_proj.weight"]
        message = refusal(save_tiny_target(tmp_path / "target", ARCH, tensors))
        assert message.endswith("target: 1 tensors are missing: model.layers.2.mlp.up_proj.weight")

    def test_untied_target_needs_its_projection(self, tmp_path, tensors):
        del tensors["lm_head.weight"]
        assert "missing: lm_head.weight" in refusal(save_tiny_target(tmp_path / "target", ARCH, tensors))

    def test_surplus_tensor(self, tmp_path, tensors):
        tensors["model.layers.4.mlp.up_proj.weight"] = np.ones((48, 32), np.float32)
        message = refusal(save_tiny_target(tmp_path / "target", ARCH, tensors))
        assert "1 tensors have no place in this model: model.layers.4.mlp.up_proj.weight" in message

    def test_bias_that_the_config_does_not_announce(self, tmp_path, tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(32, np.float32)
        message = refusal(save_tiny_target(tmp_path / "target", ARCH, tensors))
        assert "have no place in this model: model.layers.0.self_attn.q_proj.bias" in message

    @pytest.mark.parametrize("mesh_shape", MESH_SHAPES)
    def test_misshapen_tensor(self, tmp_path, tensors, mesh_shape):
        name = "model.layers.1.mlp.down_proj.weight"
        tensors[name] = np.ascontiguousarray(tensors[name].T)
        message = refusal(save_tiny_target(tmp_path / "target", ARCH, tensors), mesh_shape)
        assert f"{name} has shape [48, 32], its config.json implies [32, 48]" in message

    def test_many_mismatches_are_counted_and_some_are_named(self, tmp_path, tensors):
        message = refusal(save_tiny_target(tmp_path / "target", tiny_target(num_layers=5), tensors))
        assert "11 tensors are missing: model.layers.4.input_layernorm.weight, " in message
        assert message.endswith(" and 7 more")


class TestDamagedFolders:
    def test_empty_folder(self, tmp_path):
        message = refusal(tmp_path)
        assert message == f"{tmp_path} is not a checkpoint folder: it holds no readable config.json"

    def test_no_weights(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(target_config(ARCH)))
        assert "holds no model.safetensors and no index" in refusal(tmp_path)

    @pytest.mark.parametrize(("text", "expected"), [("{", "is not JSON"), ("[1]", "holds no JSON object")])
    def test_broken_config(self, tmp_path, text, expected):
        (tmp_path / "config.json").write_text(text)
        assert f"{tmp_path / 'config.json'} {expected}" in refusal(tmp_path)

    @pytest.mark.parametrize("bytes_left", [0, 4, 100, -1], ids=["empty", "length", "header", "data"])
    def test_file_cut_short(self, tmp_path, tensors, bytes_left):
        path = save_tiny_target(tmp_path / "target", ARCH, tensors) / "model.safetensors"
        path.write_bytes(path.read_bytes()[:bytes_left])
        assert f"{path} is not a readable safetensors file" in refusal(path.parent)

    def test_file_of_something_else(self, tmp_path):
        path = save_tiny_target(tmp_path / "target", ARCH) / "model.safetensors"
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n" * 4)
        assert f"{path} is not a readable safetensors file" in refusal(path.parent)

    def test_missing_shard(self, tmp_path, tensors):
        folder = save_sharded(tmp_path / "target", ARCH, tensors)
        (folder / "model-00002-of-00002.safetensors").unlink()
        message = refusal(folder)
        assert "model-00002-of-00002.safetensors is missing though the index names it" in message

    def test_shard_cut_short(self, tmp_path, tensors):
        path = save_sharded(tmp_path / "target", ARCH, tensors) / "model-00002-of-00002.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        assert f"{path} is not a readable safetensors file" in refusal(path.parent)

    def test_index_that_names_the_wrong_shard(self, tmp_path, tensors):
        index = save_sharded(tmp_path / "target", ARCH, tensors) / "model.safetensors.index.json"
        table = json.loads(index.read_text())
        first, second = sorted(set(table["weight_map"].values()))
        table["weight_map"]["lm_head.weight"] = second if table["weight_map"]["lm_head.weight"] == first else first
        index.write_text(json.dumps(table))
        message = refusal(index.parent)
        assert str(index.parent) in message
        assert "lm_head.weight" in message

    def test_index_without_table(self, tmp_path):
        folder = save_tiny_target(tmp_path / "target", ARCH)
        (folder / "model.safetensors.index.json").write_text("{}")
        assert "weight_map is missing" in refusal(folder)


class TestResolveFolder:
    def test_folder(self, tmp_path):
        assert resolve_folder(str(tmp_path)) == tmp_path

    def test_nothing_there(self, tmp_path):
        with pytest.raises(UserError, match=r"absent: no such folder; give a checkpoint folder or a hub id"):
            resolve_folder(str(tmp_path / "absent"))

    @pytest.mark.parametrize("name", ["absent", "./absent", "a/b/c", "embedded:absent"])
    def test_names_that_are_no_hub_ids_never_reach_the_hub(self, name):
        with pytest.raises(UserError, match="no such folder"):
            resolve_folder(name)

    def test_a_file_is_no_folder(self, tmp_path):
        path = tmp_path / "model.safetensors"
        path.touch()
        with pytest.raises(UserError, match="is a file; give the checkpoint folder"):
            resolve_folder(str(path))


class TestStopIds:
    def test_config_alone(self, tmp_path):
        (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
        assert read_stop_ids(tmp_path) == (2,)

    def test_generation_config_counts_first(self, tmp_path):
        (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
        assert read_stop_ids(tmp_path) == (5, 6)

    def test_a_generation_config_without_them_does_not_hide_the_config(self, tmp_path):
        (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
        (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
        assert read_stop_ids(tmp_path) == (0,)

    def test_none(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        assert read_stop_ids(tmp_path) == ()


class TestDrafterFolder:
    def test_the_published_keys_and_nothing_else(self, tmp_path):
        """Eleven tensors a layer and three; no embedding, no head. Two layers, H = 4 x 8, kv = 2 x 8, two taps."""
        tensors = load_file(save_tiny_drafter(tmp_path / "drafter", ARCH) / "model.safetensors")
        layer = {
            "input_layernorm.weight": (32,),
            "self_attn.q_proj.weight": (32, 32),
            "self_attn.k_proj.weight": (16, 32),
            "self_attn.v_proj.weight": (16, 32),
            "self_attn.o_proj.weight": (32, 32),
            "self_attn.q_norm.weight": (8,),
            "self_attn.k_norm.weight": (8,),
            "post_attention_layernorm.weight": (32,),
            "mlp.gate_proj.weight": (48, 32),
            "mlp.up_proj.weight": (48, 32),
            "mlp.down_proj.weight": (32, 48),
        }
        expected = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)}
        expected |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
        assert {name: array.shape for name, array in tensors.items()} == expected
        assert {str(array.dtype) for array in tensors.values()} == {"bfloat16"}

    def test_the_file_says_that_it_is_laid_out_as_pytorch_does(self, tmp_path):
        with safe_open(save_tiny_drafter(tmp_path / "drafter") / "model.safetensors", framework="numpy") as file:
            assert file.metadata() == {"format": "pt"}

    @pytest.mark.parametrize("mesh_shape", MESH_SHAPES)
    def test_what_was_saved_loads_rounded_to_bfloat16(self, tmp_path, mesh_shape):
        drafter = make_drafter(tiny_drafter(ARCH), mesh_shape=mesh_shape)
        save_drafter(tmp_path / "drafter", drafter)
        loaded = load_drafter(tmp_path / "drafter", mesh_of(mesh_shape))
        assert loaded.arch == drafter.arch
        assert {array.dtype for array in jax.tree.leaves(loaded.params)} == {jnp.dtype(jnp.float32)}
        rounded = {
            name: np.asarray(array).astype(ml_dtypes.bfloat16)
            for name, array in weights.by_name(drafter.params).items()
        }
        assert_equal_params(loaded.params, rounded)

    def test_saving_what_was_loaded_changes_no_byte(self, tmp_path):
        first = save_tiny_drafter(tmp_path / "first")
        save_drafter(tmp_path / "second", load_drafter(first, mesh_of((2, 2, 2))))
        for name in ("model.safetensors", "config.json"):
            assert (tmp_path / "second" / name).read_bytes() == (first / name).read_bytes()

    def test_the_config_carries_the_whole_architecture(self, tmp_path):
        changes = dict(
            layer_types=(SLIDING, FULL),
            sliding_window=16,
            final_logit_softcapping=30.0,
            rope=Rope(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        )
        folder = save_tiny_drafter(tmp_path / "drafter", ARCH, **changes)
        assert parse_drafter(json.loads((folder / "config.json").read_text()), "here") == tiny_drafter(ARCH, **changes)

    def test_an_embedding_in_the_folder_is_passed_over(self, tmp_path):
        path = save_tiny_drafter(tmp_path / "drafter", ARCH) / "model.safetensors"
        tensors = load_file(path)
        save_file(tensors | {"embed_tokens.weight": np.ones((64, 32), np.float32)}, path)
        assert_equal_params(load_drafter(path.parent, mesh_of((1, 1, 1))).params, tensors)

    def test_a_target_is_no_drafter(self, tmp_path):
        with pytest.raises(UserError, match=r"this is not the config\.json of a DFlash drafter"):
            load_drafter(save_tiny_target(tmp_path / "target", ARCH), mesh_of((1, 1, 1)))
