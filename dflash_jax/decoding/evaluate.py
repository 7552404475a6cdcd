"""The acceptance report: a drafter judged by real greedy speculative decoding next to plain decoding."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dflash_jax.decoding.chain import ChainAnswers, make_chain_decoder
from dflash_jax.decoding.generate import Answers, make_plain_decoder
from dflash_jax.decoding.prompts import PromptBatch, batch_prompts
from dflash_jax.models.architecture import DrafterArchitecture
from dflash_jax.models.target import FrozenTarget
from dflash_jax.models.weights import Params
from dflash_jax.telemetry.drafting import DraftingSums, drafting_metrics, tree_metrics

Examine = Callable[[PromptBatch, ChainAnswers, Params], DraftingSums]


@dataclass(frozen=True)
class Mismatch:
    """Where a speculative answer leaves the plain one."""

    prompt: str | int
    position: int
    """Index of the new token."""
    plain: int | None
    speculative: int | None
    """None where one answer ended and the other went on."""
    gap: float
    """The target's top-2 logit gap there, in plain decoding: tiny for a tie."""


@dataclass(frozen=True)
class Report:
    """What `scripts/evaluate.py --json` writes."""

    acceptance_length: float
    """Mean over prompts of the mean tokens a round, the bonus token included."""
    acceptance_length_pooled: float
    """Tokens over rounds, all prompts together."""
    histogram: tuple[int, ...]
    """Rounds that produced 1..block tokens."""
    accepted_at: tuple[float, ...]
    """Share of rounds whose draft at offset 1..block-1 was accepted."""
    prompts: int
    tokens: int
    lossless: bool
    mismatches: tuple[Mismatch, ...]
    seconds_plain: float
    seconds_speculative: float
    drafting: dict[str, Any]
    """The drafting metrics of the same answers in the training layout, with the anchors that decoding visited: what
    training would report of them. Empty where nobody looked."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Evaluator:
    """Holds the prompts, the compiled decoders and the target's plain answers, which never change."""

    def __init__(
        self,
        target: FrozenTarget,
        drafter_graph: nnx.GraphDef,
        arch: DrafterArchitecture,
        prompts: Sequence[Sequence[int]],
        names: Sequence[str | int],
        max_new_tokens: int,
        batch_size: int,
        mesh: Mesh,
        advance: Callable[[int], None] = lambda prompts: None,
        examine: Examine | None = None,
    ):
        """
        Args:
            advance: is called with the number of prompts that were just decoded, plainly or with the drafter.
            examine: gives the drafting metrics' sums of a batch of answers; what it takes is not timed.
        """
        self._examine = examine
        self._advance = advance
        self._names = names
        self._batches = list(batch_prompts(prompts, batch_size, mesh))
        self._indices = [jax.device_get(batch.indices) for batch in self._batches]
        self._plain_decoder = make_plain_decoder(target, max_new_tokens, mesh)
        self._chain_decoder = make_chain_decoder(target, drafter_graph, arch, max_new_tokens, mesh)
        self._plain: tuple[list[Answers], float] | None = None

    def plain(self) -> tuple[list[Answers], float]:
        """The target's own greedy answers, a batch each, and the seconds they took."""
        if self._plain is None:
            self._plain_decoder.compile(self._batches)
            self._plain = self._timed(self._plain_decoder)
        return self._plain

    def report(self, params: Params) -> Report:
        """Decode all prompts with this drafter and compare."""
        plain, seconds_plain = self.plain()
        self._chain_decoder.compile(self._batches, params)
        chain, seconds = self._timed(lambda batch: self._chain_decoder(batch, params))
        rows = [np.flatnonzero(indices >= 0).tolist() for indices in self._indices]
        names = [self._names[i] for indices in self._indices for i in indices[indices >= 0]]
        histogram = np.concatenate([batch.histogram[kept] for batch, kept in zip(chain, rows, strict=True)])
        accepted_at = np.concatenate([batch.accepted_at[kept] for batch, kept in zip(chain, rows, strict=True)])
        lengths = np.arange(1, histogram.shape[1] + 1)
        rounds, produced = histogram.sum(axis=1), (histogram * lengths[None, :]).sum(axis=1)
        drafted = rounds > 0  # a prompt answered by one token has no round
        pairs = (
            (_cut(p, row), _cut(c, row), p.gaps[row])
            for p, c, kept in zip(plain, chain, rows, strict=True)
            for row in kept
        )
        compared = (_compare(name, *pair) for name, pair in zip(names, pairs, strict=True))
        mismatches = tuple(mismatch for mismatch in compared if mismatch is not None)
        total = max(1, int(rounds.sum()))
        return Report(
            acceptance_length=float((produced[drafted] / rounds[drafted]).mean()) if drafted.any() else 1.0,
            acceptance_length_pooled=float(produced.sum() / total) if drafted.any() else 1.0,
            histogram=tuple(int(n) for n in histogram.sum(axis=0)),
            accepted_at=tuple(float(n) for n in accepted_at.sum(axis=0) / total),
            prompts=len(names),
            tokens=int(sum(batch.counts.sum() for batch in chain)),
            lossless=not mismatches,
            mismatches=mismatches,
            seconds_plain=seconds_plain,
            seconds_speculative=seconds,
            drafting=self._drafting(chain, params),
        )

    def _drafting(self, chain: Sequence[ChainAnswers], params: Params) -> dict[str, Any]:
        """The metrics of all answers, divided once."""
        if self._examine is None:
            return {}
        batches = [self._examine(*batch, params) for batch in zip(self._batches, chain, strict=True)]
        total = jax.tree.map(lambda *sums: jnp.asarray(np.sum(sums, axis=0)), *batches)
        return {name: np.asarray(value).tolist() for name, value in _metrics(total).items()}

    def _timed(self, decode: Callable[[PromptBatch], Any]) -> tuple[list[Any], float]:
        """Answers on the host, a batch each, and the seconds of all."""
        start = time.perf_counter()
        answers = []
        for batch, indices in zip(self._batches, self._indices, strict=True):
            answers.append(jax.device_get(decode(batch)))
            self._advance(int((indices >= 0).sum()))
        return answers, time.perf_counter() - start


def _metrics(sums: DraftingSums) -> dict[str, Any]:
    return {**drafting_metrics(sums), **tree_metrics(sums)}


def _cut(answers: Answers | ChainAnswers, row: int) -> list[int]:
    return answers.tokens[row, : answers.counts[row]].tolist()


def _compare(name: str | int, plain: list[int], speculative: list[int], gaps: np.ndarray) -> Mismatch | None:
    if plain == speculative:
        return None
    shared = min(len(plain), len(speculative))
    differing = (i for i in range(shared) if plain[i] != speculative[i])
    position = next(differing, shared)
    return Mismatch(
        prompt=name,
        position=position,
        plain=plain[position] if position < len(plain) else None,
        speculative=speculative[position] if position < len(speculative) else None,
        gap=float(gaps[min(position, len(gaps) - 1)]),
    )
