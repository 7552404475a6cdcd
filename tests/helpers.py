"""What several tests share: tiny models, parameters from plain arrays, random batches."""

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.models import weights
from dflash_jax.models.architecture import FULL, DrafterArchitecture, Rope, TargetArchitecture
from dflash_jax.models.drafter import Drafter, TrainedDrafter
from dflash_jax.models.target import FrozenTarget, Target
from dflash_jax.parallel import Meshes, mesh_of
from dflash_jax.training.anchors import Blocks
from dflash_jax.training.state import Features

MEASURED = "measured"
"""Property of a test: a line to show at the end."""

MESHES = [(1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 4, 2)]


def tiny_target(**changes):
    sizes = dict(
        family="qwen3",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope=Rope(10000.0),
        qk_norm=True,
        qkv_bias=False,
        output_bias=False,
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    return TargetArchitecture(**(sizes | changes))


def tiny_drafter(target, **changes):
    layers = changes.get("num_layers", 2)
    sizes = dict(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        block_size=4,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=(0, 2),
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=target.tie_word_embeddings,
        layer_types=(FULL,) * layers,
    )
    return DrafterArchitecture(**(sizes | changes))


def place(specs, mesh, arrays):
    """Parameters from a dict of arrays by published name."""
    return jax.tree.map(
        lambda spec, sharding: jax.device_put(jnp.asarray(arrays[spec.name], jnp.float32), sharding),
        specs,
        weights.shardings(specs, mesh),
    )


def random_params(specs, mesh, seed, scale=0.3):
    """Large random weights, so that no path through the model is negligible; norms around one."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, spec in sorted(weights.by_name(specs).items()):
        noise = rng.standard_normal(spec.shape).astype(np.float32)
        arrays[name] = 1 + 0.2 * noise if "norm" in name else scale * noise
    return place(specs, mesh, arrays)


def make_target(arch, seed=0, mesh_shape=(1, 1, 1), stop_ids=()):
    mesh = mesh_of(mesh_shape)
    graph, specs = weights.split(Target(arch))
    return FrozenTarget(arch, graph, random_params(specs, mesh, seed), stop_ids), mesh


def make_drafter(arch, seed=1, mesh_shape=(1, 1, 1)):
    graph, specs = weights.split(Drafter(arch))
    return TrainedDrafter(arch, graph, random_params(specs, mesh_of(mesh_shape), seed))


def colocated(mesh_shape):
    """Both models on one mesh."""
    mesh = mesh_of(mesh_shape)
    return Meshes(mesh, mesh)


def features_of(step, target_params, batch):
    """Features of a batch where both models share a mesh; `step` jitted or compiled."""
    units, _ = step.features(target_params, batch)
    return Features(batch, tuple(tap for (tap,) in units))


def abstract_blocks(count, block_size):
    """Shapes of the blocks of one sequence."""
    anchors, offsets = (1, count), (1, count, block_size - 1)
    return Blocks(
        anchors=jax.ShapeDtypeStruct(anchors, "int32"),
        keep=jax.ShapeDtypeStruct(anchors, "bool"),
        tokens=jax.ShapeDtypeStruct(anchors, "int32"),
        labels=jax.ShapeDtypeStruct(offsets, "int32"),
        valid=jax.ShapeDtypeStruct(offsets, "bool"),
    )


def relative_error(actual, expected):
    """Largest difference over the array's largest magnitude."""
    return np.abs(actual - expected).max() / np.abs(expected).max()
