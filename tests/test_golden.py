"""Numbers computed by other implementations: a drafter step (four PyTorch trainers) and a real model's greedy text."""

import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.data.chat import ChatTokenizer
from dflash_jax.data.loader import Batch
from dflash_jax.decoding.generate import generate, make_plain_decoder
from dflash_jax.models import weights
from dflash_jax.models.architecture import Rope
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.huggingface import load_target
from dflash_jax.models.target import Target
from dflash_jax.parallel import Meshes, batch_shards, mesh_of, on_mesh
from dflash_jax.sections import OptimizerSection
from dflash_jax.training.anchors import lay_out_blocks
from dflash_jax.training.optimizer import make_optimizer
from dflash_jax.training.state import StepSettings, tables_of
from dflash_jax.training.step import block_loss, init_state, make_step
from tests.helpers import MESHES, features_of, place, relative_error, tiny_drafter, tiny_target

GOLDEN = Path(__file__).parent / "data" / "training_step.npz"


class GoldenStep:
    """The file's step on one mesh. Empty rows fill the batch up to the number of shards: they must weigh nothing."""

    def __init__(self, mesh_shape, attention="blocked"):
        self.file = np.load(GOLDEN)
        config = json.loads(str(self.file["config"]))
        sizes = {
            "vocab_size": config["vocab_size"],
            "hidden_size": config["hidden_size"],
            "intermediate_size": config["intermediate_size"],
            "num_layers": config["target_layers"],
            "num_heads": config["num_attention_heads"],
            "num_kv_heads": config["num_key_value_heads"],
            "head_dim": config["head_dim"],
            "rms_norm_eps": config["rms_norm_eps"],
            "rope": Rope(config["rope_theta"]),
        }
        self.mesh = mesh_of(mesh_shape)
        target = tiny_target(**sizes)
        drafter = tiny_drafter(
            target,
            num_layers=config["drafter_layers"],
            block_size=config["block_size"],
            mask_token_id=config["mask_token_id"],
            target_layer_ids=tuple(config["target_layer_ids"]),
        )
        optimizer = make_optimizer(OptimizerSection(b2=0.999), lambda count: jnp.float32(6e-4))
        gamma = config["loss_decay_gamma"]
        self.settings = StepSettings(
            drafter=drafter,
            target=target,
            optimizer=optimizer,
            schedule=lambda c: jnp.float32(6e-4),
            anchors=12,
            gamma=gamma,
            compute_dtype=jnp.float32,
            attention=attention,
            edges=(64,),
        )
        _, specs = weights.split(Target(target))
        self.step = make_step(self.settings, Meshes(self.mesh, self.mesh))
        self.target_params = place(specs, self.mesh, self.arrays("target."))
        params = place(self.step.specs, self.mesh, self.arrays("drafter."))
        self.state = init_state(self.step, self.settings, 0, params)

        rows = batch_shards(self.mesh)
        tokens = np.zeros((rows, 64), np.int32)
        tokens[0] = self.file["input_ids"][0]
        loss_mask = np.zeros((rows, 64), bool)
        loss_mask[0] = self.file["loss_mask"][0]
        lengths = np.array([64] + [0] * (rows - 1), np.int32)
        batch = Batch(tokens, loss_mask, lengths, np.arange(rows, dtype=np.int32), np.int32(0))
        self.batch = jax.device_put(batch, self.step.batch_shardings)
        self.features = features_of(self.step, self.target_params, self.batch)
        self.gradient_of = jax.jit(
            on_mesh(self.mesh, self._gradient), out_shardings=(self.step.state_shardings.params, None)
        )

    def arrays(self, prefix):
        return {name.removeprefix(prefix): self.file[name] for name in self.file.files if name.startswith(prefix)}

    def _gradient(self, params, features):
        batch = features.batch
        rows = batch.tokens.shape[0]
        anchors = jnp.zeros((rows, 12), jnp.int32).at[0].set(jnp.asarray(self.file["anchors"], jnp.int32))
        keep = jnp.zeros((rows, 12), bool).at[0].set(True)
        drafter = self.settings.drafter
        blocks = lay_out_blocks(batch.tokens, batch.loss_mask, batch.lengths, anchors, keep, drafter.block_size)
        graph, _ = weights.split(Drafter(drafter))
        return jax.grad(block_loss, has_aux=True)(
            params,
            graph,
            tables_of(self.target_params),
            features.taps,
            blocks,
            batch.lengths,
            self.settings,
        )

    def update(self):
        gradient, (sums, _, _) = self.gradient_of(self.state.params, self.features)
        kept = jax.device_get((gradient, sums.weight))  # the update donates them
        self.state, metrics = self.step.update(
            replace(self.state, gradient=gradient, sums=self.state.sums.plus(0, sums))
        )
        return *kept, metrics


