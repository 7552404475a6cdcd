"""Model FLOPs utilisation of a row, against the numbers worked out."""

import pytest

from dflash_jax.training.utilisation import Utilisation, peak_of
from tests.helpers import colocated
from tests.training.test_step import make_settings


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("TPU v5 lite", 197e12), ("TPU v5p", 459e12)],
)
def test_known_devices(kind, peak):
    assert peak_of(kind) == peak


def test_rows_of_known_and_unknown_devices():
    """Two devices of a known kind, a step of two seconds; a CPU has no peak."""
    settings = make_settings()
    row = {"step_seconds": 2.0, "by_bucket": {"16": {"padded_tokens": 64, "anchors": 5}}}
    found = Utilisation(settings, 2 * peak_of("TPU v4"))(row)

    # The drafter: two layers of 32 wide, 4 heads of 8 and 2 of keys, MLP of 48; 20 block rows, two taps, 64 words.
    # The first layer projects the anchors' rows alone, the last drops them behind its attention.
    of_rows = 32 * ((5 + 20) * (32 + 2 * 16) + (20 + 15) * (32 + 3 * 48))
    of_context = 64 * 32 * 2 * 16
    linear = 2 * (3 * (of_rows + 2 * of_context) + 2 * 64 * 2 * 32 * 32)
    attention = 2 * 3 * 2 * 2 * (4 * 5 * 8 + 20 * 4) * 32
    projection = 2 * 2 * 15 * 32 * 64
    # The target up to its last tap: three layers, each token sees half of its row.
    target = 2 * 3 * 64 * (32 * (2 * 32 + 2 * 16 + 3 * 48) + 2 * 32 * 16 // 2)
    assert found["model_flops_utilisation"] == (linear + attention + projection + target) / 2.0 / (2 * 275e12)

    assert peak_of("cpu") is None
    assert Utilisation.of(settings, colocated((2, 2, 2)))(row) == {}
