"""Host values of a step -> the fields of its row."""

from dataclasses import dataclass, field

import numpy as np

from dflash_jax.sections import DETECTORS, HealthSection
from dflash_jax.telemetry.stream import Row


@dataclass
class RowMaker:
    """Gives arrays by bucket, by module and by detector the names of what they stand for.

    What is measured now and then (draft trees, norms by module) goes into the next row that is logged.
    """

    edges: tuple[int, ...]
    modules: list[str]
    section: HealthSection
    _rare: Row = field(default_factory=dict)

    def note(self, step: int, values: Row) -> None:
        """See every step, logged or not."""
        self._rare |= {name: value.tolist() for name, value in values.items() if _is_tree(name) and not np.isnan(value)}
        if "module_norms" in values and step % self.section.modules_every == 0:
            self._rare["module_norms"] = dict(zip(self.modules, values["module_norms"].tolist(), strict=True))

    def __call__(self, step: int, values: Row) -> Row:
        """The fields of a logged step, which was noted before."""
        hidden = {"by_bucket", "module_norms", "norm_baseline", "flagged_module"}
        row = {name: value.tolist() for name, value in values.items() if name not in hidden and not _is_tree(name)}
        by_bucket = values["by_bucket"]
        row["by_bucket"] = {
            str(edge): {
                name: value[at].tolist()
                for name, value in by_bucket.items()
                if not (_is_tree(name) and np.isnan(value[at]))
            }
            for at, edge in enumerate(self.edges)
            if by_bucket["padded_tokens"][at]
        }
        if "flags" in row:
            row["flags"] = [name for name, flag in zip(DETECTORS, row["flags"], strict=True) if flag]
            row["norm_quantiles"] = dict(zip(("p50", "p95", "p99"), values["norm_baseline"].tolist(), strict=True))
        row |= self._rare
        self._rare = {}
        return row


def _is_tree(name: str) -> bool:
    """Whether a value is NaN in the steps that did not look."""
    return name.startswith("ddtree_accept@")
