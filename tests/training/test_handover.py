"""Features between meshes of any sizes: the same rows arrive, and the host never reads them."""

import jax
import numpy as np
import pytest

from dflash_jax.parallel import Meshes, mesh_of, sharding_of
from dflash_jax.training.handover import Handover

PAIRS = [(6, 2), (4, 4), (2, 6), (7, 1), (4, 3), (3, 4), (1, 7)]


def handover_of(target, drafter, fsdp=1, tensor=1):
    inner = fsdp * tensor
    return Handover(
        Meshes(mesh_of((target // inner, fsdp, tensor)), mesh_of((drafter // inner, fsdp, tensor), skip=target))
    )


def pass_over(handover, rows):
    """Through all three parts, as the pipeline does."""
    meshes = handover.meshes
    from_target, to_drafter = (sharding_of(mesh, "batch", None, None) for mesh in (meshes.target, meshes.drafter))
    cut = jax.jit(handover.cut, out_shardings=(from_target,) * handover.units_sent)
    moved = handover.move(cut(jax.device_put(rows, from_target)))
    assert all(part.sharding == to_drafter for part in moved)
    if not handover.assembles:
        (whole,) = moved
        return whole
    return jax.jit(handover.join, out_shardings=to_drafter)(moved)


@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_the_same_rows_arrive(target, drafter, monkeypatch):
    handover = handover_of(target, drafter)
    rows = np.random.default_rng(0).standard_normal((handover.meshes.shards * 2, 5, 3)).astype(np.float32)

    def read(array):
        raise AssertionError("the host reads an array")

    with monkeypatch.context() as patch:
        # What `device_put` falls back to, and waits for, where the two meshes cut the rows differently.
        patch.setattr(type(jax.numpy.zeros(1)), "_value", property(read))
        arrived = pass_over(handover, rows)
    np.testing.assert_array_equal(arrived, rows)
    assert {shard.device for shard in arrived.addressable_shards} == set(handover.meshes.drafter.devices.flat)


def test_replicas_along_tensor():
    handover = handover_of(4, 4, fsdp=1, tensor=2)
    rows = np.arange(4 * 5 * 3, dtype=np.float32).reshape(4, 5, 3)
    np.testing.assert_array_equal(pass_over(handover, rows), rows)
    uneven = handover_of(6, 2, fsdp=1, tensor=2)
    rows = np.arange(6 * 5 * 3, dtype=np.float32).reshape(6, 5, 3)
    np.testing.assert_array_equal(pass_over(uneven, rows), rows)


def test_on_one_mesh_nothing_moves():
    mesh = mesh_of((8, 1, 1))
    handover = Handover(Meshes(mesh, mesh))
    array = jax.device_put(np.zeros((8, 2, 2), np.float32), sharding_of(mesh, "batch", None, None))
    assert handover.cut(array) == (array,)
    assert handover.move((array,))[0] is array
    assert not handover.assembles


def test_cutting_and_joining_communicate_nothing():
    """No collective in either executable: each device cuts its own rows and joins what it got."""
    handover = handover_of(4, 3)
    meshes = handover.meshes
    from_target, to_drafter = (sharding_of(mesh, "batch", None, None) for mesh in (meshes.target, meshes.drafter))
    whole = jax.ShapeDtypeStruct((24, 4, 2), np.float32, sharding=from_target)
    part = jax.ShapeDtypeStruct((24 // handover.units_received, 4, 2), np.float32, sharding=to_drafter)
    cut = jax.jit(handover.cut, out_shardings=(from_target,) * handover.units_sent)
    join = jax.jit(handover.join, out_shardings=to_drafter)
    for text in (
        cut.lower(whole).compile().as_text(),
        join.lower((part,) * handover.units_received).compile().as_text(),
    ):
        for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
            assert collective not in text
