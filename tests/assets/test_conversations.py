"""The made conversations, their tokenizer, and the folder that ships with the package."""

import json
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from transformers import AutoTokenizer

from dflash_jax.assets import build, pretraining
from dflash_jax.assets.conversations import as_conversation, conversations, exchanges
from dflash_jax.assets.tasks import TASKS
from dflash_jax.assets.tokenizer import SPECIAL_TOKENS, VOCABULARY_SIZE, chat_prompt, save_tokenizer, train_tokenizer
from dflash_jax.data.chat import ChatTokenizer
from dflash_jax.data.conversations import Conversation, parse_row, read_lines
from dflash_jax.models.huggingface import EMBEDDED, load_target, resolve_folder
from dflash_jax.models.target import Target
from dflash_jax.models.weights import initialise, split
from dflash_jax.parallel import mesh_of
from tests.helpers import tiny_target


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A tokenizer trained on few conversations."""
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [text for _, exchange in islice(exchanges(3), 800) for text in (exchange.question, exchange.answer)]
    save_tokenizer(train_tokenizer(texts), folder, context=1024)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="module")
def embedded():
    return resolve_folder(f"{EMBEDDED}quickstart")


class TestConversations:
    def test_a_seed_decides_everything(self):
        assert conversations(7, 40) == conversations(7, 40)

    def test_tasks_take_turns(self):
        assert [task for task, _ in islice(exchanges(5), len(TASKS))] == list(TASKS)

    def test_a_longer_list_begins_with_the_shorter_one(self):
        assert conversations(5, 20)[:8] == conversations(5, 8)

    def test_other_seeds_give_other_conversations(self):
        assert conversations(5, 20) != conversations(6, 20)

    @pytest.mark.parametrize("task", TASKS)
    def test_the_programs_own_answer_is_right(self, task):
        for seed in range(40):
            exchange = TASKS[task](np.random.default_rng(seed))
            assert exchange.question == exchange.question.strip() != ""
            assert exchange.answer == exchange.answer.strip() != ""
            assert exchange.required in exchange.answer

    @pytest.mark.parametrize("task", TASKS)
    def test_answers_to_a_question_vary(self, task):
        answers = {TASKS[task](np.random.default_rng(seed)).answer for seed in range(20)}
        assert len(answers) > 15

    @pytest.mark.parametrize("split", build.SPLITS)
    def test_every_task_stands_in_every_split(self, split):
        found = build.prompts(split, 0, build.HELDOUT_PROMPTS)
        assert {name.rsplit("-", 1)[0] for name in found} == set(TASKS)


class TestSplits:
    def test_no_two_splits_share_a_seed(self):
        seeds = [build.split_seed(split, seed) for split in build.SPLITS for seed in range(10)]
        assert len(set(seeds)) == len(seeds)

    def test_no_question_is_asked_twice(self):
        train, heldout = build.prompt_sets(seed=0)
        every = [exchange.question for one in (train, heldout) for exchange in one.values()]
        assert len(train) == build.TRAIN_PROMPTS
        assert len(heldout) == build.HELDOUT_PROMPTS
        assert len(set(every)) == len(every)

    def test_reserved_questions_never_reach_the_target(self):
        unfiltered = [exchange.question for exchange in islice(build.target_exchanges(0, frozenset()), 200)]
        reserved = frozenset(unfiltered[::3])
        kept = [exchange.question for exchange in islice(build.target_exchanges(0, reserved), 100)]
        assert not reserved & set(kept)
        assert kept == [question for question in unfiltered if question not in reserved][:100]


class TestTokenizer:
    def test_size_and_special_ids(self, tokenizer):
        assert len(tokenizer) == VOCABULARY_SIZE
        assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
        assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.mask_token_id) == ("<|im_end|>", "<|endoftext|>", 3)

    @pytest.mark.parametrize("text", ["Count to 12.\n\n  if x == 34:\n", "naïve – 東京 🙂", " a  b\tc", ""])
    def test_any_text_survives(self, tokenizer, text):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    def test_digits_stand_alone(self, tokenizer):
        assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]

    def test_the_template_adds_nothing_to_the_text(self, tokenizer):
        question, answer = "Spell key.", "key: k-e-y"
        messages = as_conversation(question, answer)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        assert prompt == chat_prompt(question)
        assert whole == f"{prompt}{answer}<|im_end|>\n"

    def test_training_rows_equal_what_the_chat_tokenizer_makes(self, tokenizer_folder, tokenizer):
        chat = ChatTokenizer(tokenizer_folder)
        for _, exchange in islice(exchanges(4), 60):
            row = pretraining.encode(tokenizer.backend_tokenizer, exchange)
            turns = as_conversation(exchange.question, exchange.answer)["messages"]
            tokens, mask = chat.encode(Conversation(messages=turns))
            end = len(row.prompt) + len(row.answer)
            assert tokens[:end].tolist() == row.prompt + row.answer
            assert mask.nonzero()[0].tolist() == list(range(len(row.prompt), end))


class TestPretraining:
    def test_batches_are_full_and_of_a_known_shape(self, tokenizer):
        rows = [pretraining.encode(tokenizer.backend_tokenizer, exchange) for _, exchange in islice(exchanges(2), 500)]
        made = list(pretraining.batches(iter(rows), np.random.default_rng(0)))
        assert len(made) == pretraining.SORTED_BATCHES
        for batch in made:
            assert batch.tokens.shape == batch.answer.shape
            assert batch.tokens.shape[0] == pretraining.BATCH_SIZE
            assert batch.tokens.shape[1] in pretraining.EDGES
            assert batch.answer.any(axis=1).all()

    def test_the_loss_falls(self):
        rng = np.random.default_rng(0)
        batch = pretraining.Batch(rng.integers(4, 64, (4, 24)).astype(np.int32), np.ones((4, 24), bool))
        losses = []
        pretraining.train(tiny_target(), iter([batch] * 30), 30, seed=0, report=lambda step, loss: losses.append(loss))
        assert losses[0] == pytest.approx(np.log(63), abs=0.3)
        assert losses[-1] < 0.7 * losses[0]

    def test_the_mask_token_gets_no_gradient(self):
        graph, specs = split(Target(tiny_target()))
        params = initialise(specs, jax.random.key(0), mesh_of((1, 1, 1)))
        tokens, answer = jnp.full((2, 12), 9), jnp.ones((2, 12), bool)
        gradient = jax.grad(lambda params: pretraining.answer_loss(nnx.merge(graph, params), tokens, answer)[0])(params)
        rows = np.abs(gradient["lm_head"]["weight"]).sum(axis=1)
        assert rows[pretraining.MASK_ID] == 0
        assert np.delete(rows, pretraining.MASK_ID).min() > 0


class TestEmbeddedFolder:
    def test_it_is_small(self, embedded):
        sizes = {path.name: path.stat().st_size for path in embedded.iterdir()}
        assert sizes["model.safetensors"] < 3_000_000
        assert sum(sizes.values()) < 4_000_000

    def test_tokenizer_and_weights_fit_together(self, embedded):
        target = load_target(embedded, mesh_of((1, 1, 1)), jnp.float32)
        loaded = AutoTokenizer.from_pretrained(embedded)
        assert len(loaded) <= target.arch.vocab_size
        assert target.stop_ids == (loaded.eos_token_id,)
        assert json.loads((embedded / "config.json").read_text()) == build.TARGET_CONFIG

    def test_rows_hold_their_own_tokens(self, embedded):
        chat = ChatTokenizer(embedded)
        for name in ("train.jsonl", "heldout.jsonl"):
            for _, line in read_lines(embedded / name):
                row = parse_row(line)
                assert tuple(chat.prompt_ids(row.turns()[:1])) == row.prompt_ids
                tokens, mask = chat.encode(row)
                from_text, from_text_mask = chat.encode(row.model_copy(update={"answer_ids": None}))
                assert tokens.tolist() == from_text[: len(tokens)].tolist()
                assert mask.sum() == from_text_mask.sum()

    def test_held_out_questions_are_not_trained_on(self, embedded):
        asked = {
            name: {parse_row(line).messages[0].content for _, line in read_lines(embedded / name)}
            for name in ("train.jsonl", "heldout.jsonl")
        }
        assert not asked["train.jsonl"] & asked["heldout.jsonl"]
