"""The layers that target and drafter share, against their formulas in float64 numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.models import weights
from dflash_jax.models.architecture import Llama3Scaling, Rope
from dflash_jax.models.layers import GatedMLP, Linear, RMSNorm, matmul, rotary_frequencies, rotary_table, rotate

LLAMA31 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def apply(module, x, **arrays):
    """The module at given weights."""
    graph, specs = weights.split(module)
    names = weights.by_name(specs)
    assert names.keys() == arrays.keys()
    assert {name: spec.shape for name, spec in names.items()} == {name: a.shape for name, a in arrays.items()}
    params = {}
    for name, array in arrays.items():
        *path, last = name.split(".")
        node = params
        for part in path:
            node = node.setdefault(part, {})
        node[last] = jnp.asarray(array, jnp.float32)
    return nnx.merge(graph, params)(jnp.asarray(x))


@pytest.fixture
def normal():
    rng = np.random.default_rng(0)
    return lambda *shape: rng.standard_normal(shape).astype(np.float32)


class TestMatmul:
    def test_multiplies_by_the_transpose(self, normal):
        x, matrix = normal(2, 3, 8), normal(5, 8)
        np.testing.assert_allclose(matmul(jnp.asarray(x), jnp.asarray(matrix)), x @ matrix.T, rtol=1e-5, atol=1e-5)

    def test_runs_in_the_dtype_of_its_left_operand(self, normal):
        x, matrix = jnp.asarray(normal(2, 8), jnp.bfloat16), jnp.asarray(normal(5, 8))
        assert matmul(x, matrix).dtype == jnp.bfloat16

    def test_logits_keep_the_precision_of_the_accumulator(self, normal):
        x, matrix = jnp.asarray(normal(4, 64), jnp.bfloat16), jnp.asarray(normal(5, 64), jnp.bfloat16)
        logits = matmul(x, matrix, jnp.float32)
        assert logits.dtype == jnp.float32
        exact = np.asarray(x, np.float64) @ np.asarray(matrix, np.float64).T
        np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-5)


class TestLinear:
    def test_without_bias(self, normal):
        x, weight = normal(2, 3, 8), normal(5, 8)
        np.testing.assert_allclose(
            apply(Linear(8, 5, (None, None)), x, weight=weight), x @ weight.T, rtol=1e-5, atol=1e-5
        )

    def test_with_bias(self, normal):
        x, weight, bias = normal(2, 3, 8), normal(5, 8), normal(5)
        y = apply(Linear(8, 5, (None, None), bias=True), x, weight=weight, bias=bias)
        np.testing.assert_allclose(y, x @ weight.T + bias, rtol=1e-5, atol=1e-5)


class TestRMSNorm:
    @pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
    def test_formula(self, normal, eps):
        x, weight = normal(2, 3, 32), normal(32)
        x64 = x.astype(np.float64)
        expected = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + eps) * weight
        np.testing.assert_allclose(apply(RMSNorm(32, eps), x, weight=weight), expected, rtol=1e-5, atol=1e-6)

    def test_bfloat16_input_is_rounded_once(self, normal):
        """All is computed in float32, so the result is within half a unit in the last place: 2^-8 of the value."""
        x, weight = jnp.asarray(normal(8, 256), jnp.bfloat16), normal(256)
        y = apply(RMSNorm(256, 1e-6), x, weight=weight)
        assert y.dtype == jnp.bfloat16
        x64 = np.asarray(x, np.float64)
        exact = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * weight
        np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8 * 1.001)

    def test_zeros_stay_finite(self):
        y = apply(RMSNorm(8, 1e-6), np.zeros((1, 8), np.float32), weight=np.ones(8, np.float32))
        np.testing.assert_array_equal(y, 0.0)


class TestGatedMLP:
    def test_formula(self, normal):
        x, gate, up, down = normal(2, 3, 8), normal(12, 8), normal(12, 8), normal(8, 12)
        y = apply(GatedMLP(8, 12), x, **{"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down})
        x64 = x.astype(np.float64)
        gated = x64 @ gate.T
        expected = (gated / (1 + np.exp(-gated)) * (x64 @ up.T)) @ down.T
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


class TestRotaryFrequencies:
    @pytest.mark.parametrize(("theta", "head_dim"), [(1e4, 8), (1e6, 128), (1e7, 64)])
    def test_plain(self, theta, head_dim):
        expected = [theta ** (-2 * j / head_dim) for j in range(head_dim // 2)]
        np.testing.assert_allclose(rotary_frequencies(Rope(theta), head_dim), expected, rtol=1e-6)

    @pytest.mark.parametrize(
        "scaling", [LLAMA31, Llama3Scaling(32.0, 1.0, 4.0, 8192), Llama3Scaling(4.0, 2.0, 3.0, 64)]
    )
    def test_llama3(self, scaling):
        """Long waves stretched by the factor, short ones kept, the ones between blended by their length."""
        theta, head_dim = 500000.0, 128
        expected, kinds = [], set()
        for j in range(head_dim // 2):
            frequency = theta ** (-2 * j / head_dim)
            turns = scaling.original_max_position_embeddings * frequency / (2 * np.pi)
            if turns < scaling.low_freq_factor:
                expected.append(frequency / scaling.factor)
                kinds.add("long")
            elif turns > scaling.high_freq_factor:
                expected.append(frequency)
                kinds.add("short")
            else:
                span = scaling.high_freq_factor - scaling.low_freq_factor
                share = (turns - scaling.low_freq_factor) / span
                expected.append((1 - share) * frequency / scaling.factor + share * frequency)
                kinds.add("between")
        assert kinds == {"long", "short", "between"}
        np.testing.assert_allclose(rotary_frequencies(Rope(theta, scaling), head_dim), expected, rtol=1e-5)


class TestRotate:
    @pytest.mark.parametrize("rope", [Rope(1e4), Rope(1e6), Rope(500000.0, LLAMA31)])
    @pytest.mark.parametrize("limit", [None, 1001])
    def test_each_pair_of_halves_turns_by_its_angle(self, normal, rope, limit):
        x, positions = normal(2, 5, 3, 16), np.array([[0, 1, 2, 3, 4], [7, 8, 100, 101, 1000]])
        y = rotate(jnp.asarray(x), *rotary_table(rope, 16, jnp.asarray(positions, jnp.int32), limit))
        frequencies = rotary_frequencies(rope, 16).astype(np.float64)
        turned = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * positions[:, :, None, None] * frequencies)
        np.testing.assert_allclose(y, np.concatenate([turned.real, turned.imag], axis=-1), atol=5e-4)

    def test_position_zero_is_not_turned(self, normal):
        x = normal(1, 1, 2, 8)
        y = rotate(jnp.asarray(x), *rotary_table(Rope(1e4), 8, jnp.zeros((1, 1), jnp.int32)))
        np.testing.assert_array_equal(y, x)

    def test_products_depend_on_distance_only(self, normal):
        q, k = normal(1, 1, 1, 16), normal(1, 1, 1, 16)

        def product(q_position, k_position):
            turned = [
                rotate(jnp.asarray(x), *rotary_table(Rope(1e4), 16, jnp.full((1, 1), position, jnp.int32)))
                for x, position in ((q, q_position), (k, k_position))
            ]
            return float((turned[0] * turned[1]).sum())

        assert product(5, 3) == pytest.approx(product(105, 103), abs=1e-4)
        assert product(5, 3) != pytest.approx(product(5, 4), abs=1e-2)

    def test_tables_are_float32_whatever_turns(self, normal):
        cos, sin = rotary_table(Rope(1e4), 8, jnp.arange(3))
        assert cos.dtype == sin.dtype == jnp.float32
        assert rotate(jnp.asarray(normal(3, 2, 8), jnp.bfloat16), cos, sin).dtype == jnp.bfloat16
