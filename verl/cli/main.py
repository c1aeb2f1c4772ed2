"""The `verl` command. Every command is a thin function: parse, call the library, print."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from verl import __version__
from verl.cli import show
from verl.core.errors import ConfigError, VerlError

EPILOG = """first steps:
  verl doctor                                             what this machine can run
  verl train examples/quickstart/config.yaml                      train; the same command resumes
  verl train CONFIG.yaml trainer.optim.lr=1e-6            change a setting for one run
  verl plan CONFIG.yaml --devices 8xH200                  what a run would take on other machines
  verl show config CONFIG.yaml                            every setting, its value and where that came from
  verl show run runs/quickstart                           the curves of a run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors that verl raises on purpose are one line, without a traceback."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args, rest = parser().parse_known_args(argv)
    if not hasattr(args, "run"):
        parser().print_help()
        return 0
    if rest and not hasattr(args, "config"):
        print(f"verl: {rest[0]!r} is not an option of this command; verl {argv_word(argv)} --help lists them", file=sys.stderr)
        return 2
    args.overrides = rest
    try:
        return args.run(args) or 0
    except VerlError as error:
        print(f"verl: {error}", file=sys.stderr)
        if os.environ.get("VERL_TRACEBACK"):
            raise
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("verl: stopped at once; the next start continues from the last checkpoint", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0


def argv_word(argv: Sequence[str] | None) -> str:
    """The command that was typed."""
    return next(iter(argv if argv is not None else sys.argv[1:]), "")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="verl", description="Reinforcement learning for language models, from one CPU to many GPUs.",
                                  epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--version", action="version", version=f"verl {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, run, help: str, parent=commands) -> argparse.ArgumentParser:
        p = parent.add_parser(name, help=help, description=help)
        p.set_defaults(run=run)
        return p

    p = command("train", train, "train as a config says; the same command resumes a run that was stopped")
    p.add_argument("config", metavar="CONFIG.yaml", help="settings; any can be overridden: trainer.optim.lr=1e-6")
    p = command("plan", show.forecast, "memory and time of a config on devices that need not be here, or what would fit there")
    p.add_argument("config", metavar="CONFIG.yaml")
    p.add_argument("--devices", metavar="8xH200", help="how many of which kind (H200, H100, A100); default: this machine")
    command("doctor", show.doctor, "what this machine has, and which backends verl would choose")
    p = command("eval", evaluate, "score a model directory on a dataset with the config's rewards")
    p.add_argument("config", metavar="CONFIG.yaml")
    p.add_argument("--model", help="the model directory to score; default: the run's exported policy, else the config's actor")
    p = command("generate", generate, "answer prompts with a model directory")
    p.add_argument("model", help="a model directory, or a run directory with an exported policy")
    p.add_argument("prompts", nargs="+", metavar="PROMPT", help="prompts, or - to read them from standard input, one a line")
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    p.add_argument("--samples", type=int, default=1)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--raw", action="store_true", help="do not wrap prompts in the chat template")
    p = command("export", export_run, "write the policy of a run's newest checkpoint as a model directory")
    p.add_argument("directory", metavar="RUN", help="a run directory (trainer.output_dir)")
    p.add_argument("out", metavar="OUT", help="where the model directory goes")
    p = commands.add_parser("show", help="look at a config, plan, dataset, step graph, timeline or run without training",
                            description="Look at a config, plan, dataset, step graph, timeline or run without training.")
    kinds = p.add_subparsers(title="what", metavar="WHAT", required=True)
    for name, run, help, what in (
            ("config", show.config, "the resolved settings and where each value came from", "CONFIG.yaml"),
            ("plan", show.plan_of, "which backends would run and what falls back", "CONFIG.yaml"),
            ("data", show.data, "the first rows with ids, text and trained tokens", "CONFIG.yaml"),
            ("graph", show.graph, "the verbs a step of a run really ran: who, reading and writing what, for how long", "RUN"),
            ("timeline", show.timeline, "how busy every role was, as a table and a picture", "RUN"),
            ("run", show.run, "progress and curves of a run", "RUN")):
        command(name, run, help, kinds).add_argument("config" if what == "CONFIG.yaml" else "directory", metavar=what)
    return top


def train(args: argparse.Namespace) -> int:
    from verl.core.config import dump
    from verl.data import RLDataLoader
    from verl.trainer.config import load_run
    from verl.trainer.rl_trainer import RLTrainer
    loaded = load_run(args.config, args.overrides)
    config = loaded.config
    loader = RLDataLoader(config.data) if config.data.train is not None else None  # tasks of a mixture may have data of their own
    trainer = RLTrainer(config.trainer, loader, config.model, resolved=dump(config, loaded.origins))
    run = trainer.train()
    if run.stopped:
        return 128 + run.stop_signal
    show.summary(run.dir, args.config)
    return 0


def evaluate(args: argparse.Namespace) -> int:
    from verl.trainer.config import load_run
    from verl.trainer.evaluate import evaluate_config
    config = load_run(args.config, args.overrides).config
    for name, value in evaluate_config(config, args.model).items():
        print(f"{name:40s} {value:.4f}")
    return 0


def generate(args: argparse.Namespace) -> int:
    from verl.trainer.evaluate import generate_texts
    prompts = sys.stdin.read().splitlines() if args.prompts == ["-"] else args.prompts
    model = Path(args.model) / "model" if (Path(args.model) / "model" / "config.json").is_file() else args.model
    answers = generate_texts(str(model), prompts, args.max_tokens, args.temperature, args.samples, args.seed, args.raw)
    for prompt, texts in zip(prompts, answers):
        print(f"> {prompt}")
        for text in texts:
            print(text)
    return 0


def export_run(args: argparse.Namespace) -> int:
    from verl.trainer.evaluate import export_checkpoint
    print(f"verl: wrote {export_checkpoint(Path(args.directory), Path(args.out))}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
