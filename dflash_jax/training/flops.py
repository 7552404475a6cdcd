"""How many floating-point operations a drafter's step takes by its formula: multiplications and additions of matmuls.

What an implementation computes besides (masked scores, recomputation) does not count, so that its share of a device's
peak is a measure of the implementation.
"""

from dataclasses import dataclass

from dflash_jax.models.architecture import DrafterArchitecture, TargetArchitecture


@dataclass(frozen=True)
class StepFlops:
    """Of one micro-batch, forward and backward."""

    linear: int
    """Projections and MLPs of the layers, and the fusion layer."""
    attention: int
    projection: int
    """The vocabulary projection, whose weight has no gradient."""
    recomputed: int
    """What `remat: layer` does once more: projections and MLPs of the block rows. Not in the total."""

    @property
    def total(self) -> int:
        return self.linear + self.attention + self.projection


def step_flops(arch: DrafterArchitecture, vocab: int, tokens: int, blocks: int, visible: int, labels: int) -> StepFlops:
    """Before the first attention only the anchors' rows count, the masks are all alike; behind the last one all others.

    Args:
        tokens: context tokens of the batch, padding included.
        blocks: of the batch.
        visible: context keys that a block sees, summed over blocks: without a window the sum of the anchors.
        labels: rows that go through the vocabulary projection.
    """
    rows, hidden, layers = blocks * arch.block_size, arch.hidden_size, arch.num_layers
    inner, kv_inner = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    projected = blocks + (layers - 1) * rows
    mapped = (layers - 1) * rows + blocks * (arch.block_size - 1)
    of_rows = hidden * (projected * (inner + 2 * kv_inner) + mapped * (inner + 3 * arch.intermediate_size))
    of_context = tokens * hidden * 2 * kv_inner
    fusion = tokens * len(arch.target_layer_ids) * arch.target_hidden_size * hidden
    scores = arch.block_size * visible + rows * arch.block_size
    # Forward once, backward by operand and by weight; features and the frozen projection ask for one of the two.
    return StepFlops(
        linear=2 * (3 * (of_rows + layers * of_context) + 2 * fusion),
        attention=2 * 3 * layers * 2 * scores * inner,
        projection=2 * 2 * labels * hidden * vocab,
        recomputed=2 * of_rows,
    )


def target_flops(arch: TargetArchitecture, layers: int, tokens: int, length: int) -> int:
    """Forward through so many layers of the target, `tokens` in rows of that padded length.

    A token sees half of its row on average, and no more than its layer's window.
    """
    inner, kv_inner = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    linear = arch.hidden_size * (2 * inner + 2 * kv_inner + 3 * arch.intermediate_size)
    visible = sum(min(length // 2, arch.window(layer) or length) for layer in range(layers))
    return 2 * tokens * (layers * linear + 2 * inner * visible)
