"""Features from the target's mesh to the drafter's, without the host ever waiting for them.

`jax.device_put` between meshes moves shards straight from device to device only where both sides cut an array in the
same way; otherwise it reads the array to the host first and waits for it. Meshes of 6 and 2 devices cut the rows of a
batch differently. So rows move in units that divide the shards of both sides: the target's executable cuts its shards
into units, units move as they are, and an executable of the drafter's puts them together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from dflash_jax.parallel import Meshes, batch_shards, sharding_of

Units = tuple[Array, ...]
"""An array in parts: part j holds the j-th unit of every shard, and is sharded like the whole."""


@dataclass(frozen=True)
class Handover:
    """How the rows of a batch go from one mesh to the other."""

    meshes: Meshes

    @property
    def units_sent(self) -> int:
        """Units that a shard of the target's is cut into."""
        return self.meshes.shards // batch_shards(self.meshes.target)

    @property
    def units_received(self) -> int:
        """Units that a shard of the drafter's is made of."""
        return self.meshes.shards // batch_shards(self.meshes.drafter)

    @property
    def assembles(self) -> bool:
        """Whether what arrives must still be put together."""
        return self.units_received > 1

    def cut(self, rows: Float[Array, "batch seq hidden"]) -> Units:
        """Traced on the target's mesh: local slices, nothing is communicated."""
        if self.units_sent == 1:
            return (rows,)
        shards = batch_shards(self.meshes.target)
        by_unit = rows.reshape(shards, self.units_sent, -1, *rows.shape[1:])
        return tuple(by_unit[:, unit].reshape(-1, *rows.shape[1:]) for unit in range(self.units_sent))

    def move(self, units: Sequence[Array]) -> Units:
        """Start the copies; returns at once."""
        if self.meshes.colocated:
            return tuple(units)
        sharding = sharding_of(self.meshes.drafter, "batch", None, None)
        if not self.assembles and self.units_sent == 1:
            return tuple(jax.device_put(list(units), sharding))
        held = [self._by_row_shard(array) for array in units]
        sources, devices = [], []
        for part in range(self.units_received):
            for shard, replicas in enumerate(self._row_shards(sharding)):
                at, unit = divmod(shard * self.units_received + part, self.units_sent)
                for replica, device in enumerate(replicas):
                    sources.append(held[unit][at][replica])
                    devices.append(device)
        moved = jax.device_put(sources, devices)
        count = len(moved) // self.units_received
        rows = units[0].shape[0] * self.units_sent // self.units_received
        shape = (rows, *units[0].shape[1:])
        return tuple(
            jax.make_array_from_single_device_arrays(shape, sharding, moved[part * count :][:count])
            for part in range(self.units_received)
        )

    def join(self, units: Units) -> Float[Array, "batch seq hidden"]:
        """Traced on the drafter's mesh: the inverse of `cut`, for the units as they have arrived."""
        shards = batch_shards(self.meshes.drafter)
        parts = [unit.reshape(shards, -1, *unit.shape[1:]) for unit in units]
        return jnp.stack(parts, axis=1).reshape(-1, *units[0].shape[1:])

    def _by_row_shard(self, array: Array) -> list[list[Array]]:
        """Single-device arrays: of each row shard its replicas, in the order of the mesh."""
        on_device = {shard.device: shard.data for shard in array.addressable_shards}
        return [[on_device[device] for device in replicas] for replicas in self._row_shards(array.sharding)]

    @staticmethod
    def _row_shards(sharding: NamedSharding) -> list[list[jax.Device]]:
        """Devices of each row shard; the replicas lie along `tensor`."""
        devices = sharding.mesh.devices
        return [list(replicas) for replicas in devices.reshape(-1, devices.shape[-1])]
