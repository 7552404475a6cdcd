"""Plain, chain and tree decoding of one pair of models, in turn in one run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from dflash_jax.decoding.speculative import Method
from dflash_jax.sections import DevicesSection
from dflash_jax.training.evaluation import EvaluationSettings, open_subjects


def decode_benchmark(
    target: str,
    drafter: str,
    prompts: str,
    settings: EvaluationSettings,
    budgets: Sequence[int],
    rounds: int,
    devices: DevicesSection,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """By method (`plain`, `chain`, `tree@N`): `tokens_per_second` and `speedup` over plain decoding, medians over
    rounds in which every method decodes all prompts in turn; `acceptance_length`, `draft_seconds`, `verify_seconds`
    (of all rounds of a decoding, one by one), `lossless`.

    Raises:
        UserError: as `open_subjects`.
    """
    subjects = open_subjects(target, drafter, [prompts], settings, devices)
    params = subjects.drafter.params
    sampling = settings.method.sampling
    methods = {"chain": Method("chain", sampling)}
    methods |= {f"tree@{budget}": Method("tree", sampling, budget=budget) for budget in budgets}
    evaluators, reports = {}, {}
    for name, method in methods.items():
        how = replace(settings, method=method, split_seconds=True, tree_blocks=0)
        evaluators[name] = subjects.evaluator(prompts, how, lambda done: None)
        reports[name] = evaluators[name].report(params)
        say(f"{name}: acceptance {reports[name].acceptance_length:.3f}")
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for number in range(rounds):
        for name in list(methods)[:: -1 if number % 2 else 1]:
            seconds[name].append(evaluators[name].seconds(params))
            plain, own = seconds[name][-1]
            say(f"round {number + 1}/{rounds}, {name}: {own:.2f} s, plain {plain:.2f} s")
    tokens = next(iter(reports.values())).tokens
    plain = median(plain for pairs in seconds.values() for plain, _ in pairs)
    result: dict[str, dict[str, Any]] = {
        "plain": {
            "tokens_per_second": round(tokens / plain, 2),
            "acceptance_length": 1.0,
            "draft_seconds": 0.0,
            "verify_seconds": round(plain, 3),
            "speedup": 1.0,
            "lossless": True,
        }
    }
    for name, report in reports.items():
        own = median(own for _, own in seconds[name])
        result[name] = {
            "tokens_per_second": round(report.tokens / own, 2),
            "acceptance_length": round(report.acceptance_length, 4),
            "draft_seconds": round(report.draft_seconds, 3),
            "verify_seconds": round(report.verify_seconds, 3),
            "speedup": round(median(plain / own for plain, own in seconds[name]), 3),
            "lossless": report.lossless,
        }
    return result
