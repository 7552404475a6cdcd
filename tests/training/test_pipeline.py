"""The pipeline as a whole: what may change nothing does, memory is bounded, failures come through."""

import gc
import json
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from dflash_jax.config import load_config
from dflash_jax.data.loader import BatchSource
from dflash_jax.errors import Interrupted, UserError
from dflash_jax.sections import PipelineSection
from dflash_jax.training.compiled import CompiledStep
from dflash_jax.training.loop import train
from dflash_jax.training.pipeline import Pipeline
from dflash_jax.training.pool import FeaturePool
from tests.training.test_loop import QUICKSTART, interrupt_after, rows_of, values

ROWS, STEPS = 24, 8
"""24 rows divide over meshes of 8, 6, 4 and 2 devices."""
EDGES = (112, 160)
SLOTS, MIN_READY = 6, 4
SPLIT = ("pipeline.placement=split", "pipeline.target_devices=6")
STEP_KEYS = ("loss", "grad_norm", "accuracy", "tokens", "padded_tokens", "anchors", "bucket_share")


def recipe(folder, *overrides):
    """Epochs of about eleven batches in three buckets, two batches a step: a run crosses the end of one epoch."""
    short = [
        f"run.folder={folder}",
        f"training.steps={STEPS}",
        "training.accumulation=2",
        f"training.batch_size={ROWS}",
        "training.anchors=6",
        "training.checkpoint_every=3",
        "drafter.layers=1",
        "metrics.blocks=0",
        f"data.bucket_edges={list(EDGES)}",
        f"data.train={folder.parent / 'rows.jsonl'}",
        "evaluation.prompts=null",
        "evaluation.every=null",
        "export.at_end=false",
        "pipeline.target_devices=null",
        f"pipeline.pool_size={SLOTS}",
        f"pipeline.min_ready={MIN_READY}",
    ]
    return load_config(QUICKSTART, [*short, *overrides])


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Rows of the quickstart, and an undisturbed run over them."""
    from dflash_jax.models.huggingface import embedded_path

    root = tmp_path_factory.mktemp("pipeline")
    rows = embedded_path("embedded:quickstart/train.jsonl").read_text().splitlines()[: 10 * ROWS]
    (root / "rows.jsonl").write_text("\n".join(rows) + "\n")
    train(recipe(root / "whole"))
    return root


def course(folder):
    return [{key: row[key] for key in STEP_KEYS} for row in rows_of(folder)]


FIFO = ("pipeline.draw=fifo", "pipeline.min_ready=1")


@pytest.fixture(scope="module")
def fifo(workspace):
    train(recipe(workspace / "fifo", *FIFO))
    return course(workspace / "fifo")


@pytest.mark.parametrize(
    "overrides",
    [("pipeline.pool_size=1", "data.reader_threads=1"), ("pipeline.pool_size=12", "data.reader_threads=4")],
    ids=lambda overrides: overrides[0],
)
def test_pool_and_threads_change_no_bit(workspace, fifo, overrides):
    folder = workspace / overrides[0]
    train(recipe(folder, *FIFO, *overrides))
    assert course(folder) == fifo


def test_pool_size_changes_no_bit_of_a_deficit_draw_either(workspace):
    folder = workspace / "large"
    train(recipe(folder, "pipeline.pool_size=11"))
    assert course(folder) == course(workspace / "whole")


@pytest.mark.parametrize("target_devices", [6, 4])
def test_placement_changes_nothing(workspace, target_devices):
    """The same batches; losses and norms to 1e-5 across mesh shapes, as long as rounding has not been trained on."""
    folder = workspace / f"split-{target_devices}"
    train(recipe(folder, "pipeline.placement=split", f"pipeline.target_devices={target_devices}"))
    split, whole = course(folder), course(workspace / "whole")
    for key in ("tokens", "padded_tokens", "anchors", "bucket_share"):
        assert [row[key] for row in split] == [row[key] for row in whole]
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([row[key] for row in split], [row[key] for row in whole], rtol=1e-5)
    last = rows_of(folder)[-1]
    assert 1 <= last["recommended_target_devices"] <= 7


def trained_batches(monkeypatch):
    """Records the ids of the batches that the drafter consumes, in order."""
    ids, accumulate = [], Pipeline.accumulate

    def record(pipeline, state):
        state, batch = accumulate(pipeline, state)
        ids.append(batch.batch_id)
        return state, batch

    monkeypatch.setattr(Pipeline, "accumulate", record)
    return ids


def test_placement_and_pool_train_on_the_same_batches(workspace, monkeypatch):
    """By their ids; the default draw takes another order than the plan's, `fifo` takes the plan's."""
    ids = trained_batches(monkeypatch)
    orders = {}
    for name, overrides in {
        "colocated": (),
        "split": SPLIT,
        "fifo split": (*FIFO, *SPLIT),
    }.items():
        train(recipe(workspace / f"ids {name}", *overrides))
        orders[name] = tuple(ids)
        ids.clear()
    assert orders["colocated"] == orders["split"]
    assert orders["fifo split"] == tuple(range(2 * STEPS))
    assert sorted(orders["colocated"]) == list(range(2 * STEPS))


def test_split_runs_each_model_on_its_own_devices(workspace, monkeypatch):
    seen = {}
    accumulate = CompiledStep.accumulate

    def spy(compiled, state, tables, features):
        for name, tree in (("state", state), ("tables", tables), ("features", features)):
            seen[name] = {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}
        return accumulate(compiled, state, tables, features)

    monkeypatch.setattr(CompiledStep, "accumulate", spy)
    train(recipe(workspace / "apart", "training.steps=1", "pipeline.placement=split", "pipeline.target_devices=6"))
    assert seen["state"] == seen["tables"] == seen["features"] == set(jax.devices()[6:])


def test_fusion_as_one_product(workspace, monkeypatch):
    """One concatenated product gives the same losses and norms, and its checkpoint resumes as a sum of products."""
    folder = workspace / "packed"
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        with pytest.raises(Interrupted):
            train(recipe(folder, "pipeline.split_fc=false"))
    train(recipe(folder), resume=True)
    for key in ("loss", "grad_norm"):
        packed, split = ([row[key] for row in rows_of(workspace / name)] for name in ("packed", "whole"))
        np.testing.assert_allclose(packed, split, rtol=1e-5)


@pytest.mark.parametrize("placement", ["colocated", "split"])
def test_features_in_memory_never_exceed_the_slots(workspace, placement, monkeypatch):
    """Bytes of all feature-like arrays alive on the drafter's devices, before and after a batch is handed over, enters
    the pool and is used."""
    drafter_devices = set(jax.devices()[6:]) if placement == "split" else set(jax.devices())
    batches = []

    def count():
        live = 0
        for array in jax.live_arrays():
            # Arrays of one device are views of shards.
            if array.ndim == 3 and array.shape[1] in EDGES and len(array.devices()) > 1:
                shard = np.prod(array.sharding.shard_shape(array.shape)) * 4
                live += shard * len(array.devices() & drafter_devices)
        # In units of the largest possible batch of features: three taps of width 128.
        batches.append(live / (3 * ROWS * EDGES[-1] * 128 * 4))

    def counted(owner, name):
        works = getattr(owner, name)

        def counting(*arguments):
            count()
            result = works(*arguments)
            count()
            return result

        monkeypatch.setattr(owner, name, counting)

    gc.collect()
    counted(FeaturePool, "put")
    counted(FeaturePool, "give_back")
    counted(CompiledStep, "hand_over")
    counted(CompiledStep, "accumulate")
    train(
        recipe(workspace / f"counted-{placement}", "data.bucket_edges=[160]", *(SPLIT if placement == "split" else ()))
    )
    assert len(batches) == 2 * 4 * 2 * STEPS
    assert max(batches) <= SLOTS
    assert max(batches) > MIN_READY - 1


def test_no_more_than_two_target_passes_are_under_way(workspace, monkeypatch):
    """A target that never reports an end: the host waits for the oldest pass instead of dispatching a third."""
    under_way, waited = [], []

    class Slow:
        def __init__(self, output):
            self.output, self.done = output, False

        def is_ready(self):
            return self.done

        def block_until_ready(self):
            if threading.current_thread() is threading.main_thread() and not self.done:
                waited.append(under_way.index(self))
                under_way.remove(self)
                self.done = True
            self.output.block_until_ready()

    features = CompiledStep.features

    def slow(compiled, params, batch):
        units, output = features(compiled, params, batch)
        under_way.append(Slow(output))
        assert len(under_way) <= 2
        return units, under_way[-1]

    monkeypatch.setattr(CompiledStep, "features", slow)
    train(recipe(workspace / "slow"))
    assert set(waited) == {0}
    assert course(workspace / "slow") == course(workspace / "whole")


def test_resume_with_another_pool_loses_no_batch(workspace, monkeypatch):
    """Interrupted twice, the second time before all that had waited was read again into a smaller pool."""
    folder = workspace / "smaller"
    ids = trained_batches(monkeypatch)
    for step, slots in ((2, 11), (4, MIN_READY)):
        with monkeypatch.context() as patch:
            interrupt_after(step, patch)
            with pytest.raises(Interrupted):
                train(recipe(folder, f"pipeline.pool_size={slots}"), resume=step > 2)
    train(recipe(folder), resume=True)
    assert sorted(ids) == list(range(2 * STEPS))
    assert values(rows_of(folder)) == values(rows_of(workspace / "whole"))


def test_resume_under_split_placement(workspace, monkeypatch):
    folder = workspace / "split-resumed"
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        with pytest.raises(Interrupted):
            train(recipe(folder, *SPLIT))
    train(recipe(folder, *SPLIT), resume=True)
    assert course(folder) == course(workspace / "split-6")


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.order=sequential",),
        (
            "data.bucket_edges=null",
            "data.buckets=2",
            "training.batch_size=null",
            f"training.tokens_per_batch={ROWS * 160}",
        ),
    ],
    ids=lambda overrides: overrides[0],
)
def test_other_plans_train(workspace, overrides):
    folder = workspace / overrides[0]
    train(recipe(folder, "training.steps=2", *overrides))
    other, whole = ([(row["tokens"], row["loss"]) for row in course(workspace / name)] for name in (folder, "whole"))
    assert other != whole[:2]


FAILURES = {
    "loader": (BatchSource, "__getitem__"),
    "target": (CompiledStep, "features"),
    "drafter": (CompiledStep, "accumulate"),
}


def test_a_failure_on_the_device_ends_the_run(workspace, monkeypatch):
    """An output that turns out to be an error long after the dispatch: where it is waited for, it is raised."""

    class Failed:
        def is_ready(self):
            return False

        def block_until_ready(self):
            raise RuntimeError("the device fell off the bus")

    accumulate, calls = CompiledStep.accumulate, []

    def fails_late(*arguments):
        state, finished = accumulate(*arguments)
        calls.append(None)
        return state, Failed() if len(calls) == 2 * STEPS - 6 else finished

    folder = workspace / "late"
    with monkeypatch.context() as patch:
        patch.setattr(CompiledStep, "accumulate", fails_late)
        with pytest.raises(RuntimeError, match="fell off the bus"):
            train(recipe(folder, "pipeline.pool_size=4"))
    train(recipe(folder), resume=True)
    assert values(rows_of(folder)) == values(rows_of(workspace / "whole"))


@pytest.mark.parametrize("stage", FAILURES)
def test_a_failure_ends_the_run_with_its_own_traceback(workspace, stage, monkeypatch):
    """Nothing hangs; the last checkpoint is good, and the run resumed from it is the undisturbed one."""
    owner, name = FAILURES[stage]
    folder = workspace / f"failed-{stage}"
    with monkeypatch.context() as patch:
        works, calls = getattr(owner, name), []

        def fails_late(*arguments):
            calls.append(None)
            if len(calls) == 2 * STEPS - 2:
                raise RuntimeError(f"the {stage} is out of order")
            return works(*arguments)

        patch.setattr(owner, name, fails_late)
        with pytest.raises(RuntimeError, match=f"the {stage} is out of order") as failure:
            train(recipe(folder))
        assert any(entry.name == "fails_late" for entry in failure.traceback)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "failed"
    assert stage in events[-1]["error"]
    train(recipe(folder), resume=True)
    assert values(rows_of(folder)) == values(rows_of(workspace / "whole"))


@pytest.mark.parametrize("step", [2, 3], ids=["between checkpoints", "at a checkpoint"])
def test_resume_in_mid_epoch_with_a_full_pool(workspace, step, monkeypatch):
    """The batches that waited are computed again; draws, losses and norms go on bit for bit."""
    folder = workspace / f"resumed-{step}"
    with monkeypatch.context() as patch:
        interrupt_after(step, patch)
        with pytest.raises(Interrupted):
            train(recipe(folder))
    position = json.loads((folder / "checkpoints" / str(step) / "position" / "metadata").read_text())
    reading = position["reading"]
    assert len(reading["waiting"]) >= MIN_READY - 1
    assert reading["next"] == 2 * step + len(reading["waiting"])
    train(recipe(folder), resume=True)
    assert values(rows_of(folder)) == values(rows_of(workspace / "whole"))


def test_noise(workspace):
    """Level 0 is bit-equal to off, raising it changes the loss, and a resumed run has the same level."""
    on = ("noise.distribution=uniform", "noise.initial_level=0.0", "noise.ramp_ratio=0.5")
    short = "training.steps=4"
    train(recipe(workspace / "off", short))
    train(recipe(workspace / "zero", short, "noise.distribution=uniform", "noise.level=0.0"))
    train(recipe(workspace / "noisy", short, *on, "noise.level=2.0"))
    assert course(workspace / "zero") == course(workspace / "off")
    off, noisy = course(workspace / "off"), rows_of(workspace / "noisy")
    assert noisy[0]["loss"] == off[0]["loss"]
    assert noisy[1]["loss"] != off[1]["loss"]
    assert [row["feature_noise"] for row in noisy] == [0.0, 1.0, 2.0, 2.0]


def test_noise_after_a_resume(workspace, monkeypatch):
    on = ("training.steps=4", "noise.distribution=gaussian", "noise.level=2.0", "noise.ramp_ratio=1.0")
    train(recipe(workspace / "noise-whole", *on))
    folder = workspace / "noise-resumed"
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        with pytest.raises(Interrupted):
            train(recipe(folder, *on))
    train(recipe(folder, *on), resume=True)
    assert values(rows_of(folder)) == values(rows_of(workspace / "noise-whole"))


def test_no_compile_after_warm_up(workspace):
    """Two epochs over all buckets; the counter sees everything but evaluations and checkpoints."""
    folder = workspace / "two-epochs"
    summary = train(recipe(folder, "training.steps=null", "training.epochs=2"))
    assert summary.compiles == []
    seen = {edge for row in rows_of(folder) for edge in row["bucket_share"]}
    assert seen == set(map(str, EDGES))


def test_a_foreign_shape_raises_with_the_shape(workspace, monkeypatch):
    read = BatchSource.__getitem__

    def foreign(source, batch_id):
        batch = read(source, batch_id)
        cut = replace(batch.arrays, tokens=batch.arrays.tokens[:, :40], loss_mask=batch.arrays.loss_mask[:, :40])
        return replace(batch, arrays=cut)

    monkeypatch.setattr(BatchSource, "__getitem__", foreign)
    with pytest.raises(ValueError, match=rf"{ROWS}x40 tokens was not compiled"):
        train(recipe(workspace / "foreign"))


def test_a_compile_in_the_loop_raises(workspace, monkeypatch):
    """Whatever is traced between warm-up and end: here a stray jnp function on the step's path."""
    features = CompiledStep.features

    def stray(compiled, params, batch):
        jax.jit(lambda tokens: tokens * 12345)(batch.tokens)
        return features(compiled, params, batch)

    monkeypatch.setattr(CompiledStep, "features", stray)
    with pytest.raises(RuntimeError, match="no_tracing"):
        train(recipe(workspace / "stray"))


