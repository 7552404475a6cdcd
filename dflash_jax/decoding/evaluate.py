"""The acceptance report: a drafter judged by real speculative decoding next to plain decoding of the same prompts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dflash_jax.decoding.generate import Answers, make_plain_decoder
from dflash_jax.decoding.methods import make_decoder, speculative_decoder
from dflash_jax.decoding.prompts import PromptBatch, batch_prompts
from dflash_jax.decoding.speculative import CHAIN, Method, SpeculativeAnswers
from dflash_jax.decoding.timing import time_rounds
from dflash_jax.models.architecture import DrafterArchitecture
from dflash_jax.models.target import FrozenTarget
from dflash_jax.models.weights import Params
from dflash_jax.parallel import compiled_only
from dflash_jax.telemetry.drafting import DraftingSums, drafting_metrics, tree_metrics

FEW_ROUNDS, FLAT = 20, 1e-3

Examine = Callable[[PromptBatch, SpeculativeAnswers, Params], DraftingSums]


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
    """What `scripts/evaluate.py --json` writes of a file of prompts."""

    method: dict[str, Any]
    """Name and values of the method."""
    acceptance_length: float
    """Mean over prompts of the mean tokens a round, the bonus token included."""
    acceptance_length_pooled: float
    """Tokens over rounds, all prompts together."""
    histogram: tuple[int, ...]
    """Rounds that produced 1..block tokens."""
    accepted_at: tuple[float, ...]
    """Share of rounds whose draft at offset 1..block-1 was accepted."""
    conditional_at: tuple[float, ...]
    """The same, of the rounds whose drafts before that offset were accepted."""
    foretold: float
    """Accepted tokens a round that the drafter's own probabilities foretell, if they were the target's."""
    realised: float
    """Accepted tokens a round, those behind the end of an answer included."""
    prompts: int
    tokens: int
    lossless: bool | None
    """Whether every answer is plain decoding's; none where the method only keeps its law."""
    mismatches: tuple[Mismatch, ...]
    seconds_plain: float
    seconds_speculative: float
    speedup: float
    draft_seconds: float | None
    """Of all rounds one by one, in a pass of their own; none where nobody asked."""
    verify_seconds: float | None
    drafting: dict[str, Any]
    """The drafting metrics of the same answers in the training layout, with the anchors that decoding visited: what
    training would report of them. Empty where nobody looked."""
    warnings: tuple[str, ...] = ()
    """What looks wrong."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def with_warnings(self, *texts: str) -> "Report":
        return replace(self, warnings=(*self.warnings, *texts))


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
        *,
        method: Method = CHAIN,
        seed: int = 0,
        split_seconds: bool = False,
        advance: Callable[[int], None] = lambda prompts: None,
        examine: Examine | None = None,
    ):
        """
        Args:
            split_seconds: decode once more, round by round, to tell the seconds of drafting from those of verifying.
            advance: is called with the number of prompts that were just decoded, plainly or with the drafter.
            examine: gives the drafting metrics' sums of a batch of answers; what it takes is not timed.
        """
        self._examine, self._advance, self._split_seconds = examine, advance, split_seconds
        self._names, self._method, self._mesh, self._target = names, method, mesh, target
        self._batches = list(batch_prompts(prompts, batch_size, mesh))
        self._indices = [jax.device_get(batch.indices) for batch in self._batches]
        self._plain_decoder = make_plain_decoder(target, max_new_tokens, mesh, method.sampling, seed)
        if method.name != "plain":
            self._decode = speculative_decoder(target, drafter_graph, arch, max_new_tokens, method)
            self._decoder = make_decoder(self._decode, target, mesh, seed)
        self._plain: tuple[list[Answers], float] | None = None

    def plain(self) -> tuple[list[Answers], float]:
        """The target's own answers, a batch each, and the seconds they took."""
        if self._plain is None:
            self._plain_decoder.compile(self._batches)
            self._plain = self._timed(self._plain_decoder)
        return self._plain

    def seconds(self, params: Params) -> tuple[float, float]:
        """Decode all prompts plainly and with this drafter, once more, for the clock alone."""
        self._plain_decoder.compile(self._batches)
        self._decoder.compile(self._batches, params)
        _, plain = self._timed(self._plain_decoder)
        _, speculative = self._timed(lambda batch: self._decoder(batch, params))
        return plain, speculative

    def report(self, params: Params) -> Report:
        """Decode all prompts with this drafter and compare."""
        plain, seconds_plain = self.plain()
        if self._method.name == "plain":
            return _plain_report(self._method, plain, seconds_plain, len(self._names))
        self._decoder.compile(self._batches, params)
        answers, seconds = self._timed(lambda batch: self._decoder(batch, params))
        draft_seconds = verify_seconds = None
        if self._split_seconds:
            both = (self._target.params, params)
            draft_seconds, verify_seconds = time_rounds(self._decode, both, self._batches, self._mesh)
        rows = [np.flatnonzero(indices >= 0).tolist() for indices in self._indices]
        names = [self._names[i] for indices in self._indices for i in indices[indices >= 0]]

        def of_prompts(values: Callable[[SpeculativeAnswers], np.ndarray]) -> np.ndarray:
            return np.concatenate([values(batch)[kept] for batch, kept in zip(answers, rows, strict=True)])

        histogram = of_prompts(lambda batch: batch.histogram)
        lengths = np.arange(1, histogram.shape[1] + 1)
        rounds, produced = histogram.sum(axis=1), (histogram * lengths[None, :]).sum(axis=1)
        drafted = rounds > 0  # a prompt answered by one token has no round
        total = max(1, int(rounds.sum()))
        accepted = of_prompts(lambda batch: batch.accepted_at).sum(axis=0)
        before = np.concatenate([[rounds.sum()], accepted[:-1]])
        pairs = (
            (_cut(p, row), _cut(s, row), p.gaps[row])
            for p, s, kept in zip(plain, answers, rows, strict=True)
            for row in kept
        )
        compared = (_compare(name, *pair) for name, pair in zip(names, pairs, strict=True))
        keeps_answers = self._method.proposal == "argmax"
        mismatches = tuple(mismatch for mismatch in compared if mismatch is not None) if keeps_answers else ()
        report = Report(
            method=asdict(self._method),
            acceptance_length=float((produced[drafted] / rounds[drafted]).mean()) if drafted.any() else 1.0,
            acceptance_length_pooled=float(produced.sum() / total) if drafted.any() else 1.0,
            histogram=tuple(int(n) for n in histogram.sum(axis=0)),
            accepted_at=tuple(float(n) for n in accepted / total),
            conditional_at=tuple(float(n) for n in accepted / np.maximum(before, 1)),
            foretold=float(of_prompts(lambda batch: batch.expected).sum() / total),
            realised=float(of_prompts(lambda batch: batch.matched).sum() / total),
            prompts=len(names),
            tokens=int(sum(batch.counts.sum() for batch in answers)),
            lossless=not mismatches if keeps_answers else None,
            mismatches=mismatches,
            seconds_plain=seconds_plain,
            seconds_speculative=seconds,
            speedup=seconds_plain / max(seconds, 1e-9),
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            drafting=self._drafting(answers, params),
        )
        return report.with_warnings(*suspicions(report))

    def _drafting(self, answers: Sequence[SpeculativeAnswers], params: Params) -> dict[str, Any]:
        """The metrics of all answers, divided once."""
        if self._examine is None:
            return {}
        batches = [self._examine(*batch, params) for batch in zip(self._batches, answers, strict=True)]
        total = jax.tree.map(lambda *sums: jnp.asarray(np.sum(sums, axis=0)), *batches)
        metrics = {**drafting_metrics(total), **tree_metrics(total)}
        return {name: np.asarray(value).tolist() for name, value in metrics.items()}

    def _timed(self, decode: Callable[[PromptBatch], Any]) -> tuple[list[Any], float]:
        """Answers on the host, a batch each, and the seconds of all."""
        start = time.perf_counter()
        answers = []
        for batch, indices in zip(self._batches, self._indices, strict=True):
            with compiled_only():
                answers.append(jax.device_get(decode(batch)))
            self._advance(int((indices >= 0).sum()))
        return answers, time.perf_counter() - start


