"""Host values of a step -> the fields of its row."""

import math

import jax
import numpy as np

from dflash_jax.sections import DETECTORS, HealthSection
from dflash_jax.telemetry.stream import Row


def training_row(step: int, values: Row, edges: tuple[int, ...], modules: list[str], section: HealthSection) -> Row:
    """Arrays by bucket, by module and by detector get the names of what they stand for.

    Buckets without a batch in the step, trees that were not looked at, and (but for every `modules_every` steps) the
    norms by module are left out.
    """
    row = {name: value.tolist() for name, value in values.items() if isinstance(value, np.ndarray)}
    by_bucket = values["by_bucket"]
    row["by_bucket"] = {
        str(edge): jax.tree.map(lambda value, at=at: value[at].tolist(), by_bucket)
        for at, edge in enumerate(edges)
        if by_bucket["padded_tokens"][at]
    }
    for name in [name for name in row if name.startswith("ddtree_accept@") and math.isnan(row[name])]:
        del row[name]
    if "flags" in row:
        row["flags"] = [name for name, flag in zip(DETECTORS, row["flags"], strict=True) if flag]
        norms, quantiles = row.pop("module_norms"), row.pop("norm_baseline")
        row["norm_quantiles"] = dict(zip(("p50", "p95", "p99"), quantiles, strict=True))
        if step % section.modules_every == 0:
            row["module_norms"] = dict(zip(modules, norms, strict=True))
    return row
