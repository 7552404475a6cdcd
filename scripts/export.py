#!/usr/bin/env python3
"""Write the folder that servers load (config.json, model.safetensors), read it back and compare logits."""

import argparse
import sys
from pathlib import Path

from dflash_jax import cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder or one of its checkpoints")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()

    from dflash_jax.models import weights
    from dflash_jax.parallel import mesh_of
    from dflash_jax.training.export import export_drafter, open_drafter, serving_warnings

    mesh = mesh_of((1, 1, 1))
    drafter, _ = open_drafter(arguments.run, mesh)
    rounding = export_drafter(drafter, arguments.output, mesh)
    parameters = sum(array.size for array in weights.by_name(drafter.params).values())
    print(
        f"{arguments.output}: {parameters:,} parameters, block {drafter.arch.block_size}, "
        f"taps {list(drafter.arch.target_layer_ids)}; read back and compared, bfloat16 moves logits by {rounding:.1e}"
    )
    for warning in serving_warnings(drafter.arch):
        print(f"warning: {warning}", file=sys.stderr)


if __name__ == "__main__":
    cli.run(main)
