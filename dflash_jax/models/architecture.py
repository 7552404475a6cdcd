"""Shapes of the two networks as values, and their `config.json`.

`TargetArchitecture` is read from Hugging Face configs of the Qwen3, Qwen2/2.5 and Llama families.
`DrafterArchitecture` is read from and written to the published DFlash layouts (flat and nested), or resolved from a
run's config and its target; the rules that tie the two together are checked here, before any weight is read.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dflash_jax.errors import UserError
from dflash_jax.sections import DrafterSection

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Llama3Scaling:
    """Rope type `llama3`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base and optional scaling."""

    theta: float
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True)
class TargetArchitecture:
    """A pre-norm decoder with grouped-query attention and a gated MLP."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer, in tokens; empty: full attention everywhere."""

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer; none for full attention."""
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True)
class DrafterArchitecture:
    """A DFlash drafter; all fields that its `config.json` carries."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    num_target_layers: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    """`full_attention` or `sliding_attention`, a layer each."""
    sliding_window: int | None = None
    is_causal: bool | None = None
    """Inside the block; none: sliding layers are causal, full layers are not."""
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer, in tokens; none for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def causal(self, layer: int) -> bool:
        """Whether rows of a block see only themselves and earlier rows."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal


def default_target_layer_ids(num_target_layers: int, taps: int) -> tuple[int, ...]:
    """Tapped layers, spread from the second to the third-to-last; z-lab/dflash `build_target_layer_ids`."""
    if taps == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    return tuple(round(first + i * (last - first) / (taps - 1)) for i in range(taps))


def resolve_drafter(section: DrafterSection, target: TargetArchitecture) -> DrafterArchitecture:
    """The drafter of a recipe, completed from its target and checked against it.

    Raises:
        UserError: a rule between drafter and target is broken.
    """
    layer_ids = section.target_layer_ids
    if layer_ids is None:
        layer_ids = default_target_layer_ids(target.num_layers, section.taps)
    drafter = DrafterArchitecture(
        hidden_size=target.hidden_size,
        intermediate_size=section.intermediate_size or target.intermediate_size,
        num_layers=section.layers,
        num_heads=section.num_attention_heads or target.num_heads,
        num_kv_heads=section.num_key_value_heads or target.num_kv_heads,
        head_dim=section.head_dim or target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        block_size=section.block_size,
        mask_token_id=section.mask_token_id,
        target_layer_ids=layer_ids,
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=target.tie_word_embeddings,
        layer_types=(FULL,) * section.layers,
    )
    check_pair(drafter, target, "drafter")
    return drafter


def check_pair(drafter: DrafterArchitecture, target: TargetArchitecture, where: str) -> None:
    """Raise `UserError` unless this drafter can serve this target; `where` names the drafter in the message."""
    ids, rows = drafter.target_layer_ids, target.vocab_size
    if not 0 <= drafter.mask_token_id < rows:
        raise UserError(f"{where}: mask_token_id {drafter.mask_token_id} is outside the target's {rows} embedding rows")
    if not ids:
        raise UserError(f"{where}: target_layer_ids is empty; the drafter needs at least one tapped layer")
    if any(b <= a for a, b in pairwise(ids)):
        raise UserError(
            f"{where}: target_layer_ids {list(ids)} must rise strictly; list them by hand for a small target"
        )
    if ids[0] < 0 or ids[-1] >= target.num_layers:
        raise UserError(f"{where}: target_layer_ids {list(ids)} leave the target's layers 0..{target.num_layers - 1}")
    for name, mine, theirs in (
        ("hidden_size", drafter.hidden_size, target.hidden_size),
        ("target_hidden_size", drafter.target_hidden_size, target.hidden_size),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
        ("num_target_layers", drafter.num_target_layers, target.num_layers),
    ):
        if mine != theirs:
            raise UserError(
                f"{where}: {name} is {mine} but the target's is {theirs}; this drafter is of another target"
            )
    if drafter.num_heads % drafter.num_kv_heads:
        raise UserError(
            f"{where}: {drafter.num_heads} attention heads are no multiple of {drafter.num_kv_heads} key-value heads"
        )
    if drafter.head_dim % 2:
        raise UserError(f"{where}: head_dim {drafter.head_dim} is odd; rotary embeddings need an even one")