@pytest.mark.parametrize(
    ("mesh_shape", "attention"), [*((shape, "blocked") for shape in MESHES), ((1, 1, 1), "reference")], ids=str
)
def test_training_step(mesh_shape, attention):
    golden = GoldenStep(mesh_shape, attention)
    file = golden.file
    taps = np.concatenate([np.asarray(tap)[0] for tap in golden.features.taps], axis=-1)
    assert relative_error(taps, file["expected.features"][0]) < 1e-5

    gradient, weight, metrics = golden.update()
    np.testing.assert_allclose(metrics["loss"], file["expected.loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], file["expected.grad_norm"], rtol=1e-5)
    expected = golden.arrays("expected.grad.")
    actual = weights.by_name(gradient)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = relative_error(actual[name] / weight, value)
        assert error < 1e-5, (name, error)


def test_loss_after_updates():
    """AdamW on the same batch: 7.4234, 7.1670, 6.9231 after 0, 1, 2 updates and 2.7805 after 31."""
    golden = GoldenStep((2, 2, 2))
    losses = [float(golden.update()[2]["loss"]) for _ in range(32)]
    np.testing.assert_allclose([losses[i] for i in (0, 1, 2)], [7.4234, 7.1670, 6.9231], atol=1e-4)
    np.testing.assert_allclose(losses[31], 2.7805, atol=2e-3)


SMOLLM2 = os.environ.get("DFLASH_SMOLLM2", "")
needs_smollm2 = pytest.mark.skipif(not SMOLLM2, reason="DFLASH_SMOLLM2 names no folder of SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def smollm2():
    return load_target(Path(SMOLLM2), mesh_of((1, 1, 1)), jnp.float32)


@pytest.fixture(scope="module")
def greedy_file():
    return np.load(Path(__file__).parent / "data" / "smollm2_greedy.npz")


@needs_smollm2
@pytest.mark.parametrize("prompt", ["0", "1", "2", "3"])
def test_smollm2_logits_and_taps(smollm2, greedy_file, prompt):
    prompt_ids, answer = greedy_file[f"{prompt}.prompt_ids"], greedy_file[f"{prompt}.greedy_ids"]
    tokens = np.zeros((1, 128), np.int32)
    count = len(prompt_ids) + len(answer)
    tokens[0, :count] = np.concatenate([prompt_ids, answer])
    layers = tuple(int(layer) for layer in greedy_file["tap_layers"])

    @jax.jit
    def forward(params, tokens):
        target = nnx.merge(smollm2.graph, params)
        x, taps, _ = target(tokens, jnp.arange(128)[None, :], taps=layers)
        return target.logits(x), taps

    logits, taps = forward(smollm2.params, tokens)
    logits = np.asarray(logits)[0, :count]
    expected = greedy_file[f"{prompt}.top5_logits"]
    np.testing.assert_allclose(np.take_along_axis(logits, greedy_file[f"{prompt}.top5_ids"], 1), expected, atol=1e-3)
    np.testing.assert_array_equal(logits.argmax(-1)[len(prompt_ids) - 1 : -1], answer)
    first8 = np.stack([np.asarray(tap)[0, :count, :8] for tap in taps], axis=1)
    np.testing.assert_allclose(first8, greedy_file[f"{prompt}.taps_first8"], rtol=1e-3, atol=1e-3)


@needs_smollm2
def test_smollm2_greedy(smollm2, greedy_file):
    """Chat template, prefill and cached decoding, batched: the tokens of the four answers."""
    tokenizer = ChatTokenizer(Path(SMOLLM2))
    prompts = [
        tokenizer.prompt_ids([{"role": "user", "content": str(greedy_file[f"{prompt}.prompt_text"])}])
        for prompt in range(4)
    ]
    mesh = mesh_of((1, 1, 1))
    answers = dict(generate(make_plain_decoder(smollm2, 64, mesh), prompts, 4, mesh))
    for number, prompt in enumerate(prompts):
        np.testing.assert_array_equal(prompt, greedy_file[f"{number}.prompt_ids"])
        np.testing.assert_array_equal(answers[number], greedy_file[f"{number}.greedy_ids"])
