"""Implementations of both models' attention, checked and timed on the device at hand."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.models.block_attention import context_and_block_attention
from dflash_jax.models.target_attention import self_attention
from dflash_jax.training.step_benchmark import PRESETS, Preset


@dataclass(frozen=True)
class Layer:
    """One layer's attention on drawn operands."""

    attend: Callable[..., jax.Array]
    """`(*operands, implementation=..)`."""
    operands: dict[str, jax.Array]
    direction: jax.Array | None
    """The gradient is that of the output's product with it; none: the model is frozen."""

    def run(self, implementation: str, dtype: jax.typing.DTypeLike) -> dict[str, Callable[[], tuple[jax.Array, ...]]]:
        """What is timed, by name; the last one returns all that is checked."""
        attend = partial(self.attend, implementation=implementation)
        operands = [x.astype(dtype) for x in self.operands.values()]
        forward = jax.jit(lambda *operands: (attend(*operands),))
        if self.direction is None:
            return {"forward_seconds": partial(forward, *operands)}

        @jax.jit
        def gradient(direction: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
            out, pull = jax.vjp(attend, *operands)
            return (out, *pull(direction.astype(out.dtype)))

        direction = self.direction.astype(dtype)
        return {
            "forward_seconds": partial(forward, *operands),
            "gradient_seconds": partial(gradient, direction, *operands),
        }

    def rounded(self, dtype: jax.typing.DTypeLike) -> "Layer":
        """With the operands that `dtype` makes of these, in float32."""
        operands = {name: x.astype(dtype).astype(jnp.float32) for name, x in self.operands.items()}
        return Layer(self.attend, operands, self.direction)


def kernel_benchmark(
    model: Literal["drafter", "target"],
    preset: str,
    implementations: Sequence[str],
    dtype: jax.typing.DTypeLike,
    rounds: int,
    window: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """One layer's attention of a preset, in turn.

    Returns:
        By implementation: `forward_seconds`, and for the drafter `gradient_seconds` (forward and backward), medians
        over rounds; `errors`, of the output and of each operand's gradient: the largest difference from the plain
        formula in float32, relative to that array's largest magnitude; or `failure`, what the compiler or the device
        said.
    """
    layer = {"drafter": _drafter, "target": _target}[model](PRESETS[preset], window)
    names = ("out", *(layer.operands if layer.direction is not None else ()))
    results: dict[str, dict[str, Any]] = {}
    timed: dict[str, dict[str, Callable[[], Any]]] = {}
    with jax.default_matmul_precision("highest"):
        *_, reference = layer.rounded(dtype).run("reference", jnp.float32).values()
        expected = reference()
        for name in implementations:
            functions = layer.run(name, dtype)
            try:
                *_, found = [jax.block_until_ready(function()) for function in functions.values()]
            except Exception as error:  # whatever a backend says of a kernel that it cannot take is the result
                results[name] = {"failure": str(error).splitlines()[0]}
                say(f"{name}: {results[name]['failure']}")
                continue
            results[name] = {"errors": dict(zip(names, map(_error, found, expected), strict=True))}
            timed[name] = functions
            say(f"{name}: largest error {max(results[name]['errors'].values()):.2e}")
        seconds: dict[str, dict[str, list[float]]] = {name: {key: [] for key in timed[name]} for name in timed}
        for _ in range(rounds):
            for name, functions in timed.items():
                for key, function in functions.items():
                    seconds[name][key].append(_seconds(function))
    for name, found in seconds.items():
        results[name] |= {key: round(median(values), 6) for key, values in found.items()}
    return results


def _drafter(preset: Preset, window: int | None) -> Layer:
    """With ascending anchors."""
    rng = np.random.default_rng(0)
    rows = (1, preset.anchors, preset.block)
    keys, block_keys = (1, preset.seq, preset.kv_heads), (*rows, preset.kv_heads)
    shapes = {
        "q": (*rows, preset.heads),
        "context_k": keys,
        "context_v": keys,
        "block_k": block_keys,
        "block_v": block_keys,
    }
    operands = {name: _normal(rng, (*shape, preset.head_dim)) for name, shape in shapes.items()}
    anchors = np.sort(rng.choice(preset.seq - preset.block, preset.anchors, replace=False))
    attend = partial(context_and_block_attention, anchors=jnp.asarray(anchors[None], jnp.int32), window=window)
    return Layer(attend, operands, _normal(rng, operands["q"].shape))


def _target(preset: Preset, window: int | None) -> Layer:
    rng = np.random.default_rng(0)
    heads = {"q": preset.heads, "k": preset.kv_heads, "v": preset.kv_heads}
    operands = {name: _normal(rng, (1, preset.seq, count, preset.head_dim)) for name, count in heads.items()}
    return Layer(partial(self_attention, window=window), operands, None)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def _error(found: jax.Array, expected: jax.Array) -> float:
    difference = jnp.abs(found.astype(jnp.float32) - expected).max()
    return float(difference / jnp.maximum(jnp.abs(expected).max(), 1e-30))


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start
