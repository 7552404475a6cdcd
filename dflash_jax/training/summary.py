"""The short tables at the end of a run and of an evaluation."""

from rich.console import Console
from rich.table import Table

from dflash_jax.decoding.evaluate import Report
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


def print_reports(reports: dict[str, Report], console: Console) -> None:
    """A row a file of prompts, and what looks wrong."""
    table = Table()
    for name in ("prompts", "acceptance", "pooled", "lossless", "foretold / realised", "training layout", "speed-up"):
        table.add_column(name, justify="left" if name == "prompts" else "right")
    table.add_column("draft / verify s", justify="right")
    for name, report in reports.items():
        lossless = {True: "yes", False: f"no ({len(report.mismatches)} differ)", None: "law only"}[report.lossless]
        layout = report.drafting.get("acceptance_length")
        seconds = (report.draft_seconds, report.verify_seconds)
        table.add_row(
            name,
            f"{report.acceptance_length:.3f}",
            f"{report.acceptance_length_pooled:.3f}",
            lossless,
            f"{report.foretold:.2f} / {report.realised:.2f}",
            "" if layout is None else f"{layout:.3f}",
            f"{report.speedup:.2f}",
            "" if None in seconds else " / ".join(f"{value:.1f}" for value in seconds),
        )
    console.print(table)
    for name, report in reports.items():
        for text in report.warnings:
            console.print(f"warning: {name}: {text}", highlight=False, soft_wrap=True)
        for mismatch in report.mismatches[:3]:
            gap = f"logit gap {mismatch.gap:.1e}"
            console.print(
                f"{name}: prompt {mismatch.prompt} differs at token {mismatch.position}, {gap}", soft_wrap=True
            )


_LINES = (
    ("acceptance length (held-out, greedy)", lambda report: f"{report.acceptance_length:.3f}"),
    ("  pooled over rounds", lambda report: f"{report.acceptance_length_pooled:.3f}"),
    ("lossless", lambda report: "yes" if report.lossless else f"no ({len(report.mismatches)} differ)"),
    ("prompts / new tokens", lambda report: f"{report.prompts} / {report.tokens}"),
    ("seconds plain / speculative", lambda r: f"{r.seconds_plain:.2f} / {r.seconds_speculative:.2f}"),
)
