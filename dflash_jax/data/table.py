"""An epoch's plan as a table to look at."""

from collections.abc import Sequence

from rich.table import Table

from dflash_jax.data.plan import BucketShare


def plan_table(shares: Sequence[BucketShare]) -> Table:
    """Bucket by bucket and in sum: rows, batches, shares of batches and of real tokens, and what is padding."""
    batches, tokens = sum(share.batches for share in shares), sum(share.tokens for share in shares)
    padded = sum(share.padded_tokens for share in shares)
    of_rows = tokens / sum(share.rows * share.edge for share in shares)
    title = f"padding efficiency {tokens / padded:.3f} ({of_rows:.3f} without the empty rows)"
    table = Table(title=title, title_justify="left")
    for name in ("bucket", "rows", "rows/batch", "batches", "of batches", "of tokens", "padding"):
        table.add_column(name, justify="right")
    for share in shares:
        table.add_row(
            str(share.edge),
            f"{share.rows:,}",
            str(share.rows_per_batch),
            f"{share.batches:,}",
            f"{share.batches / batches:.1%}",
            f"{share.tokens / tokens:.1%}",
            f"{1 - share.tokens / share.padded_tokens:.1%}" if share.batches else "",
        )
    table.add_section()
    rows = sum(share.rows for share in shares)
    table.add_row("all", f"{rows:,}", "", f"{batches:,}", "", f"{tokens:,}", f"{1 - tokens / padded:.1%}")
    return table
