"""A recipe: YAML and dotted overrides in, one frozen value or one line of complaint out."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from dflash_jax.config import Config, d_pace_alpha, decay_gamma, dump_config, load_config
from dflash_jax.errors import UserError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))

MINIMAL = """
run: {folder: runs/test}
target: {path: models/target}
drafter: {mask_token_id: 7}
data: {train: rows.jsonl}
training: {steps: 10}
"""


@pytest.fixture
def load(tmp_path):
    """Loads the minimal recipe (or another text) with overrides."""

    def load(*overrides, text=MINIMAL):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return load_config(path, list(overrides))

    return load


@pytest.fixture
def complaint(load):
    """The one line that refuses a recipe."""

    def complaint(*overrides, text=MINIMAL):
        with pytest.raises(UserError) as refusal:
            load(*overrides, text=text)
        message = str(refusal.value)
        assert "\n" not in message
        return message

    return complaint


class TestValues:
    def test_what_is_left_out_has_the_papers_values(self, load):
        config = load()
        assert config.run.folder == Path("runs/test")
        assert (config.drafter.layers, config.drafter.block_size, config.drafter.taps) == (5, 16, 5)
        assert (config.data.max_length, config.training.anchors) == (3072, 512)
        assert (config.optimizer.learning_rate, config.optimizer.warmup_ratio) == (6e-4, 0.04)
        assert config.optimizer.clip_norm == 1.0
        assert (config.devices.data, config.devices.fsdp, config.devices.tensor) == (-1, 1, 1)

    def test_overrides_replace_values_and_open_sections(self, load):
        config = load("training.steps=20", "optimizer.learning_rate=3e-4", "export.at_end=true")
        assert config.training.steps == 20
        assert config.optimizer.learning_rate == 3e-4
        assert config.export.at_end is True

    def test_the_last_override_counts(self, load):
        assert load("training.steps=20", "training.steps=30").training.steps == 30

    def test_override_values_are_yaml(self, load):
        config = load(
            "drafter.target_layer_ids=[1, 3]",
            "training.steps=null",
            "training.epochs=2",
            "data.template_arguments={enable_thinking: false, depth: 3, style: a=b}",
        )
        assert config.drafter.target_layer_ids == (1, 3)
        assert (config.training.steps, config.training.epochs) == (None, 2)
        assert config.data.template_arguments == {"enable_thinking": False, "depth": 3, "style": "a=b"}

    @pytest.mark.parametrize("text", ["6e-4", "6.0e-4", "0.0006", "6E-4", "'6e-4'"])
    def test_numbers_with_exponents_are_numbers(self, load, text):
        """YAML 1.1 reads 6e-4, without a dot, as text."""
        assert load(f"optimizer.learning_rate={text}").optimizer.learning_rate == 6e-4
        assert load(text=f"{MINIMAL}\noptimizer: {{learning_rate: {text}}}").optimizer.learning_rate == 6e-4

    def test_bucket_edges_are_given_or_left_to_the_data(self, load):
        assert load("data.max_length=96").data.bucket_edges is None
        assert load("data.max_length=96", "data.bucket_edges=[32, 96]").data.bucket_edges == (32, 96)
        assert load("data.max_length=90", "data.bucket_edges=[32, 96]").data.bucket_edges == (32, 96)

    def test_a_batch_has_rows_or_tokens(self, load):
        assert (load().training.batch_size, load().training.tokens_per_batch) == (8, None)
        training = load("training.tokens_per_batch=4096").training
        assert (training.batch_size, training.tokens_per_batch) == (None, 4096)

    def test_off_is_a_word_in_yaml_too(self, load):
        assert load("health.actions={spike: off, drift: log}").health.actions == {"spike": "off", "drift": "log"}

    def test_the_pool_by_default(self, load):
        pipeline = load().pipeline
        assert (pipeline.min_ready, pipeline.draw, pipeline.placement) == (10, "deficit", "colocated")

    def test_a_config_cannot_be_changed(self, load):
        config = load()
        with pytest.raises(ValidationError, match="frozen"):
            config.training.steps = 11
        with pytest.raises(ValidationError, match="frozen"):
            config.training = None

    @pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
    def test_loss_decay_of_the_paper(self, load, block_size, gamma):
        assert decay_gamma(load().training, block_size) == gamma

    def test_loss_decay_of_other_block_sizes_must_be_given(self, load):
        with pytest.raises(UserError, match=r"loss_decay_gamma: .* block sizes 8, 10, 16 only; .*block_size 12"):
            decay_gamma(load().training, 12)
        assert decay_gamma(load("training.loss_decay_gamma=3").training, 12) == 3.0

    def test_d_pace_has_no_gamma(self, load):
        training = load("training.position_weights=d_pace").training
        assert decay_gamma(training, 12) is None
        assert d_pace_alpha(training) == 0.5
        assert d_pace_alpha(load("training.position_weights=d_pace", "training.d_pace_alpha=0").training) == 0.0

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["training.position_weights=d_pace", "training.loss_decay_gamma=4"], "loss_decay_gamma has no meaning"),
            (["training.d_pace_alpha=0.3"], "d_pace_alpha has no meaning with position_weights: decay"),
        ],
        ids=["gamma", "alpha"],
    )
    def test_weights_that_are_not_used(self, load, overrides, message):
        with pytest.raises(UserError, match=message):
            load(*overrides)


class TestRoundTrip:
    OVERRIDES = (
        (),
        (
            "devices.simulate=8",
            "devices.data=2",
            "devices.compute_dtype=bfloat16",
            "target.revision=abc",
            "drafter.target_layer_ids=[0, 2]",
            "data.max_length=64",
            "data.bucket_edges=[32, 64]",
            "data.template_arguments={enable_thinking: false, depth: 1, style: '1'}",
            "training.loss_decay_gamma=2.5",
            "evaluation.prompts=heldout.jsonl",
            "evaluation.every=5",
        ),
        ("training.steps=null", "training.epochs=3"),
    )

    @pytest.mark.parametrize("overrides", OVERRIDES)
    def test_a_dumped_config_loads_to_itself(self, load, overrides):
        config = load(*overrides)
        assert load(text=dump_config(config)) == config

    def test_a_drafter_to_start_from_survives_too(self, load):
        config = load(text=MINIMAL.replace("mask_token_id: 7", "init_from: exported"))
        assert load(text=dump_config(config)) == config


class TestRefusals:
    def test_unknown_key(self, complaint):
        message = complaint("training.stepz=3")
        assert "unknown key training.stepz" in message
        assert "allowed here: steps, epochs, batch_size, tokens_per_batch" in message

    def test_unknown_section(self, complaint):
        message = complaint("optimiser.learning_rate=1")
        assert "unknown key optimiser" in message
        assert "run, devices, target, drafter, data, training, pipeline" in message

    @pytest.mark.parametrize("section", ["run", "target", "drafter", "data", "training"])
    def test_missing_section(self, complaint, section):
        text = "\n".join(line for line in MINIMAL.splitlines() if not line.startswith(f"{section}:"))
        assert f"{section} is missing" in complaint(text=text)

    def test_missing_key(self, complaint):
        assert "target.path is missing" in complaint(text=MINIMAL.replace("path: models/target", "revision: main"))

    @pytest.mark.parametrize(
        ("override", "key", "value"),
        [
            ("training.steps=many", "training.steps", "'many'"),
            ("training.steps=-1", "training.steps", "-1"),
            ("training.batch_size=2.5", "training.batch_size", "2.5"),
            ("training.batch_size=0", "training.batch_size", "0"),
            ("training.loss_decay_gamma=0", "training.loss_decay_gamma", "0"),
            ("optimizer.learning_rate=fast", "optimizer.learning_rate", "'fast'"),
            ("optimizer.learning_rate=.nan", "optimizer.learning_rate", "nan"),
            ("optimizer.b1=1.0", "optimizer.b1", "1.0"),
            ("optimizer.warmup_ratio=1.5", "optimizer.warmup_ratio", "1.5"),
            ("devices.compute_dtype=float16", "devices.compute_dtype", "'float16'"),
            ("drafter.block_size=1", "drafter.block_size", "1"),
            ("drafter.mask_token_id=-1", "drafter.mask_token_id", "-1"),
            ("data.bucket_edges=[64, wide]", "data.bucket_edges.1", "'wide'"),
            ("training=7", "training", "7"),
            ("run.seed=-1", "run.seed", "-1"),
        ],
    )
    def test_wrong_type_or_range_names_key_and_value(self, complaint, override, key, value):
        assert f"{key}: {value} is not allowed: Input should be" in complaint(override)

    @pytest.mark.parametrize(
        ("overrides", "expected"),
        [
            (["training.epochs=2"], "training: give exactly one of steps and epochs"),
            (["training.steps=null"], "training: give exactly one of steps and epochs"),
            (["data.max_length=64", "data.bucket_edges=[64, 32]"], "data: bucket_edges must rise strictly: [64, 32]"),
            (["data.max_length=64", "data.bucket_edges=[64, 64]"], "data: bucket_edges must rise strictly: [64, 64]"),
            (
                ["data.max_length=64", "data.bucket_edges=[16, 32]"],
                "last bucket edge must hold max_length 64, 32 does not",
            ),
            (["data.bucket_edges=[]"], "bucket_edges is empty"),
            (["training.batch_size=8", "training.tokens_per_batch=64"], "one of batch_size and tokens_per_batch"),
            (["pipeline.pool_size=4"], "pipeline: min_ready 10 is larger than pool_size 4"),
            (["pipeline.placement=split"], "pipeline: target_devices goes with placement: split"),
            (["pipeline.target_devices=4"], "pipeline: target_devices goes with placement: split"),
            (["health.actions={drift: clip}"], "health: actions: drift cannot clip"),
            (["health.actions={nonfinite: log}"], "health: actions: nonfinite must skip, roll back or halt"),
            (["health.actions={jump: log}"], "health: actions: there is no detector jump; there are nonfinite, high"),
            (["noise.level=0.1"], "noise: level is set but distribution is off"),
            (
                ["devices.simulate=8", "devices.memory_fraction=0.5"],
                "memory_fraction and preallocate are for accelerators",
            ),
            (["devices.xla_flags=[xla_gpu]"], "xla_flags: 'xla_gpu' does not begin with --xla"),
            (["drafter.init_from=exported"], "drafter: init_from brings the drafter's shape: remove mask_token_id"),
            (["drafter.mask_token_id=null"], "drafter: mask_token_id is required"),
            (["drafter.target_layer_ids=[]"], "target_layer_ids is empty"),
            (["devices.data=0"], "devices: data must be -1 (the rest) or at least 1, not 0"),
            (
                ["devices.simulate=4", "devices.data=2", "devices.fsdp=2", "devices.tensor=2"],
                "devices: data x fsdp x tensor = 8 asks for more than the 4 devices of simulate",
            ),
            (["evaluation.every=5"], "evaluation: every is set but prompts is not"),
        ],
    )
    def test_rules_between_values(self, complaint, overrides, expected):
        assert expected in complaint(*overrides)

    @pytest.mark.parametrize("override", ["training.steps", "=3", "training..steps=3", ".steps=3"])
    def test_an_override_is_key_and_value(self, complaint, override):
        assert complaint(override) == f"override {override!r}: write section.key=value"

    def test_an_override_cannot_go_below_a_value(self, complaint):
        assert "folder is a value, not a section" in complaint("run.folder.name=x")

    def test_an_override_that_is_no_yaml(self, complaint):
        assert "the value is not YAML" in complaint("drafter.target_layer_ids=[1, 2")


class TestFiles:
    def test_missing_file(self, tmp_path):
        with pytest.raises(UserError, match=r"config .*absent\.yaml: No such file or directory; give an existing YAML"):
            load_config(tmp_path / "absent.yaml")

    def test_a_folder(self, tmp_path):
        with pytest.raises(UserError, match="Is a directory; give an existing YAML"):
            load_config(tmp_path)

    @pytest.mark.parametrize("content", [b"run: {folder: a", b"a: b: c", b"\xff\xfe\x00"])
    def test_not_yaml(self, tmp_path, content):
        path = tmp_path / "recipe.yaml"
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"recipe\.yaml is not YAML: .+") as refusal:
            load_config(path)
        assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize("text", ["", "- run", "just text"])
    def test_no_sections(self, complaint, text):
        assert "the file holds no mapping of sections" in complaint(text=text)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_of_the_repository_loads(path):
    config = load_config(path)
    assert isinstance(config, Config)
    header = path.read_text().partition("\n\nrun:")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    for word in ("# command:", "# hardware:", "# time:", "# expected:"):
        assert word in header, f"{path.name} does not begin with {word}"


def test_the_repository_has_recipes():
    assert CONFIGS
