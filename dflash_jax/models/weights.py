"""One description a weight, and everything that is read off it.

A module declares each weight once with `weight(...)`: shape, logical axes, initialiser. The modules hold no arrays.
`split` turns a module into a static graph and a nested dict of `WeightSpec`; abstract tree, shardings, initial values,
published names and parameter count all come from that dict. Real parameters are a nested dict of the same structure;
`nnx.merge(graph, params)` inside a jitted function gives the module back.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from dflash_jax.parallel import sharding_of

Params = dict[str, Any]
"""Nested dict of arrays; the path of a leaf, joined by dots, is its published name."""

Initialiser = Callable[[jax.Array, tuple[int, ...], jax.typing.DTypeLike], jax.Array]

normal: Initialiser = nnx.initializers.normal(stddev=0.02)
ones: Initialiser = nnx.initializers.ones
zeros: Initialiser = nnx.initializers.zeros


@dataclass(frozen=True)
class WeightSpec:
    """What is known about a weight before it exists."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Initialiser


def weight(shape: tuple[int, ...], axes: tuple[str | None, ...], init: Initialiser = normal) -> nnx.Param:
    """Declare a weight in a module. Matrices are `[out, in]`, as published checkpoints store them."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} differ in rank")
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=axes, init=init)


def split(module: nnx.Module) -> tuple[nnx.GraphDef, Params]:
    """Static graph and the nested dict of `WeightSpec` of a module."""
    graph, state = nnx.split(module)
    specs: Params = {}
    for path, param in nnx.to_flat_state(state):
        node = specs
        for part in path[:-1]:
            node = node.setdefault(part, {})
        shape = param.get_value().shape
        meta = param.get_metadata()
        node[path[-1]] = WeightSpec(".".join(map(str, path)), shape, meta["axes"], meta["init"])
    return graph, specs


def by_name(tree: Params) -> dict[str, Any]:
    """Leaves of a parameter-shaped tree under their published names."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def shardings(specs: Params, mesh: Mesh) -> Params:
    """`NamedSharding` of each weight."""
    return jax.tree.map(lambda spec: _sharding(spec, mesh), specs)


def abstract(specs: Params, mesh: Mesh, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """`ShapeDtypeStruct` of each weight, with its sharding."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=_sharding(spec, mesh)), specs)


def initialise(specs: Params, key: jax.Array, mesh: Mesh, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Initial values, made in their shards; the same on any mesh."""
    leaves, structure = jax.tree.flatten(specs)

    def build(key: jax.Array) -> Params:
        keys = jax.random.split(key, len(leaves))
        return structure.unflatten([spec.init(k, spec.shape, dtype) for spec, k in zip(leaves, keys, strict=True)])

    return jax.jit(build, out_shardings=shardings(specs, mesh))(key)


def count(specs: Params) -> int:
    """Number of parameters."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs))


def _sharding(spec: WeightSpec, mesh: Mesh) -> NamedSharding:
    return sharding_of(mesh, *spec.axes)
