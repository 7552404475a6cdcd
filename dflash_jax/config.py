"""The whole run as one frozen, validated value: YAML file + dotted overrides -> `Config`.

The rules that need the target's own config (mask token, tapped layers, head counts) are in
`models.architecture.resolve_drafter`.
"""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from dflash_jax.errors import UserError
from dflash_jax.sections import (
    DataSection,
    DevicesSection,
    DrafterSection,
    EvaluationSection,
    ExportSection,
    HealthSection,
    MetricsSection,
    NoiseSection,
    OptimizerSection,
    PipelineSection,
    RunSection,
    Section,
    TargetSection,
    TelemetrySection,
    TrainingSection,
)

D_PACE_ALPHA = 0.5
"""arXiv 2605.18810."""

PAPER_DECAY_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
"""Loss decay by block size, arXiv 2602.06036 appendix A.1."""


class Config(Section):
    """One training run."""

    run: RunSection
    devices: DevicesSection = DevicesSection()
    target: TargetSection
    drafter: DrafterSection
    data: DataSection
    training: TrainingSection
    pipeline: PipelineSection = PipelineSection()
    noise: NoiseSection = NoiseSection()
    optimizer: OptimizerSection = OptimizerSection()
    evaluation: EvaluationSection = EvaluationSection()
    telemetry: TelemetrySection = TelemetrySection()
    metrics: MetricsSection = MetricsSection()
    health: HealthSection = HealthSection()
    export: ExportSection = ExportSection()


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML recipe, apply `section.key=value` overrides (values in YAML syntax), validate.

    Raises:
        UserError: missing or malformed file, malformed override, unknown key, wrong type, broken rule.
    """
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"config {path}: {error.strerror or error}; give an existing YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UserError(f"config {path}: the file holds no mapping of sections; see configs/quickstart.yaml")
    for override in overrides or []:
        _apply(tree, override)
    return parse_config(tree, str(path))


def parse_config(tree: dict[str, Any], origin: str) -> Config:
    """Validate a plain mapping; `origin` names it in errors."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"config {origin}: {_explain(error)}") from error


def dump_config(config: Config) -> str:
    """The resolved config as YAML, for the run folder."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def decay_gamma(training: TrainingSection, block_size: int) -> float | None:
    """The gamma of the loss weights: the configured one, or the paper's for this block size; D-PACE has none."""
    if training.position_weights == "d_pace":
        return None
    if training.loss_decay_gamma is not None:
        return training.loss_decay_gamma
    if block_size not in PAPER_DECAY_GAMMA:
        known = ", ".join(map(str, sorted(PAPER_DECAY_GAMMA)))
        raise UserError(
            f"training.loss_decay_gamma: the paper gives a value for block sizes {known} only; "
            f"set it for drafter.block_size {block_size}"
        )
    return PAPER_DECAY_GAMMA[block_size]


def d_pace_alpha(training: TrainingSection) -> float:
    """The smoothing of D-PACE's weights."""
    return D_PACE_ALPHA if training.d_pace_alpha is None else training.d_pace_alpha


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise UserError(f"override {override!r}: write section.key=value")
    node = tree
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise UserError(f"override {override!r}: {part} is a value, not a section")
        node = child
    try:
        node[parts[-1]] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: the value is not YAML") from error


def _explain(error: ValidationError) -> str:
    """The first problem in one line: key, value, what is allowed."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "config"
    if first["type"] == "extra_forbidden":
        section: Any = Config
        for part in first["loc"][:-1]:
            section = section.model_fields[part].annotation
        return f"unknown key {key}; allowed here: {', '.join(section.model_fields)}"
    if first["type"] == "missing":
        return f"{key} is missing"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{key}: {message}"
    return f"{key}: {first['input']!r} is not allowed: {message}"
