"""Implementations of the drafter's attention, checked and timed on the device at hand."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.models.block_attention import context_and_block_attention
from dflash_jax.training.step_benchmark import PRESETS

OPERANDS = ("out", "q", "context_k", "context_v", "block_k", "block_v")


def kernel_benchmark(
    preset: str,
    implementations: Sequence[str],
    dtype: jax.typing.DTypeLike,
    rounds: int,
    window: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """One layer's attention of a preset, in turn.

    Returns:
        By implementation: `forward_seconds` and `gradient_seconds` (forward and backward), medians over rounds;
        `errors`, of the output and of each operand's gradient: the largest difference from the plain formula in
        float32, relative to that array's largest magnitude; or `failure`, what the compiler or the device said.
    """
    operands, anchors, direction = _draw(preset)
    with jax.default_matmul_precision("highest"):
        rounded = tuple(x.astype(dtype).astype(jnp.float32) for x in operands)
        expected = _gradient("reference", anchors, window)(direction, *rounded)
        given = tuple(x.astype(dtype) for x in operands)
        results: dict[str, dict[str, Any]] = {}
        timed: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
        for name in implementations:
            forward = partial(jax.jit(partial(_attend, name, window)), anchors, *given)
            gradient = partial(_gradient(name, anchors, window), direction.astype(dtype), *given)
            try:
                found = jax.block_until_ready(gradient())
                jax.block_until_ready(forward())
            except Exception as error:  # whatever a backend says of a kernel that it cannot take is the result
                results[name] = {"failure": str(error).splitlines()[0]}
                say(f"{name}: {results[name]['failure']}")
                continue
            results[name] = {"errors": dict(zip(OPERANDS, map(_error, found, expected), strict=True))}
            timed[name] = forward, gradient
            say(f"{name}: largest error {max(results[name]['errors'].values()):.2e}")
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in timed}
        for _ in range(rounds):
            for name, (forward, gradient) in timed.items():
                seconds[name].append((_seconds(forward), _seconds(gradient)))
    for name, found in seconds.items():
        forward, gradient = zip(*found, strict=True)
        results[name] |= {
            "forward_seconds": round(median(forward), 6),
            "gradient_seconds": round(median(gradient), 6),
        }
    return results


def _draw(name: str) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """Operands, ascending anchors, and a direction for the gradient."""
    preset, rng = PRESETS[name], np.random.default_rng(0)
    rows = (1, preset.anchors, preset.block)
    keys, block_keys = (1, preset.seq, preset.kv_heads), (*rows, preset.kv_heads)
    shapes = [(*rows, preset.heads), keys, keys, block_keys, block_keys, (*rows, preset.heads)]
    *operands, direction = (jnp.asarray(rng.standard_normal((*shape, preset.head_dim), np.float32)) for shape in shapes)
    anchors = np.sort(rng.choice(preset.seq - preset.block, preset.anchors, replace=False))
    return tuple(operands), jnp.asarray(anchors[None], jnp.int32), direction


def _attend(name: str, window: int | None, anchors: jax.Array, *operands: jax.Array) -> jax.Array:
    return context_and_block_attention(*operands, anchors, window=window, implementation=name)


def _gradient(name: str, anchors: jax.Array, window: int | None) -> Callable[..., tuple[jax.Array, ...]]:
    """`(direction, *operands)` -> output, and the gradient of its product with `direction` by each operand."""

    @jax.jit
    def both(direction: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(partial(_attend, name, window, anchors), *operands)
        return (out, *pull(direction.astype(out.dtype)))

    return both


def _error(found: jax.Array, expected: jax.Array) -> float:
    difference = jnp.abs(found.astype(jnp.float32) - expected).max()
    return float(difference / jnp.maximum(jnp.abs(expected).max(), 1e-30))


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start
