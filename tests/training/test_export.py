"""Exported folders: complete, exact, refused when they differ; drafters opened from wherever they lie."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.errors import UserError
from dflash_jax.models import huggingface, weights
from dflash_jax.models.architecture import FULL, SLIDING, Llama3Scaling, Rope
from dflash_jax.parallel import mesh_of
from dflash_jax.training import export
from dflash_jax.training.export import export_drafter, open_drafter, serving_warnings
from tests.helpers import make_drafter, tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def drafter():
    return make_drafter(tiny_drafter(tiny_target()))


@pytest.fixture(scope="module")
def mesh():
    return mesh_of((1, 1, 1))


def test_round_trip(drafter, mesh, tmp_path):
    """The weights rounded to bfloat16, under the published names; both places of every DFlash key."""
    rounding = export_drafter(drafter, tmp_path / "out", mesh)
    assert 0 < rounding < 0.1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for place in (config, config["dflash_config"]):
        assert (place["block_size"], place["mask_token_id"], place["target_layer_ids"]) == (4, 63, [0, 2])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == weights.by_name(drafter.params).keys()
    opened, position = open_drafter(tmp_path / "out", mesh)
    assert (opened.arch, position) == (drafter.arch, None)
    for name, array in weights.by_name(opened.params).items():
        exact = np.asarray(weights.by_name(drafter.params)[name])
        np.testing.assert_array_equal(array, exact.astype(tensors[name].dtype).astype(np.float32))


def test_sharded_weights_give_the_same_folder(drafter, mesh, tmp_path):
    export_drafter(drafter, tmp_path / "one", mesh)
    spread = make_drafter(drafter.arch, mesh_shape=(2, 2, 2))
    export_drafter(spread, tmp_path / "eight", mesh_of((2, 2, 2)))
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "eight" / name).read_bytes()


@pytest.mark.parametrize("damage", ["a weight", "the config"])
def test_a_folder_that_differs_is_not_left(damage, drafter, mesh, tmp_path, monkeypatch):
    """Writing goes wrong in one weight, or in one key: nothing is left behind under either name."""

    def save_wrongly(folder, saved):
        huggingface.save_drafter(folder, saved)
        if damage == "a weight":
            tensors = load_file(folder / "model.safetensors")
            tensors["layers.1.mlp.up_proj.weight"] = tensors["layers.1.mlp.up_proj.weight"] * 2
            save_file(tensors, folder / "model.safetensors")
        else:
            config = json.loads((folder / "config.json").read_text())
            config["rms_norm_eps"] = 0.1
            (folder / "config.json").write_text(json.dumps(config))

    monkeypatch.setattr(export, "save_drafter", save_wrongly)
    with pytest.raises(RuntimeError, match=r"differ|another drafter"):
        export_drafter(drafter, tmp_path / "out", mesh)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_gives_way_only_when_asked(drafter, mesh, tmp_path):
    export_drafter(drafter, tmp_path / "out", mesh)
    with pytest.raises(UserError, match="already exists"):
        export_drafter(drafter, tmp_path / "out", mesh)
    other = make_drafter(drafter.arch, seed=5)
    export_drafter(other, tmp_path / "out", mesh, replace=True)
    opened, _ = open_drafter(tmp_path / "out", mesh)
    first = jax.tree.leaves(opened.params)[0]
    np.testing.assert_allclose(first, jax.tree.leaves(other.params)[0], rtol=1e-2)


def test_what_is_no_drafter(mesh, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        open_drafter(tmp_path / "absent", mesh)
    with pytest.raises(UserError, match="is no drafter: give a run folder"):
        open_drafter(tmp_path, mesh)
    (tmp_path / "checkpoints" / "7" / "position").mkdir(parents=True)
    with pytest.raises(UserError, match="no complete checkpoint"):
        open_drafter(tmp_path, mesh)


def test_serving_warnings():
    target = tiny_target()
    assert serving_warnings(tiny_drafter(target)) == []
    scaled = Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    odd = tiny_drafter(target, target_layer_ids=(0, 3), rope=scaled, layer_types=(SLIDING, FULL), sliding_window=8)
    warnings = serving_warnings(odd)
    assert [word in text for word, text in zip(("last layer", "rope_scaling", "sliding_window"), warnings, strict=True)]
    assert len(warnings) == 3
