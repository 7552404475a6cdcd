"""What scripts say to a user's mistake: one line that begins with `error:`, exit code 2, no traceback."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dflash_jax import cli
from dflash_jax.models.architecture import FULL, SLIDING
from tests.fixtures import ROWS, conversation, save_tiny_drafter, write_jsonl
from tests.helpers import tiny_target

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py"))


def assert_one_error_line(code, out, err):
    """Returns the line, without what progress bars have written."""
    assert code == 2, err
    assert "Traceback" not in err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    assert err.rstrip("\n").endswith(errors[0]), "the error is the last thing said"
    return errors[0]


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a script inside this process; returns exit code, stdout and stderr."""

    def call(script, *arguments):
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [f"scripts/{script}.py", *map(str, arguments)])
        code = 0
        try:
            runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def error_of(call):
    """The error line of a script that must fail."""
    return lambda script, *arguments: assert_one_error_line(*call(script, *arguments))


def start(script, *arguments):
    """Runs a script as a user does."""
    command = [sys.executable, f"scripts/{script}.py", *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def rows(tmp_path):
    return write_jsonl(tmp_path / "rows.jsonl", *[conversation("One?", "The sum of one and two is three.")] * 8)


@pytest.fixture
def recipe(tmp_path, target_folder, rows):
    """A complete recipe for the tiny target."""
    tree = {
        "run": {"folder": str(tmp_path / "run")},
        "target": {"path": str(target_folder)},
        "drafter": {"layers": 1, "block_size": 4, "mask_token_id": ROWS - 1, "target_layer_ids": [0, 2]},
        "data": {"train": str(rows), "max_length": 64},
        "training": {"steps": 1, "batch_size": 8, "anchors": 4, "loss_decay_gamma": 4},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def broken_target(tmp_path, target_folder):
    """A copy of the tiny target whose weights were cut short."""
    folder = tmp_path / "broken"
    shutil.copytree(target_folder, folder)
    os.truncate(folder / "model.safetensors", 1000)
    return folder


@pytest.mark.parametrize(("there", "given", "starts"), [([], None, 1), ([], "", 0), (["nvidia0"], None, 0)], ids=str)
def test_a_script_starts_again_with_its_allocator(call, monkeypatch, tmp_path, there, given, starts):
    """Once, on a CPU, unless the user has set it; with the interpreter's own arguments."""
    started = []
    for name in there:
        (tmp_path / name).touch()
    monkeypatch.setattr(cli, "ACCELERATORS", [f"{tmp_path}/*"[1:]])
    monkeypatch.setattr(cli, "Path", lambda _: Path("/"))
    monkeypatch.setattr(cli.os, "execv", lambda *arguments: started.append(arguments))
    monkeypatch.delenv("GLIBC_TUNABLES")
    if given is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    for _ in range(2):
        assert call("train", "--help")[0] == 0
    assert started == [(sys.executable, [sys.executable, *sys.orig_argv[1:]])] * starts
    assert os.environ.get("GLIBC_TUNABLES") == (cli.ALLOCATOR if starts else given)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(call, script):
    code, out, err = call(script, "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: ")
    assert f"{script}.py [-h]" in out


class TestAsProcesses:
    """Three of them end to end: nothing else may stand on stderr, and no library may add to it."""

    def test_missing_config_file(self):
        code, out, err = start("train", "--config", "configs/absent.yaml")
        assert (code, out) == (2, "")
        assert err == ("error: config configs/absent.yaml: No such file or directory; give an existing YAML file\n")

    def test_corrupt_safetensors(self, broken_target, rows, tmp_path):
        code, out, err = start(
            "generate",
            *("--target", broken_target, "--prompts", rows, "--output", tmp_path / "answers.jsonl"),
            *("--max-new-tokens", 8, "--simulate", 2),
        )
        assert (code, out) == (2, "")
        path = re.escape(str(broken_target / "model.safetensors"))
        assert re.fullmatch(rf"error: {path} is not a readable safetensors file \(.*\); fetch it again\n", err)

    def test_more_devices_than_there_are(self, recipe):
        code, out, err = start("train", "--config", recipe, "devices.data=2", "devices.tensor=2")
        assert (code, out) == (2, "")
        assert err.startswith("error: devices: the mesh 2x1x2 asks for 4 devices, 1 are here; ")
        assert err.count("\n") == 1


class TestTrain:
    def test_unknown_key(self, error_of, recipe):
        line = error_of("train", "--config", recipe, "training.stepz=3")
        assert "unknown key training.stepz; allowed here: steps, epochs" in line

    def test_wrong_type(self, error_of, recipe):
        line = error_of("train", "--config", recipe, "training.batch_size=many")
        assert "training.batch_size: 'many' is not allowed" in line

    def test_mask_token_outside_the_table(self, error_of, recipe):
        line = error_of("train", "--config", recipe, f"drafter.mask_token_id={ROWS}")
        assert f"drafter: mask_token_id {ROWS} is outside the target's {ROWS} embedding rows" in line

    def test_tapped_layer_out_of_range(self, error_of, recipe):
        line = error_of("train", "--config", recipe, "drafter.target_layer_ids=[1, 4]")
        assert "target_layer_ids [1, 4] leave the target's layers 0..3" in line

    def test_default_taps_of_a_target_that_is_too_small(self, error_of, recipe):
        assert "must rise strictly" in error_of("train", "--config", recipe, "drafter.target_layer_ids=null")

    def test_fewer_devices_than_the_mesh_asks(self, error_of, recipe):
        line = error_of("train", "--config", recipe, "devices.data=16")
        assert "the mesh 16x1x1 asks for 16 devices, 8 are here" in line

    def test_mesh_that_does_not_divide_the_devices(self, error_of, recipe):
        assert "fsdp x tensor = 3 does not divide the 8 devices" in error_of(
            "train", "--config", recipe, "devices.fsdp=3"
        )

    def test_mesh_that_does_not_divide_the_model(self, error_of, recipe):
        assert "devices.tensor: 4 does not divide the target's num_key_value_heads 2" in error_of(
            "train", "--config", recipe, "devices.tensor=4"
        )

    def test_batch_that_does_not_divide(self, error_of, recipe):
        line = error_of("train", "--config", recipe, "training.batch_size=6")
        assert "training.batch_size 6 is no multiple of 8, the number of parts" in line

    @pytest.mark.parametrize(
        ("overrides", "complaint"),
        [
            (["data.bucket_edges=[]"], "bucket_edges is empty"),
            (["data.bucket_edges=[2, 64]"], "the edge 2 is below the block size 4"),
            (["data.bucket_edges=[30, 64]"], "30 is no multiple of 4"),
            (["data.bucket_edges=[32, 48]"], "the last bucket edge must hold max_length 64, 48 does not"),
            (["training.batch_size=null", "training.tokens_per_batch=3"], "tokens_per_batch 3 does not hold a row"),
            (
                ["data.bucket_edges=[64]", "training.batch_size=null", "training.tokens_per_batch=511"],
                "tokens_per_batch 511 does not hold a row of the longest bucket (64 tokens) for each of the 8 parts",
            ),
            (["pipeline.min_ready=13"], "min_ready 13 is larger than pool_size 12"),
            (
                ["pipeline.placement=split", "pipeline.target_devices=8"],
                "target_devices 8 of 8 devices leaves the drafter none",
            ),
            (
                ["pipeline.placement=split", "pipeline.target_devices=6"],
                "training.batch_size 8 is no multiple of 6, the number of parts",
            ),
            (
                ["pipeline.placement=split", "pipeline.target_devices=5", "devices.fsdp=2"],
                "pipeline.target_devices: fsdp x tensor = 2 does not divide the 5 devices",
            ),
            (["target.attention=cudnn"], "cudnn wants an NVIDIA GPU of compute capability 8.0"),
            (["target.attention=splash"], "splash is for TPUs, here is a cpu; use auto"),
            (["target.attention=flash"], "Input should be 'auto', 'reference', 'blocked', 'cudnn' or 'splash'"),
            (["devices.preallocate=false"], "too late to set XLA_PYTHON_CLIENT_PREALLOCATE"),
            (["devices.xla_flags=[--xla_absent=1]"], "too late to set XLA_FLAGS"),
        ],
        ids=lambda value: value[-1] if isinstance(value, list) else "",
    )
    def test_a_pipeline_that_cannot_be(self, error_of, recipe, broken_target, overrides, complaint):
        """Said before weights load: the target's are unreadable here."""
        line = error_of("train", "--config", recipe, f"target.path={broken_target}", *overrides)
        assert complaint in line

    def test_target_that_is_no_checkpoint_folder(self, error_of, recipe, tmp_path):
        (tmp_path / "empty").mkdir()
        line = error_of("train", "--config", recipe, f"target.path={tmp_path / 'empty'}")
        assert f"{tmp_path / 'empty'} is not a checkpoint folder: it holds no readable config.json" in line

    def test_corrupt_safetensors(self, error_of, recipe, broken_target):
        """Found after the data were prepared; the same command may be given again."""
        for _ in range(2):
            line = error_of("train", "--config", recipe, f"target.path={broken_target}")
            assert "model.safetensors is not a readable safetensors file" in line

    def test_drafter_to_start_from_is_missing(self, error_of, recipe, tmp_path):
        tree = yaml.safe_load(recipe.read_text())
        recipe.write_text(yaml.safe_dump(tree | {"drafter": {"init_from": str(tmp_path / "absent")}}))
        assert "absent: no such folder" in error_of("train", "--config", recipe)

    def test_drafter_to_start_from_is_of_another_target(self, error_of, recipe, tmp_path):
        other = save_tiny_drafter(tmp_path / "other", tiny_target(vocab_size=ROWS, num_layers=6))
        tree = yaml.safe_load(recipe.read_text())
        recipe.write_text(yaml.safe_dump(tree | {"drafter": {"init_from": str(other)}}))
        assert "num_target_layers is 6 but the target's is 4; this drafter is of another" in error_of(
            "train", "--config", recipe
        )

    def test_layers_that_differ_are_no_loop(self, error_of, recipe, tmp_path):
        kinds = {"layer_types": (SLIDING, FULL), "sliding_window": 8}
        mixed = save_tiny_drafter(tmp_path / "mixed", tiny_target(vocab_size=ROWS), **kinds)
        tree = yaml.safe_load(recipe.read_text())
        recipe.write_text(yaml.safe_dump(tree | {"drafter": {"init_from": str(mixed)}}))
        line = error_of("train", "--config", recipe, "training.scan_layers=true")
        assert "the drafter's layers differ (sliding_attention, full_attention)" in line

    def test_missing_training_data(self, error_of, recipe):
        line = error_of("train", "--config", recipe, "data.train=absent.jsonl")
        assert "data.train: absent.jsonl does not exist; give a prepared folder or a JSONL file" in line

    def test_empty_evaluation_prompts(self, error_of, recipe, tmp_path):
        prompts = write_jsonl(tmp_path / "prompts.jsonl")
        assert "holds no prompts" in error_of("train", "--config", recipe, f"evaluation.prompts={prompts}")

    def test_nothing_to_resume(self, error_of, recipe):
        assert "holds no run to resume; leave --resume out" in error_of("train", "--config", recipe, "--resume")

    def test_a_mistake_in_the_recipe_leaves_no_run_behind(self, error_of, recipe, tmp_path):
        error_of("train", "--config", recipe, f"drafter.mask_token_id={ROWS}")
        assert not (tmp_path / "run").exists()


class TestPrepareData:
    def test_what_it_reports(self, call, target_folder, tmp_path):
        source = write_jsonl(tmp_path / "rows.jsonl", conversation("One?", "The one."), "broken")
        code, out, _ = call("prepare_data", "--input", source, "--target", target_folder, "--output", tmp_path / "out")
        assert code == 0
        manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
        assert (manifest["rows"], manifest["rejected"]) == (1, 1)
        assert f"1 rows, {manifest['tokens']} tokens, {manifest['supervised_tokens']} of them supervised" in out
        assert "1 rows rejected, see " in out

    def test_no_usable_row(self, error_of, target_folder, tmp_path):
        source = write_jsonl(tmp_path / "rows.jsonl", "broken")
        line = error_of("prepare_data", "--input", source, "--target", target_folder, "--output", tmp_path / "out")
        assert "none of 1 rows can be used" in line

    def test_missing_input(self, error_of, target_folder, tmp_path):
        absent = tmp_path / "absent.jsonl"
        assert f"{absent} cannot be read" in error_of(
            "prepare_data", "--input", absent, "--target", target_folder, "--output", tmp_path / "out"
        )

    def test_target_without_tokenizer(self, error_of, target_folder, rows, tmp_path):
        bare = tmp_path / "bare"
        bare.mkdir()
        shutil.copy(target_folder / "config.json", bare)
        line = error_of("prepare_data", "--input", rows, "--target", bare, "--output", tmp_path / "out")
        assert "holds no tokenizer (tokenizer.json)" in line

    @pytest.mark.parametrize("text", ["{", "[1]"])
    def test_template_arguments_that_are_no_object(self, call, rows, target_folder, tmp_path, text):
        code, _, err = call(
            "prepare_data",
            *("--input", rows, "--target", target_folder, "--output", tmp_path / "out", "--template-arguments", text),
        )
        assert code == 2
        assert "error: argument --template-arguments: " in err.splitlines()[-1]


class TestGenerate:
    def test_empty_prompts_file(self, error_of, target_folder, tmp_path):
        prompts = write_jsonl(tmp_path / "prompts.jsonl")
        line = error_of(
            "generate", "--target", target_folder, "--prompts", prompts, "--output", tmp_path / "answers.jsonl"
        )
        assert f"{prompts} holds no prompts; give one JSON object with messages a line" in line

    def test_broken_prompt(self, error_of, target_folder, tmp_path):
        prompts = write_jsonl(tmp_path / "prompts.jsonl", conversation("One?"), "broken")
        line = error_of(
            "generate", "--target", target_folder, "--prompts", prompts, "--output", tmp_path / "answers.jsonl"
        )
        assert f"{prompts} line 2: not JSON" in line

    def test_prompt_and_answer_beyond_the_targets_positions(self, error_of, target_folder, rows, tmp_path):
        line = error_of(
            "generate",
            *("--target", target_folder, "--prompts", rows, "--output", tmp_path / "answers.jsonl"),
            *("--max-new-tokens", 250),
        )
        assert "with 250 new ones it exceeds the target's 256 positions" in line


class TestEvaluate:
    def test_missing_drafter(self, error_of, target_folder, rows, tmp_path):
        absent = tmp_path / "absent"
        line = error_of("evaluate", "--target", target_folder, "--drafter", absent, "--prompts", rows)
        assert f"{absent}: no such folder" in line

    def test_folder_that_holds_no_drafter(self, error_of, target_folder, rows, tmp_path):
        line = error_of("evaluate", "--target", target_folder, "--drafter", tmp_path, "--prompts", rows)
        assert (
            "is no drafter: give a run folder with checkpoints, one of its checkpoints, or an exported folder" in line
        )

    def test_target_in_place_of_the_drafter(self, error_of, target_folder, rows):
        line = error_of("evaluate", "--target", target_folder, "--drafter", target_folder, "--prompts", rows)
        assert "this is not the config.json of a DFlash drafter" in line

    def test_drafter_of_another_target(self, error_of, target_folder, rows, tmp_path):
        other = save_tiny_drafter(tmp_path / "other", tiny_target(vocab_size=ROWS, hidden_size=64))
        line = error_of("evaluate", "--target", target_folder, "--drafter", other, "--prompts", rows)
        assert "hidden_size is 64 but the target's is 32; this drafter is of another target" in line

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"vocab_size": 64}, "vocab_size is 64 but the target's is 320; this drafter is of another target"),
            ({"num_layers": 8}, "of another target"),
        ],
        ids=["vocabulary", "tapped layers"],
    )
    def test_drafter_of_a_similar_target(self, error_of, target_folder, rows, tmp_path, changes, complaint):
        other = save_tiny_drafter(tmp_path / "other", tiny_target(**({"vocab_size": ROWS} | changes)))
        line = error_of("evaluate", "--target", target_folder, "--drafter", other, "--prompts", rows)
        assert complaint in line

    @pytest.mark.parametrize(
        ("row", "complaint"),
        [
            ({"messages": []}, "line 1"),
            ({"messages": [{"role": "user"}]}, "line 1"),
            ({"messages": [{"role": "user", "content": ""}]}, "line 1"),
            ({"messages": [{"role": "user", "content": "long " * 300}]}, "exceeds the target's 256 positions"),
        ],
        ids=["no message", "no content", "empty", "longer than the cache"],
    )
    def test_bad_prompt(self, error_of, target_folder, tmp_path, row, complaint):
        drafter = save_tiny_drafter(tmp_path / "drafter", tiny_target(vocab_size=ROWS))
        prompts = write_jsonl(tmp_path / "prompts.jsonl", row)
        line = error_of("evaluate", "--target", target_folder, "--drafter", drafter, "--prompts", prompts)
        assert complaint in line

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (("--method", "tree"), "budget None: a tree has 1 to 512 nodes"),
            (("--method", "chain", "--budget", 8), "are for trees; add --method tree"),
            (("--temperature", -1), "temperature"),
            (("--top-p", 0), "top-p 0.0 must be above 0 and at most 1"),
            (("--proposal", "sample"), "need a temperature"),
        ],
        ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
    )
    def test_method_that_cannot_be(self, error_of, target_folder, rows, tmp_path, arguments, complaint):
        drafter = save_tiny_drafter(tmp_path / "drafter", tiny_target(vocab_size=ROWS))
        line = error_of("evaluate", "--target", target_folder, "--drafter", drafter, "--prompts", rows, *arguments)
        assert complaint in line

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (("--budget", 0), "--budget: '0' is not a whole number of at least 1"),
            (("--block-size", 1), "--block-size: '1' leaves no token to draft"),
        ],
        ids=["budget 0", "block of one"],
    )
    def test_number_out_of_range(self, call, arguments, complaint):
        code, _, err = call(
            "evaluate", "--target", "x", "--drafter", "x", "--prompts", "x", "--method", "tree", *arguments
        )
        assert code == 2
        assert complaint in err.splitlines()[-1]

    def test_a_block_larger_than_trained_warns(self, call, target_folder, rows, tmp_path):
        drafter = save_tiny_drafter(tmp_path / "drafter", tiny_target(vocab_size=ROWS))
        code, out, _ = call(
            "evaluate",
            *("--target", target_folder, "--drafter", drafter, "--prompts", rows),
            *("--block-size", 9, "--max-new-tokens", 6, "--limit", 1),
        )
        assert code == 0
        (report,) = json.loads(out).values()
        assert "block size 9 is larger than trained (4)" in report["warnings"]
        assert len(report["accepted_at"]) == 8


