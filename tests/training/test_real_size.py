"""Qwen3-8B with its drafter at real size, compiled for an eight-device mesh from shapes alone."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from dflash_jax.config import decay_gamma, load_config
from dflash_jax.data.buckets import Bucket, make_buckets
from dflash_jax.models import weights
from dflash_jax.models.architecture import Rope, TargetArchitecture, check_mesh, resolve_drafter
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.target import Target
from dflash_jax.parallel import MESH_AXES, Meshes, bytes_per_device, compiler_options, mesh_of
from dflash_jax.training.compiled import compile_step
from dflash_jax.training.flops import step_flops
from dflash_jax.training.optimizer import make_optimizer, make_schedule
from dflash_jax.training.state import DraftSettings, StepSettings, Tables
from dflash_jax.training.step import abstract_features, abstract_state, block_loss, make_step
from tests.helpers import MEASURED, abstract_blocks

QWEN3_8B = TargetArchitecture(
    family="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope=Rope(1e6),
    qk_norm=True,
    qkv_bias=False,
    output_bias=False,
    tie_word_embeddings=False,
    max_position_embeddings=40960,
)
GIB = 2**30


@pytest.fixture(scope="module")
def recipe():
    return load_config(Path(__file__).parents[2] / "configs" / "qwen3_8b.yaml")


def test_one_sequence_fits(recipe, record_property):
    """Loss and gradient of one sequence on one device in float32, without the parameters' gradient: under 4 GiB."""
    drafter = resolve_drafter(recipe.drafter, QWEN3_8B)
    seq, anchors, block = recipe.data.max_length, recipe.training.anchors, drafter.block_size
    graph, specs = weights.split(Drafter(drafter))
    mesh = mesh_of((1, 1, 1))

    def compiled_with(remat):
        settings = DraftSettings(drafter=drafter, gamma=7.0, compute_dtype="float32", remat=remat)

        def loss(params, tables, taps, blocks, lengths):
            return block_loss(params, graph, tables, taps, blocks, lengths, settings)[0]

        def array(*shape, dtype="float32"):
            return jax.ShapeDtypeStruct(shape, dtype)

        table = array(QWEN3_8B.vocab_size, QWEN3_8B.hidden_size)
        blocks = abstract_blocks(anchors, block)
        taps = tuple(array(1, seq, QWEN3_8B.hidden_size) for _ in drafter.target_layer_ids)
        params = weights.abstract(specs, mesh)
        lowered = jax.jit(jax.value_and_grad(loss)).lower(
            params, Tables(table, table), taps, blocks, array(1, dtype="int32")
        )
        return lowered.compile(compiler_options(mesh))

    compiled, kept = compiled_with(recipe.training.remat), compiled_with("none")
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    rows = anchors * block
    logits = 4 * anchors * (block - 1) * QWEN3_8B.vocab_size
    scores = 4 * drafter.num_heads * rows * (seq + rows)
    # Anchors anywhere: a block sees half the sequence.
    flops = step_flops(drafter, QWEN3_8B.vocab_size, seq, anchors, anchors * seq // 2, anchors * (block - 1))
    more = flops.recomputed / flops.total
    record_property(
        MEASURED,
        f"Qwen3-8B's drafter, one sequence of {seq} tokens, {anchors} blocks, float32: temporaries "
        f"{temporaries / GIB:.2f} GiB with remat {recipe.training.remat} ({100 * more:.0f} % more operations), "
        f"{kept.memory_analysis().temp_size_in_bytes / GIB:.2f} GiB with none; full logits would take "
        f"{logits / GIB:.2f} GiB and as much for their gradient, dense scores {scores / GIB:.2f} GiB a layer "
        "and as much for their softmax",
    )
    assert temporaries < 4 * GIB
    assert 2 * (logits + scores) > 20 * GIB


def test_qwen3_8b_compiles(recipe, record_property):
    """Paper settings on the recipe's mesh; prints what a device has to hold."""
    devices = recipe.devices
    mesh = mesh_of((8 // (devices.fsdp * devices.tensor), devices.fsdp, devices.tensor))
    target, state, _, _ = compile_on(mesh, recipe, record_property, "simulated devices")
    # Weights and state are spread, not copied: an eighth of 16.4 GB and of 4 x 4.2 GB, and a little.
    assert target < 1.05 * 16.4e9 / 8
    assert state < 1.05 * 4 * 4 * 1_048_626_432 / 8


@pytest.mark.long
@pytest.mark.parametrize("attention", ["blocked", "kernel"])
@pytest.mark.parametrize(("topology", "memory"), [("v5p:2x2x2", 95), ("v6e:2x4", 32)])
def test_qwen3_8b_compiles_for_a_tpu(recipe, topology, memory, attention, record_property):
    """By the TPU's own compiler, which needs no TPU: `pip install libtpu`. It refuses what does not fit into a chip."""
    pytest.importorskip("libtpu")
    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    mesh = Mesh(devices.reshape(1, 8, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    training = recipe.training.model_copy(update={"attention": attention})
    recipe = recipe.model_copy(update={"training": training})
    target, state, features, temporaries = compile_on(
        mesh, recipe, record_property, f"{topology}, {attention} attention"
    )
    assert target + state + features + temporaries < memory * GIB


def compile_on(mesh, recipe, record_property, where):
    """Every function of the recipe, from shapes alone.

    Returns the bytes on a device: target, state, features of as many batches as the pool holds, largest temporaries.
    """
    drafter = resolve_drafter(recipe.drafter, QWEN3_8B)
    check_mesh(QWEN3_8B, drafter, mesh.shape)
    schedule = make_schedule(recipe.optimizer, 1000)
    optimizer = make_optimizer(recipe.optimizer, schedule)
    gamma = decay_gamma(recipe.training, drafter.block_size)
    assert (drafter.block_size, drafter.num_layers, recipe.training.anchors, gamma) == (16, 5, 512, 7.0)
    longest = recipe.data.max_length
    assert longest == 3072
    buckets = make_buckets((longest,), recipe.training.batch_size, recipe.training.tokens_per_batch, 8)
    assert buckets == (Bucket(3072, 8),)
    settings = StepSettings(
        drafter=drafter,
        target=QWEN3_8B,
        target_attention=recipe.target.attention,
        optimizer=optimizer,
        schedule=schedule,
        anchors=recipe.training.anchors,
        gamma=gamma,
        compute_dtype="bfloat16",
        attention=recipe.training.attention,
        remat=recipe.training.remat,
        edges=(3072,),
        tree_blocks=recipe.metrics.blocks,
    )
    step = make_step(settings, Meshes(mesh, mesh))
    assert weights.count(step.specs) == 1_048_626_432
    compiled = compile_step(step, settings, buckets)

    _, specs = weights.split(Target(QWEN3_8B))
    target = bytes_per_device(weights.abstract(specs, mesh, "bfloat16"))
    state = bytes_per_device(abstract_state(step, settings))
    sizes = f"target {target / GIB:.2f} GiB, state {state / GIB:.2f} GiB"
    record_property(MEASURED, f"Qwen3-8B on {dict(mesh.shape)} of {where}, a device: {sizes}")
    for item in compiled.all():
        temporaries = f"temporaries {item.temporary_bytes / GIB:.2f} GiB"
        record_property(MEASURED, f"  {item.name}: {temporaries}, compiled in {item.seconds:.0f} s")
    features = recipe.pipeline.pool_size * bytes_per_device(abstract_features(step, settings, buckets[0]))
    return target, state, features, max(item.temporary_bytes for item in compiled.all())
