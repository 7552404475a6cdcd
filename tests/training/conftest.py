"""What whole runs of the quickstart share: a workspace with an undisturbed run, and executables."""

import json

import pytest

from dflash_jax.training import loop, replay, setup
from tests.training.test_loop import recipe

KEPT = 3
"""Executables of so many recipes are kept for the next run."""


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A folder with the first 88 rows of the quickstart, and an uninterrupted run."""
    from dflash_jax.models.huggingface import embedded_path

    root = tmp_path_factory.mktemp("runs")
    rows = embedded_path("embedded:quickstart/train.jsonl").read_text().splitlines()[:88]
    (root / "rows.jsonl").write_text("\n".join(rows) + "\n")
    loop.train(recipe(root / "whole"))
    return root


@pytest.fixture(scope="session", autouse=True)
def executables_are_shared():
    """Runs with the same executables take those of the first: tracing and lowering is half of a short run's time.

    Few are kept: a run's executables take thousands of memory mappings, and a process has 65530.
    """
    engines = {}

    def build(config, models, course):
        tree = config.model_dump(mode="json")
        for section in ("run", "data", "evaluation", "telemetry", "export"):
            del tree[section]
        for key in ("checkpoint_every", "keep_checkpoints"):
            del tree["training"][key]
        key = (json.dumps(tree), course.buckets, course.steps, course.position.baseline_steps, models.meshes)
        engine = engines.pop(key, None) or setup.build(config, models, course)
        engines[key] = engine  # the last one used stands last
        if len(engines) > KEPT:
            del engines[next(iter(engines))]
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build", build)
        patch.setattr(replay, "build", build)
        yield
