"""The short table at the end of a run."""

from rich.console import Console
from rich.table import Table

from dflash_jax.training.loop import Summary


def print_summary(summary: Summary, console: Console) -> None:
    """Steps, tokens, seconds, and what decoding with the drafter gives before and after."""
    table = Table(title=f"run {summary.folder}", title_justify="left")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    if summary.after is not None:
        for label, show in _LINES:
            before = "" if summary.before is None else show(summary.before)
            table.add_row(label, before, show(summary.after))
        table.add_section()
    table.add_row("optimizer steps", "0", str(summary.steps))
    table.add_row("tokens trained on", "0", f"{summary.tokens:,}")
    table.add_row("training seconds", "", f"{summary.training_seconds:.0f}")
    console.print(table)
    if summary.export is not None:
        rounding = f"{summary.export_rounding:.1e}"
        console.print(f"exported to {summary.export} (read back and compared; bfloat16 moves logits by {rounding})")


_LINES = (
    ("acceptance length (held-out, greedy)", lambda report: f"{report.acceptance_length:.3f}"),
    ("  pooled over rounds", lambda report: f"{report.acceptance_length_pooled:.3f}"),
    ("lossless", lambda report: "yes" if report.lossless else f"no ({len(report.mismatches)} differ)"),
    ("prompts / new tokens", lambda report: f"{report.prompts} / {report.tokens}"),
    ("seconds plain / speculative", lambda r: f"{r.seconds_plain:.2f} / {r.seconds_speculative:.2f}"),
)