def _plain_report(method: Method, answers: Sequence[Answers], seconds: float, prompts: int) -> Report:
    """A token a round, and nothing drafted."""
    tokens = int(sum(batch.counts.sum() for batch in answers))
    return Report(
        method=asdict(method),
        acceptance_length=1.0,
        acceptance_length_pooled=1.0,
        histogram=(tokens - prompts,),
        accepted_at=(),
        conditional_at=(),
        foretold=0.0,
        realised=0.0,
        prompts=prompts,
        tokens=tokens,
        lossless=True,
        mismatches=(),
        seconds_plain=seconds,
        seconds_speculative=seconds,
        speedup=1.0,
        draft_seconds=None,
        verify_seconds=None,
        drafting={},
    )


def suspicions(report: Report) -> list[str]:
    """What a sound drafter hardly ever shows, and a broken set-up often."""
    found = []
    if report.acceptance_length == 1.0 and sum(report.histogram):
        found.append("no draft was ever accepted: untrained, or drafter, target and template do not belong together")
    accepted = report.accepted_at
    if len(accepted) > 2 and sum(report.histogram) >= FEW_ROUNDS and 0 < accepted[0] <= accepted[-1] + FLAT:
        found.append("acceptance is the same at every offset; of real drafts the later ones fail more often")
    return found


def _cut(answers: Answers | SpeculativeAnswers, row: int) -> list[int]:
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