def test_accounting(workspace):
    rows = rows_of(workspace / "whole")
    for stage in ("loader", "target", "drafter"):
        counts = [row["stages"][stage] for row in rows]
        assert all(count["busy_seconds"] >= 0 and count["waiting_seconds"] >= 0 for count in counts)
        # The last window may close before the thread that watches has seen its end.
        assert sum(count["batches"] for count in counts) == 2 * STEPS
    consumed = [row["stages"]["drafter"] for row in rows]
    assert sum(count["tokens"] for count in consumed) == sum(row["tokens"] for row in rows)
    for row in rows:
        np.testing.assert_allclose(sum(row["bucket_share"].values()), 1.0)
        np.testing.assert_allclose(row["padding_efficiency"], row["tokens"] / row["padded_tokens"])
        assert row["bottleneck"] in ("loader", "target", "drafter", "host")
        assert 0 <= row["pool_depth"] <= SLOTS
        assert "recommended_target_devices" not in row


def test_window_of_several_steps(workspace, monkeypatch):
    """`log_every` sums over its steps, across an interruption too."""
    folder = workspace / "windows"
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        with pytest.raises(Interrupted):
            train(recipe(folder, "telemetry.log_every=2"))
    train(recipe(folder, "telemetry.log_every=2"), resume=True)
    rows, single = rows_of(folder), rows_of(workspace / "whole")
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    for row, first, second in zip(rows, single[::2], single[1::2], strict=True):
        edges = {*first["bucket_share"], *second["bucket_share"]}
        shares = {e: (first["bucket_share"].get(e, 0) + second["bucket_share"].get(e, 0)) / 2 for e in edges}
        assert row["bucket_share"] == shares