class TestExport:
    def test_missing_run(self, error_of, tmp_path):
        line = error_of("export", "--run", tmp_path / "absent", "--output", tmp_path / "export")
        assert "absent: no such folder; give a run folder, a checkpoint or an exported folder" in line

    def test_folder_that_holds_no_run(self, error_of, tmp_path):
        line = error_of("export", "--run", tmp_path, "--output", tmp_path / "export")
        assert f"{tmp_path} is no drafter" in line
        assert not (tmp_path / "export").exists()

    def test_an_export_is_not_written_over(self, error_of, tmp_path):
        drafter = save_tiny_drafter(tmp_path / "drafter")
        (tmp_path / "export").mkdir()
        line = error_of("export", "--run", drafter, "--output", tmp_path / "export")
        assert "export already exists; remove it or choose another folder" in line


class TestPlan:
    def test_a_prepared_folder_is_looked_at(self, call, rows, target_folder, tmp_path):
        output = tmp_path / "records"
        code, out, _ = call("prepare_data", "--input", rows, "--target", target_folder, "--output", output, "--plan")
        assert code == 0
        assert "padding efficiency" in out
        code, again, _ = call("prepare_data", "--output", output, "--plan")
        assert code == 0
        assert again == out[out.index("padding efficiency") :]
        cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in again.splitlines() if line[0] == "│"]
        bucket, total = cells
        assert bucket[1:6] == ["8", "8", "1", "100.0%", "100.0%"]
        assert int(bucket[0]) % 16 == 0
        assert total[:4] == ["all", "8", "", "1"]

    def test_mistakes(self, error_of, rows, target_folder, tmp_path):
        output = tmp_path / "records"
        assert "give --input and --target to prepare" in error_of("prepare_data", "--output", output)
        assert "give --input and --target to prepare" in error_of(
            "prepare_data", "--output", output, "--plan", "--input", rows
        )
        assert "is not a folder of prepared records" in error_of("prepare_data", "--output", output, "--plan")

    def test_budget_below_a_row(self, error_of, rows, target_folder, tmp_path):
        line = error_of(
            *("prepare_data", "--input", rows, "--target", target_folder, "--output", tmp_path / "records"),
            *("--plan", "--tokens-per-batch", "16"),
        )
        assert "tokens_per_batch 16 does not hold a row" in line


