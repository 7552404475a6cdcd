"""Whole runs of the quickstart: interrupted and resumed, resumed on another mesh, and what a run leaves behind."""

import io
import json
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from dflash_jax.config import load_config, parse_config
from dflash_jax.errors import Interrupted, UserError
from dflash_jax.parallel import mesh_of
from dflash_jax.sections import DevicesSection
from dflash_jax.telemetry.sinks import flatten
from dflash_jax.telemetry.stream import MetricStream
from dflash_jax.training.evaluation import EvaluationSettings, evaluate_files
from dflash_jax.training.export import export_drafter, open_drafter
from dflash_jax.training.loop import train
from dflash_jax.training.summary import print_reports, print_summary
from tests.telemetry.offline_run import rows_of_run

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
TRAINING_KEYS = {
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "accuracy",
    "accuracy_at",
    "streak",
    "acceptance_length",
    "tokens",
    "padded_tokens",
    "anchors",
    "top4_accuracy",
    "top8_accuracy",
    "top16_accuracy",
    "conditional_accuracy_at",
    "ddtree_streak4",
    "ddtree_streak8",
    "ddtree_accept@16",
    "ddtree_accept@64",
    "ddtree_accept@256",
    "by_bucket",
    "batch_ids",
    "clip_factor",
    "update_norm",
    "param_norm",
    "update_ratio",
    "norm_z",
    "norm_quantiles",
    "flags",
    "skipped",
    "skipped_in_row",
    "nonfinite",
    "spike_score",
    "bucket_share",
    "padding_efficiency",
}
CLOCK_KEYS = {
    "tokens_per_second",
    "step_seconds",
    "stages",
    "pool_depth",
    "pool_wait_seconds",
    "loader_wait_seconds",
    "utilisation",
    "bottleneck",
}
"""What depends on time, and differs from run to run."""


def recipe(folder, *overrides):
    """A short quickstart: fourteen steps of two micro-batches, epochs of eleven batches or so."""
    short = [
        f"run.folder={folder}",
        "training.steps=14",
        "training.accumulation=2",
        "training.batch_size=8",
        "training.anchors=8",
        "training.checkpoint_every=5",
        "drafter.layers=1",
        "metrics.every=7",
        "evaluation.prompts=null",
        "evaluation.every=null",
        "export.at_end=false",
        f"data.train={folder.parent / 'rows.jsonl'}",
    ]
    return load_config(QUICKSTART, [*short, *overrides])


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def values(rows):
    """Rows without what a clock says."""
    return [{key: row[key] for key in row if key not in CLOCK_KEYS} for row in rows]


def interrupt_after(step, monkeypatch, number=signal.SIGINT):
    """Send a signal while the run pushes the metrics of `step`."""
    push = MetricStream.push

    def push_and_signal(stream, at, *values):
        push(stream, at, *values)
        if at == step:
            signal.raise_signal(number)

    monkeypatch.setattr(MetricStream, "push", push_and_signal)