def test_too_large_a_pool_is_refused_with_the_arithmetic(workspace):
    with pytest.raises(
        UserError, match=r"100000 feature batches of .* GiB .* = .* GiB, but a device has .*; lower .* to at most \d+"
    ):
        train(recipe(workspace / "huge", "pipeline.pool_size=100000"))
    with pytest.raises(UserError, match=r"100000000 feature batches take .* GiB of pinned host memory, the host has"):
        train(recipe(workspace / "pinned-huge", "pipeline.memory=pinned_host", "pipeline.pool_size=100000000"))


def test_pinned_host_memory(workspace, monkeypatch):
    """Features wait in host memory, at most two batches of them are back on the devices, and nothing else changes."""
    kinds, in_use, put, draw = set(), [], FeaturePool.put, FeaturePool.draw

    def look(pool, item):
        kinds.update(tap.sharding.memory_kind for tap in item.features.taps)
        put(pool, item)

    def count(pool):
        in_use.append(pool.in_use)
        return draw(pool)

    monkeypatch.setattr(FeaturePool, "put", look)
    monkeypatch.setattr(FeaturePool, "draw", count)
    train(recipe(workspace / "pinned", "pipeline.memory=pinned_host"))
    assert kinds == {"pinned_host"}
    assert max(in_use) < 2
    assert course(workspace / "pinned") == course(workspace / "whole")


def test_sections_that_contradict_themselves():
    with pytest.raises(ValueError, match="min_ready 10 is larger than pool_size 4"):
        PipelineSection(pool_size=4)
    with pytest.raises(ValueError, match="target_devices goes with placement: split"):
        PipelineSection(placement="split")
    with pytest.raises(ValueError, match="target_devices goes with placement: split"):
        PipelineSection(target_devices=3)