def test_benchmark_of_an_unknown_setting(error_of):
    line = error_of("benchmark", "pipeline", "--settings", "interleave,imaginary")
    assert "there is no imaginary; there are interleave, interleave+deficit" in line


def test_benchmark_of_kernels(call, error_of):
    line = error_of("benchmark", "kernels", "--implementations", "blocked,fastest")
    assert "--implementations: there is no fastest; there are reference, blocked, kernel" in line
    code, out, _ = call(
        *("benchmark", "kernels", "--preset", "small", "--rounds", 1, "--implementations", "reference,blocked")
    )
    assert code == 0
    report = json.loads(out)
    assert report.keys() == {"reference", "blocked"}
    assert max(report["blocked"]["errors"].values()) < 1e-5
    assert report["blocked"]["gradient_seconds"] > 0
    code, out, _ = call(
        *("benchmark", "kernels", "--model", "target", "--preset", "small", "--rounds", 1),
        *("--implementations", "blocked,cudnn", "--window", 100),
    )
    assert code == 0
    report = json.loads(out)
    assert report["blocked"]["errors"].keys() == {"out"}
    assert report["blocked"]["errors"]["out"] < 1e-5
    assert "failure" in report["cudnn"]


def test_benchmark_of_a_step(call, error_of, tmp_path):
    """Beside another program, which must print what a step took."""
    other = tmp_path / "other.py"
    other.write_text('print(\'{"step_seconds_median": 1.0, "step_seconds_min": 0.5}\')')
    arguments = ("benchmark", "step", "--preset", "small", "--steps", 1, "--rounds", 1, "--against", other)
    code, out, _ = call(*arguments)
    assert code == 0
    report = json.loads(out)
    assert report["ratio"] == pytest.approx(report["step_seconds_median"], rel=1e-2)
    assert report["against_seconds_min"] == 0.5
    assert report["flops"] > 1e9
    assert report["temporary_bytes"]["accumulate"] > 0
    other.write_text("print('nothing')")
    assert "prints no JSON object with the seconds of a step" in error_of(*arguments)


def test_benchmark_of_one_setting(call):
    """One step of the skewed corpus: eight batches of six buckets, of which the drafter consumes the planned share."""
    code, out, err = call("benchmark", "pipeline", "--settings", "interleave+deficit", "--steps", "2")
    assert code == 0, err
    (name, report), *rest = json.loads(out[out.index("{") :]).items()
    assert (name, rest) == ("interleave+deficit", [])
    assert report.keys() == {
        "long_share_std",
        "tokens_per_second",
        "padding_efficiency",
        "compiles_after_warmup",
        "bottleneck",
    }
    assert report["long_share_std"] <= 0.07
    assert report["compiles_after_warmup"] == 0
    assert 0.8 < report["padding_efficiency"] < 1