def test_run_folder(workspace):
    folder = workspace / "whole"
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 15))
    trees = {key for key in TRAINING_KEYS if key.startswith("ddtree_accept")}
    assert all(row.keys() == (TRAINING_KEYS | CLOCK_KEYS) - (trees if row["step"] % 7 else set()) for row in rows)
    assert all(len(row["accuracy_at"]) == 7 and row["anchors"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert yaml.safe_load((folder / "config.yaml").read_text())["training"]["steps"] == 14
    events = [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert events == ["prepared", "started", "finished"]
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"5", "10", "14"}


def test_another_objective(workspace):
    """The target's distribution as label, D-PACE, layers made anew: trained, evaluated, and kept by a resumed run."""
    changes = (
        *("training.loss=lk", "training.position_weights=d_pace", "training.loss_decay_gamma=null"),
        *("training.remat=layer", "training.attention=blocked", "training.steps=6"),
        *("evaluation.prompts=embedded:quickstart/heldout.jsonl", "evaluation.limit=8", "evaluation.max_new_tokens=16"),
    )
    folder = workspace / "lk"
    summary = train(recipe(folder, *changes))
    rows = rows_of(folder)
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 6
    assert steps[-1]["loss"] < steps[0]["loss"]
    # At first a random drafter: -log of the mass that it shares with the target, of 15 labels a block at most.
    plain = rows_of(workspace / "whole")[0]
    assert steps[0]["anchors"] == plain["anchors"]
    assert steps[0]["loss"] != pytest.approx(plain["loss"], rel=1e-3)
    assert summary.after.lossless

    def quiet(total):
        return nullcontext(lambda done: None)

    how = EvaluationSettings(max_new_tokens=16, limit=8, batch_size=8)
    prompts = "embedded:quickstart/heldout.jsonl"
    report = evaluate_files("embedded:quickstart", str(folder), [prompts], how, DevicesSection(simulate=8), quiet)[
        prompts
    ]
    assert report.drafting["loss"] == pytest.approx(rows[-1]["heldout/loss"], rel=1e-4)
    with pytest.raises(UserError, match=r"training\.loss was 'lk' and is 'cross_entropy'; a resumed run must keep it"):
        train(recipe(folder, *changes, "training.loss=cross_entropy", "training.steps=8"), resume=True)


@pytest.mark.parametrize("step", [5, 8], ids=["at a checkpoint", "between checkpoints"])
def test_resume_equals_uninterrupted(workspace, step, monkeypatch):
    """Losses, norms and all other values from there on are equal bit for bit; nothing is written twice."""
    folder = workspace / f"interrupted-{step}"
    with monkeypatch.context() as patch:
        interrupt_after(step, patch)
        with pytest.raises(Interrupted, match=f"step {step}.*--resume"):
            train(recipe(folder))
    assert [row["step"] for row in rows_of(folder)] == list(range(1, step + 1))
    train(recipe(folder), resume=True)
    assert values(rows_of(folder)) == values(rows_of(workspace / "whole"))


def test_crash_leaves_the_last_checkpoint(workspace, monkeypatch):
    """An exception in the loop ends the run with its own traceback; the run goes on from the checkpoint before."""
    folder = workspace / "crashed"
    with monkeypatch.context() as patch:
        push = MetricStream.push

        def fail(stream, at, *values):
            push(stream, at, *values)
            if at == 7:
                raise RuntimeError("the machine caught fire")

        patch.setattr(MetricStream, "push", fail)
        with pytest.raises(RuntimeError, match="caught fire"):
            train(recipe(folder))
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"5"}
    assert [row["step"] for row in rows_of(folder)] == list(range(1, 8))
    train(recipe(folder), resume=True)
    assert values(rows_of(folder)) == values(rows_of(workspace / "whole"))


def test_resume_on_another_mesh(workspace, monkeypatch):
    """The checkpoint is of no mesh: a run begun on 8x1x1 goes on on 2x2x2 with the same losses to 1e-4."""
    folder = workspace / "moved"
    with monkeypatch.context() as patch:
        interrupt_after(5, patch, signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM"):
            train(recipe(folder))
    train(recipe(folder, "devices.fsdp=2", "devices.tensor=2"), resume=True)
    actual = [row["loss"] for row in rows_of(folder)]
    np.testing.assert_allclose(actual, [row["loss"] for row in rows_of(workspace / "whole")], rtol=1e-4)


def test_refusals(workspace):
    """A folder with a run is not overwritten; a complete run, and a changed course, are not resumed."""
    whole = workspace / "whole"
    with pytest.raises(UserError, match="already holds a run; add --resume"):
        train(recipe(whole))
    with pytest.raises(UserError, match="complete at step 14"):
        train(recipe(whole), resume=True)
    with pytest.raises(UserError, match=r"training.batch_size was 8 and is 16"):
        train(recipe(whole, "training.steps=20", "training.batch_size=16"), resume=True)
    with pytest.raises(UserError, match="holds no run to resume"):
        train(recipe(workspace / "absent"), resume=True)


def test_evaluation_export_and_reopening(workspace):
    """A run that evaluates and exports; its report, its folder, and the drafter opened from each place it lies in."""
    folder = workspace / "evaluated"
    prompts = ["evaluation.prompts=embedded:quickstart/heldout.jsonl", "evaluation.limit=4"]
    summary = train(
        recipe(
            folder,
            *prompts,
            "evaluation.max_new_tokens=16",
            "evaluation.every=2",
            "export.at_end=true",
            "telemetry.wandb=offline",
            "evaluation.keep_best=true",
        )
    )
    rows = [row for row in rows_of(folder) if "eval/acceptance_length" in row]
    assert [row["step"] for row in rows] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert all(row["eval/lossless"] is True and row["eval/acceptance_length"] >= 1 for row in rows)
    assert summary.after.acceptance_length == rows[-1]["eval/acceptance_length"]
    assert summary.export == folder / "export"
    reached = {row["step"]: row["eval/acceptance_length"] for row in rows}
    (kept,) = (int(path.name) for path in (folder / "best").iterdir())
    assert kept == min(step for step, value in reached.items() if value == max(reached.values()))
    told = {row["_step"]: {key for key in row if not key.startswith("_")} for row in rows_of_run(folder)}
    assert told.keys() == set(range(15))
    with_buckets = []
    for row in rows_of(folder):
        by_bucket = flatten({"by_bucket": row.pop("by_bucket", {})}).keys()
        assert flatten(row).keys() <= told[row["step"]]
        with_buckets += [row["step"]] if by_bucket and by_bucket <= told[row["step"]] else []
    assert with_buckets == [1, 11]

    text = io.StringIO()
    print_summary(summary, Console(file=text, width=100))
    assert f"{summary.after.acceptance_length:.3f}" in text.getvalue()

    devices, advanced = DevicesSection(), []
    file = "embedded:quickstart/heldout.jsonl"
    settings = EvaluationSettings(max_new_tokens=16, limit=4)
    reports = [
        evaluate_files(
            "embedded:quickstart", str(place), [file], settings, devices, lambda total: nullcontext(advanced.append)
        )[file]
        for place in (folder, folder / "checkpoints" / "14", folder / "export", folder / "best")
    ]
    assert reports[3].acceptance_length == max(reached.values())
    assert reports[0].histogram == reports[1].histogram
    assert reports[0].acceptance_length == summary.after.acceptance_length
    assert reports[2].lossless
    drafting = reports[0].drafting
    assert drafting["streak"] == rows[-1]["heldout/streak"]
    np.testing.assert_allclose(drafting["streak"], sum(reports[0].accepted_at), rtol=1e-5)
    np.testing.assert_allclose(drafting["loss"], rows[-1]["heldout/loss"], rtol=1e-5)
    assert TRAINING_KEYS & drafting.keys() == set(drafting)
    assert sum(advanced) == 4 * 2 * 4
    assert not reports[0].warnings
    print_reports({"prompts": reports[0]}, Console(file=text, width=160))
    assert f"{reports[0].realised:.2f}" in text.getvalue()
    assert json.loads(json.dumps(reports[0].as_json()))["accepted_at"] == list(reports[0].accepted_at)
    arguments = replace(settings, template_arguments={"thinking": True}, block_size=12)
    (odd,) = evaluate_files(
        "embedded:quickstart", str(folder), [file], arguments, devices, lambda total: nullcontext(advanced.append)
    ).values()
    assert "block size 12 is larger than trained (8)" in odd.warnings
    assert "tokenizer, chat template or its arguments differ from those of the training data" in odd.warnings


def test_start_from_an_exported_drafter(workspace):
    """`drafter.init_from` brings shape and weights: the first loss is a trained one, and the config loads again."""
    mesh = mesh_of((1, 1, 1))
    drafter, position = open_drafter(workspace / "whole", mesh)
    assert position.step == 14
    export_drafter(drafter, workspace / "published", mesh)
    tree = recipe(workspace / "continued", "training.steps=1").model_dump(mode="json")
    tree["drafter"] = {"init_from": str(workspace / "published")}
    train(parse_config(tree, "here"))
    (first,) = rows_of(workspace / "continued")
    fresh = rows_of(workspace / "whole")
    assert first["tokens"] == fresh[0]["tokens"]
    assert first["loss"] < 0.8 * fresh[0]["loss"]
    again = load_config(workspace / "continued" / "config.yaml")
    assert again.drafter.init_from == str(workspace / "published")
