"""Meshes, the axis table, and the refusals."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from dflash_jax.errors import UserError
from dflash_jax.parallel import (
    batch_shards,
    constrain,
    make_mesh,
    mesh_of,
    on_mesh,
    sharding_of,
    simulate_devices,
    spec_of,
)
from dflash_jax.sections import DevicesSection


def test_axes_are_always_there():
    mesh = make_mesh(DevicesSection(fsdp=2))
    assert dict(mesh.shape) == {"data": 4, "fsdp": 2, "tensor": 1}
    assert batch_shards(mesh) == 8
    assert dict(mesh_of((1, 1, 1)).shape) == {"data": 1, "fsdp": 1, "tensor": 1}


def test_axis_collision_raises():
    assert spec_of(("heads", "embed")) == PartitionSpec("tensor", "fsdp")
    with pytest.raises(ValueError, match="twice on one mesh axis"):
        spec_of(("heads", "mlp"))
    with pytest.raises(ValueError, match="twice on one mesh axis"):
        spec_of(("batch", "embed"))


def test_refusals():
    with pytest.raises(UserError, match="asks for 16 devices, 8 are here"):
        make_mesh(DevicesSection(data=16))
    with pytest.raises(UserError, match="does not divide the 8 devices"):
        make_mesh(DevicesSection(fsdp=3))
    with pytest.raises(UserError, match="already runs with 8 devices"):
        simulate_devices(4)


def test_constrain_needs_no_mesh_and_uses_the_ambient_one():
    x = jnp.ones((8, 4))
    assert constrain(x, "batch", None) is x
    mesh = mesh_of((2, 2, 2))
    x = jax.device_put(x, sharding_of(mesh, None, None))
    y = jax.jit(on_mesh(mesh, lambda x: constrain(x * 2, "batch", None)))(x)
    assert y.sharding.is_equivalent_to(sharding_of(mesh, "batch", None), y.ndim)