def check_mesh(target: TargetArchitecture, drafter: DrafterArchitecture | None, mesh_shape: Mapping[str, int]) -> None:
    """Raise `UserError` unless every sharded dimension of both models divides by its mesh axis."""
    tensor, fsdp = mesh_shape["tensor"], mesh_shape["fsdp"]
    for owner, arch in (("target", target), ("drafter", drafter)):
        if arch is None:
            continue
        if arch.vocab_size % (tensor * fsdp):
            raise UserError(
                f"devices: fsdp x tensor = {fsdp * tensor} does not divide the {owner}'s vocab_size {arch.vocab_size}"
            )
        for name, size in (
            ("num_attention_heads", arch.num_heads),
            ("num_key_value_heads", arch.num_kv_heads),
            ("intermediate_size", arch.intermediate_size),
        ):
            if size % tensor:
                raise UserError(f"devices.tensor: {tensor} does not divide the {owner}'s {name} {size}")
        if arch.hidden_size % fsdp:
            raise UserError(f"devices.fsdp: {fsdp} does not divide the {owner}'s hidden_size {arch.hidden_size}")


def parse_target(config: Mapping[str, Any], where: str) -> TargetArchitecture:
    """Read a Hugging Face `config.json`; `where` names the file in errors."""
    family = config.get("model_type")
    if family not in ("qwen3", "qwen2", "llama"):
        raise UserError(f"{where}: model_type {family!r} is not supported; this reads qwen3, qwen2 and llama")
    if config.get("mlp_bias"):
        raise UserError(f"{where}: a target with mlp_bias is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act {config['hidden_act']!r} is not supported, only silu")
    if config.get("quantization_config"):
        raise UserError(f"{where}: a quantised target is not supported; give the unquantised folder")
    bias = bool(config.get("attention_bias", family == "qwen2"))
    heads, hidden = _required(config, "num_attention_heads", where), _required(config, "hidden_size", where)
    return TargetArchitecture(
        family=family,
        vocab_size=_required(config, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_required(config, "intermediate_size", where),
        num_layers=_required(config, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        rms_norm_eps=_required(config, "rms_norm_eps", where),
        rope=parse_rope(config, where),
        qk_norm=family == "qwen3",
        qkv_bias=bias,
        output_bias=bias and family != "qwen2",
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=config.get("max_position_embeddings", 32768),
        windows=_windows(config, where),
    )


def _windows(config: Mapping[str, Any], where: str) -> tuple[int | None, ...]:
    """A target's windows: of the layers that `layer_types` names, or without it (older files) from
    `max_window_layers` on; only under `use_sliding_window`, which Llama does not know."""
    if not config.get("use_sliding_window") or config["model_type"] == "llama":
        return ()
    layers, window = _required(config, "num_hidden_layers", where), _required(config, "sliding_window", where)
    first = config.get("max_window_layers", 28)  # the default of the family's configuration classes
    types = config.get("layer_types") or [FULL if layer < first else SLIDING for layer in range(layers)]
    _check_layer_types(types, layers, where)
    return tuple(window if kind == SLIDING else None for kind in types)


def _check_layer_types(types: Sequence[str], layers: int, where: str) -> None:
    if len(types) != layers or set(types) - {FULL, SLIDING}:
        raise UserError(f"{where}: layer_types {list(types)} must name {FULL} or {SLIDING} for each of {layers} layers")


def parse_rope(config: Mapping[str, Any], where: str) -> Rope:
    """`rope_parameters` (transformers 5) before `rope_theta` + `rope_scaling` (older files)."""
    nested = config.get("rope_parameters") or {}
    scaling = nested if "rope_type" in nested else config.get("rope_scaling") or nested
    theta = nested.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(float(theta))
    if kind != "llama3":
        raise UserError(f"{where}: rope type {kind!r} is not supported; this reads default and llama3")
    try:
        return Rope(
            float(theta),
            Llama3Scaling(
                factor=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
            ),
        )
    except KeyError as error:
        raise UserError(f"{where}: the llama3 rope scaling lacks {error.args[0]}") from error


def parse_drafter(config: Mapping[str, Any], where: str) -> DrafterArchitecture:
    """Read a published DFlash `config.json`: each field from `dflash_config` first, else from the top level."""
    nested = config.get("dflash_config") or {}

    def field(name: str, default: Any = None) -> Any:
        return nested.get(name, config.get(name, default))

    architectures = config.get("architectures") or []
    if "DFlash2DraftModel" in architectures or field("conv_kernel_size") or field("selector_rank"):
        raise UserError(f"{where}: this is a DFlash 2 drafter; only DFlash (DFlashDraftModel) is supported")
    if field("target_layer_ids") is None or field("mask_token_id") is None:
        missing = "target_layer_ids" if field("target_layer_ids") is None else "mask_token_id"
        raise UserError(f"{where}: {missing} is missing; this is not the config.json of a DFlash drafter")
    if config.get("attention_bias"):
        raise UserError(f"{where}: a drafter with attention_bias is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act {config['hidden_act']!r} is not supported, only silu")
    layers, hidden = _required(config, "num_hidden_layers", where), _required(config, "hidden_size", where)
    heads = _required(config, "num_attention_heads", where)
    types = tuple(config.get("layer_types") or (FULL,) * layers)
    window = config.get("sliding_window")
    _check_layer_types(types, layers, where)
    if SLIDING in types and not window:
        raise UserError(f"{where}: layer_types has sliding layers but sliding_window is {window!r}")
    if field("block_size") is None:
        raise UserError(f"{where}: block_size is missing")
    return DrafterArchitecture(
        hidden_size=hidden,
        intermediate_size=_required(config, "intermediate_size", where),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        rms_norm_eps=_required(config, "rms_norm_eps", where),
        rope=parse_rope(config, where),
        block_size=field("block_size"),
        mask_token_id=field("mask_token_id"),
        target_layer_ids=tuple(field("target_layer_ids")),
        target_hidden_size=config.get("target_hidden_size", hidden),
        num_target_layers=_required(config, "num_target_layers", where),
        vocab_size=_required(config, "vocab_size", where),
        max_position_embeddings=config.get("max_position_embeddings", 32768),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        layer_types=types,
        sliding_window=window,
        is_causal=field("is_causal"),
        output_multiplier=field("output_multiplier") or 1.0,
        final_logit_softcapping=field("final_logit_softcapping"),
        input_embedding_scale=field("input_embedding_scale") or 1.0,
    )


def render_drafter(drafter: DrafterArchitecture) -> dict[str, Any]:
    """The `config.json` that tpu-inference, sglang-jax, vLLM and SGLang read.

    The servers look for the DFlash fields in different places, so `block_size`, `mask_token_id` and
    `target_layer_ids` stand at the top level and in `dflash_config`; the rotary base stands in `rope_theta` and in
    `rope_parameters`.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": drafter.rope.theta}
    scaling = None
    if drafter.rope.llama3 is not None:
        scaling = {"rope_type": "llama3", **vars(drafter.rope.llama3)}
        rope = {**rope, **scaling}
    own: dict[str, Any] = {
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": list(drafter.target_layer_ids),
    }
    optional = {
        "is_causal": drafter.is_causal,
        "final_logit_softcapping": drafter.final_logit_softcapping,
        "output_multiplier": None if drafter.output_multiplier == 1.0 else drafter.output_multiplier,
        "input_embedding_scale": None if drafter.input_embedding_scale == 1.0 else drafter.input_embedding_scale,
    }
    own |= {key: value for key, value in optional.items() if value is not None}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "hidden_size": drafter.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_hidden_layers": drafter.num_layers,
        "num_attention_heads": drafter.num_heads,
        "num_key_value_heads": drafter.num_kv_heads,
        "head_dim": drafter.head_dim,
        "rms_norm_eps": drafter.rms_norm_eps,
        "rope_theta": drafter.rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "max_position_embeddings": drafter.max_position_embeddings,
        "max_window_layers": drafter.num_layers,
        "vocab_size": drafter.vocab_size,
        "tie_word_embeddings": drafter.tie_word_embeddings,
        "num_target_layers": drafter.num_target_layers,
        "target_hidden_size": drafter.target_hidden_size,
        "layer_types": list(drafter.layer_types),
        "sliding_window": drafter.sliding_window,
        "use_sliding_window": SLIDING in drafter.layer_types,
        "use_cache": True,
        **own,
        "dflash_config": copy.deepcopy(own),
    }


def _required(config: Mapping[str, Any], key: str, where: str) -> Any:
    if config.get(key) is None:
        raise UserError(f"{where}: {key} is missing")
    return config[key]
