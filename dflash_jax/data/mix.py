"""Of which lengths the batches of some steps were, and how full."""

from dataclasses import dataclass, field
from typing import Any

from dflash_jax.data.loader import LoadedBatch


@dataclass(frozen=True)
class Mix:
    """What the batches of a window of steps were."""

    batches: dict[int, int] = field(default_factory=dict)
    """Number of each bucket edge."""
    tokens: int = 0
    padded_tokens: int = 0

    def plus(self, batch: LoadedBatch) -> "Mix":
        """One more batch."""
        batches = self.batches | {batch.edge: self.batches.get(batch.edge, 0) + 1}
        return Mix(batches, self.tokens + batch.tokens, self.padded_tokens + batch.padded_tokens)

    def as_row(self) -> dict[str, Any]:
        """Fields of a row."""
        total = sum(self.batches.values())
        return {
            "bucket_share": {str(edge): count / total for edge, count in sorted(self.batches.items())},
            "padding_efficiency": self.tokens / max(self.padded_tokens, 1),
        }
