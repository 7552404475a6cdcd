"""Hugging Face checkpoint folders, in and out. Parameter names equal tensor names, so nothing is renamed.

Weights are read slice by slice: each device's shard takes its own bytes from the file.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dflash_jax.errors import UserError
from dflash_jax.models import weights
from dflash_jax.models.architecture import (
    DrafterArchitecture,
    TargetArchitecture,
    parse_drafter,
    parse_target,
    render_drafter,
)
from dflash_jax.models.drafter import Drafter, TrainedDrafter
from dflash_jax.models.target import FrozenTarget, Target
from dflash_jax.models.weights import Params, WeightSpec

EMBEDDED = "embedded:"
"""Prefix of the models and files that ship inside the package."""

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def embedded_path(name: str) -> Path:
    """The path behind `embedded:NAME` (any other text is an ordinary path)."""
    if not name.startswith(EMBEDDED):
        return Path(name)
    return Path(str(resources.files("dflash_jax.assets"))) / name.removeprefix(EMBEDDED)


def resolve_folder(name: str, revision: str | None = None) -> Path:
    """A local folder, `embedded:NAME`, or a hub id that is downloaded (safetensors and JSON only).

    Raises:
        UserError: nothing there, or the hub cannot be reached.
    """
    path = embedded_path(name)
    if path.is_dir():
        return path
    if path.is_file():
        raise UserError(f"{name} is a file; give the checkpoint folder that holds config.json")
    # `runs/typo` looks like a hub id, but nobody keeps a folder of the hub's organisations beside the code.
    if name.startswith((EMBEDDED, "/", ".", "~")) or name.count("/") != 1 or path.parent.is_dir():
        raise UserError(f"{name}: no such folder; give a checkpoint folder or a hub id like Qwen/Qwen3-8B")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{name}: no such local folder, and the hub did not give it ({reason})") from error


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object from a checkpoint folder; `what` names the folder's kind in errors."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path.parent} is not {what}: it holds no readable {path.name}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object")
    return value


def read_target_architecture(folder: Path) -> TargetArchitecture:
    """Architecture from `config.json`; cheap, reads no weight."""
    return parse_target(read_json(folder / "config.json", "a checkpoint folder"), str(folder / "config.json"))


def read_drafter_architecture(folder: Path) -> DrafterArchitecture:
    """Architecture from a published or exported drafter's `config.json`."""
    return parse_drafter(read_json(folder / "config.json", "a drafter folder"), str(folder / "config.json"))


def read_stop_ids(folder: Path) -> tuple[int, ...]:
    """End-of-answer tokens: `generation_config.json` before `config.json`."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            ids = read_json(folder / name, "a checkpoint folder").get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (int(ids),)
    return ()


def load_target(folder: Path, mesh: Mesh, dtype: jax.typing.DTypeLike) -> FrozenTarget:
    """The target with its weights in `dtype`, in their shards.

    Raises:
        UserError: unreadable file; missing, surplus or misshapen tensors, named.
    """
    arch = read_target_architecture(folder)
    graph, specs = weights.split(Target(arch))
    ignored = {"lm_head.weight"} if arch.tie_word_embeddings else set()
    params = read_weights(folder, specs, mesh, dtype, ignored)
    return FrozenTarget(arch, graph, params, read_stop_ids(folder))


def load_drafter(folder: Path, mesh: Mesh) -> TrainedDrafter:
    """A published or exported drafter, as float32 master weights in their shards."""
    arch = read_drafter_architecture(folder)
    graph, specs = weights.split(Drafter(arch))
    return TrainedDrafter(arch, graph, read_weights(folder, specs, mesh, jnp.float32, {"embed_tokens.weight"}))


def read_weights(
    folder: Path, specs: Params, mesh: Mesh, dtype: jax.typing.DTypeLike, ignored: set[str] = frozenset()
) -> Params:
    """Fill the described tree from the folder's safetensors; every tensor must match exactly one weight."""
    files = _tensor_files(folder)
    wanted = weights.by_name(specs)
    found = {name for name in files if name not in ignored and not name.endswith("rotary_emb.inv_freq")}
    missing, surplus = sorted(wanted.keys() - found), sorted(found - wanted.keys())
    if missing:
        raise UserError(f"{folder}: {len(missing)} tensors are missing: {_some(missing)}")
    if surplus:
        raise UserError(f"{folder}: {len(surplus)} tensors have no place in this model: {_some(surplus)}")
    handles = {path: _open(path) for path in set(files.values())}
    try:
        return jax.tree.map(lambda spec: _read(handles[files[spec.name]], spec, mesh, dtype, folder), specs)
    except SafetensorError as error:
        raise UserError(f"{folder}: a safetensors file is corrupt or cut short ({error}); fetch it again") from error


def save_drafter(folder: Path, drafter: TrainedDrafter) -> None:
    """Write `config.json` and `model.safetensors` (bfloat16, `[out, in]`) as servers load them."""
    _save(folder, drafter.params, render_drafter(drafter.arch))


def save_target(folder: Path, params: Params, config: dict[str, Any]) -> None:
    """Write a target as `config.json` and `model.safetensors` in bfloat16."""
    _save(folder, params, config)


def _save(folder: Path, params: Params, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: np.ascontiguousarray(jax.device_get(array).astype(ml_dtypes.bfloat16))
        for name, array in weights.by_name(params).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index of a sharded checkpoint or from the single file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        table = read_json(index, "a checkpoint folder").get("weight_map")
        if not isinstance(table, dict):
            raise UserError(f"{index}: weight_map is missing")
        for name in sorted(set(table.values())):
            if not (folder / name).is_file():
                raise UserError(f"{folder}: {name} is missing though the index names it; the checkpoint is incomplete")
        return {tensor: folder / name for tensor, name in table.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise UserError(f"{folder} is not a checkpoint folder: it holds no model.safetensors and no index")
    return dict.fromkeys(_open(single).keys(), single)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}); fetch it again") from error


def _read(handle: Any, spec: WeightSpec, mesh: Mesh, dtype: jax.typing.DTypeLike, folder: Path) -> jax.Array:
    rows = handle.get_slice(spec.name)
    shape = tuple(rows.get_shape())
    if shape != spec.shape:
        raise UserError(f"{folder}: {spec.name} has shape {list(shape)}, its config.json implies {list(spec.shape)}")
    sharding = weights.shardings({"": spec}, mesh)[""]
    # float32 first: some safetensors readers give bfloat16 as ml_dtypes, which numpy converts exactly.
    return jax.make_array_from_callback(
        shape, sharding, lambda index: np.asarray(rows[index]).astype(np.float32).astype(np.dtype(dtype))
    )


def _some(names: list[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
