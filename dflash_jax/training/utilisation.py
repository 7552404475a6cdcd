"""Model FLOPs utilisation: a step's operations by formula, as a share of what the devices could do in its time."""

from dataclasses import dataclass

import jax.numpy as jnp

from dflash_jax.parallel import Meshes
from dflash_jax.telemetry.stream import Row
from dflash_jax.training.flops import step_flops, target_flops
from dflash_jax.training.state import StepSettings

PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12,
}
"""Dense bfloat16 operations a second of a device, by the beginning of `device_kind`; vendors' data sheets."""


@dataclass(frozen=True)
class Utilisation:
    """Of rows, by what they say of their step: padded tokens and blocks by bucket, and seconds."""

    settings: StepSettings
    peak: float | None
    """Of all devices together; none where it is not known."""

    @classmethod
    def of(cls, settings: StepSettings, meshes: Meshes) -> "Utilisation":
        devices = {*meshes.target.devices.flat, *meshes.drafter.devices.flat}
        known = jnp.dtype(settings.compute_dtype) == jnp.bfloat16
        peaks = [peak_of(device.device_kind) if known else None for device in devices]
        return cls(settings, None if None in peaks else sum(peaks))

    def __call__(self, row: Row) -> Row:
        """`model_flops_utilisation` where the devices are known and compute in bfloat16.

        The operations are those of the logged step, the seconds a mean since the row before. A block is taken to see
        half of its padded row.
        """
        if self.peak is None:
            return {}
        settings, total = self.settings, 0
        for edge, sums in row["by_bucket"].items():
            tokens, blocks = int(sums["padded_tokens"]), int(sums["anchors"])
            labels = blocks * (settings.drafter.block_size - 1)
            visible = blocks * int(edge) // 2
            total += step_flops(settings.drafter, settings.target.vocab_size, tokens, blocks, visible, labels).total
            total += target_flops(settings.target, _layers_run(settings), tokens, int(edge))
        return {"model_flops_utilisation": total / row["step_seconds"] / self.peak}


def peak_of(kind: str) -> float | None:
    """Operations a second of a device of that kind; none where it is not known."""
    known = [name for name in PEAKS if kind.startswith(name)]
    return PEAKS[max(known, key=len)] if known else None


def _layers_run(settings: StepSettings) -> int:
    return settings.target.num_layers if settings.asks_target else settings.drafter.target_layer_ids[-1] + 1
