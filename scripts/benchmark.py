#!/usr/bin/env python3
"""Compare settings in one run and print one JSON object.

pipeline: order of the batches, draw from the pool, placement of the models. telemetry: everything watched or nothing,
step by step.
decode: plain, chain and tree decoding. step: the drafter step. kernels: implementations of either model's attention,
checked and timed on the accelerator at hand.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from dflash_jax import cli
from dflash_jax.sections import Attention, Remat, TargetAttention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subjects = parser.add_subparsers(dest="subject", required=True)
    pipeline = subjects.add_parser(
        "pipeline", help="train the quickstart's models on a skewed corpus, setting by setting"
    )
    pipeline.add_argument("--settings", help="names separated by commas (default: all); an unknown name lists them")
    pipeline.add_argument("--steps", type=cli.positive, default=25, help="optimizer steps a training (default 25)")
    pipeline.add_argument("--rounds", type=cli.positive, default=1, help="how often each setting runs (default 1)")
    telemetry = subjects.add_parser("telemetry", help="one training, watched and unwatched in turn")
    telemetry.add_argument("--rounds", type=cli.positive, default=20, help="rounds of five turns (default 20)")
    telemetry.add_argument("--steps", type=cli.even, default=4, help="optimizer steps a turn, even (default 4)")
    decode = subjects.add_parser("decode", help="plain, chain and tree decoding of one pair of models, in turn")
    decode.add_argument("--target", required=True, help="folder, hub id or embedded:NAME")
    decode.add_argument("--drafter", required=True, help="run folder, checkpoint, exported or published folder")
    decode.add_argument("--prompts", required=True, help="JSONL, one object with messages a line")
    decode.add_argument("--budgets", type=cli.numbers, default=(16, 64), help="nodes of the trees (default 16,64)")
    decode.add_argument("--limit", type=cli.positive, help="use only the first so many prompts")
    decode.add_argument("--max-new-tokens", type=cli.positive, default=128, help="default 128")
    decode.add_argument("--batch-size", type=cli.positive, default=8, help="prompts at a time (default 8)")
    decode.add_argument("--rounds", type=cli.positive, default=3, help="how often each decodes (default 3)")
    cli.add_device_arguments(decode)
    step = subjects.add_parser("step", help="the drafter step: seconds, share of the machine's peak, memory")
    step.add_argument("--preset", choices=("small", "mid", "qwen3-8b"), default="mid", help="default mid")
    step.add_argument("--steps", type=cli.positive, default=5, help="optimizer steps a round (default 5)")
    step.add_argument("--rounds", type=cli.positive, default=3, help="rounds (default 3)")
    step.add_argument("--remat", choices=get_args(Remat), help="what is made anew (default: the preset's choice)")
    step.add_argument("--scan-layers", action="store_true", help="compile one layer and loop over them")
    step.add_argument("--against", help="a script that times the same presets, in turn with ours")
    step.add_argument("--python", default=sys.executable, help="the interpreter that runs it (default: this one)")
    cli.add_device_arguments(step)
    kernels = subjects.add_parser("kernels", help="a model's attention by each implementation: errors, seconds")
    kernels.add_argument("--model", choices=("drafter", "target"), default="drafter", help="default drafter")
    kernels.add_argument("--preset", choices=("small", "mid", "qwen3-8b"), default="mid", help="default mid")
    kernels.add_argument(
        "--implementations",
        help="separated by commas (default: all; on a CPU `kernel` and `splash` are interpreted, which takes minutes)",
    )
    kernels.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    kernels.add_argument("--window", type=cli.positive, help="tokens that a row sees back (default: all)")
    kernels.add_argument("--rounds", type=cli.positive, default=5, help="how often each runs (default 5)")
    arguments = parser.parse_args()

    runs = (run_pipeline, run_telemetry, run_decode, run_step, run_kernels)
    run = {function.__name__.removeprefix("run_"): function for function in runs}[arguments.subject]
    with tempfile.TemporaryDirectory() as folder:
        report = run(arguments, Path(folder), lambda text: print(text, file=sys.stderr))
    print(json.dumps(report, indent=2))


def run_pipeline(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict:
    from dflash_jax.errors import UserError
    from dflash_jax.training.pipeline_benchmark import SETTINGS, pipeline_benchmark

    names = arguments.settings.split(",") if arguments.settings else list(SETTINGS)
    unknown = [name for name in names if name not in SETTINGS]
    if unknown:
        raise UserError(f"--settings: there is no {unknown[0]}; there are {', '.join(SETTINGS)}")
    return pipeline_benchmark(names, arguments.steps, arguments.rounds, folder, say)


def run_telemetry(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict:
    from dflash_jax.training.telemetry_benchmark import telemetry_benchmark

    return telemetry_benchmark(arguments.rounds, arguments.steps, folder, say)


def run_decode(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict:
    from dflash_jax.training.decode_benchmark import decode_benchmark
    from dflash_jax.training.evaluation import EvaluationSettings

    settings = EvaluationSettings(
        max_new_tokens=arguments.max_new_tokens, batch_size=arguments.batch_size, limit=arguments.limit
    )
    return decode_benchmark(
        arguments.target,
        arguments.drafter,
        arguments.prompts,
        settings,
        arguments.budgets,
        arguments.rounds,
        cli.device_section(arguments),
        say,
    )


def run_step(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict:
    from dflash_jax.training.step_benchmark import step_benchmark

    against = [arguments.python, arguments.against] if arguments.against else None
    section = cli.device_section(arguments)
    changes = {"scan_layers": arguments.scan_layers} | ({"remat": arguments.remat} if arguments.remat else {})
    return step_benchmark(arguments.preset, section, arguments.steps, arguments.rounds, against, say, **changes)


def run_kernels(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict:
    from dflash_jax.errors import UserError
    from dflash_jax.training.kernel_benchmark import kernel_benchmark

    known = [
        name for name in get_args(Attention if arguments.model == "drafter" else TargetAttention) if name != "auto"
    ]
    names = arguments.implementations.split(",") if arguments.implementations else known
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"--implementations: there is no {unknown[0]}; there are {', '.join(known)}")
    return kernel_benchmark(
        arguments.model, arguments.preset, names, arguments.dtype, arguments.rounds, arguments.window, say
    )


if __name__ == "__main__":
    cli.run(main)
