"""The options of `pma VERB …`: one argparse parser per verb. Does not import JAX.

The help of a verb is the docstring of its function in `verbs`.
"""

import argparse
import difflib
import inspect
import re
from collections.abc import Callable
from typing import Any, NoReturn

from pma_jax.cli import grid_options, launch_options, values, verbs

_OUTPUT_DTYPES = ("keep", "float32", "bfloat16", "float16")
CONFIG_HELP = "a .py file with get_config(), or the name of a shipped configuration such as demo"


class _Parser(argparse.ArgumentParser):
    """A parser that takes options by their full names, single-valued ones once, and reports an error as one line."""

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False)
        self.register("action", None, _StoreOnce)
        self.register("action", "store", _StoreOnce)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, and refuse unknown ones in the parser of the verb, which knows the nearest option."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = re.findall(r"--[\w-]+", self.format_usage())
            near = difflib.get_close_matches(unknown[0].partition("=")[0], options, 1)
            self.error(f"unknown {' '.join(unknown)}" + (f" (did you mean {near[0]}?)" if near else ""))
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())}; see `{self.prog} --help`\n")


class _StoreOnce(argparse.Action):
    """Store the value of an option, and refuse a second one instead of replacing the first."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = vars(namespace).setdefault("given", set())  # the verb can tell a given value from the same default
        if option_string is not None and self.dest in given:
            raise argparse.ArgumentError(self, "is given twice; keep one")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class _AppendOnce(argparse.Action):
    """Append the value of an option that may be repeated, and refuse the same value twice."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = getattr(namespace, self.dest)
        if values in given:
            raise argparse.ArgumentError(self, "is given twice; keep one")
        setattr(namespace, self.dest, (*given, values))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line.

    The parsed options hold the name of the verb as `verb`, its function as `function`, and `takes_config`: whether
    `--config.SECTION.KEY=VALUE` applies to it.
    """
    top = _Parser(
        prog="pma",
        description="Train language models on a token schedule, merge their checkpoints, and preview annealing.",
        epilog="Each verb has --help with an example. An error is one line, with exit status 1; 2 for a usage error.",
    )
    subparsers = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_training_verbs(subparsers)
    verb = _add_verb(subparsers, grid_options.grid, config=True, json=True)
    grid_options.add_options(verb, CONFIG_HELP, _AppendOnce, lambda words: parser().parse_args(words))
    launch_options.add_options(_add_verb(subparsers, launch_options.launch), _AppendOnce)
    _add_plan_verb(subparsers)
    _add_merge_verb(subparsers)
    _add_preview_verbs(subparsers)
    _add_evaluation_verbs(subparsers)
    _add_conversion_verbs(subparsers)
    return top


def _add_training_verbs(subparsers: Any) -> None:
    verb = _add_verb(subparsers, verbs.train, config=True, hosts=True)
    verb.add_argument("--config", required=True, help=CONFIG_HELP)
    verb.add_argument("--workdir", required=True, help="the run's directory; an existing run is resumed")

    verb = _add_verb(subparsers, verbs.fork, config=True, hosts=True)
    verb.add_argument("run", help="the run to start from")
    verb.add_argument(
        "--at-tokens", required=True, type=values.tokens, help="tokens at which RUN saved a training state"
    )
    verb.add_argument("--workdir", required=True, help="the new run's directory; the same fork is resumed")
    verb.add_argument("--weights", metavar="SNAPSHOT", help="start from these parameters, such as a merge (PMA-init)")


def _add_plan_verb(subparsers: Any) -> None:
    verb = _add_verb(subparsers, verbs.plan, config=True, json=True)
    verb.add_argument("--config", required=True, help=CONFIG_HELP)
    verb.add_argument(
        "--topology", required=True, metavar="CHIP:SHAPE", help="TPUs, such as v5p:4x4x8; 2*v5e:4x4 is two slices"
    )
    verb.add_argument("--out", metavar="FILE", help="also write the plan to FILE, as JSON")
    verb.add_argument("--search", action="store_true", help="only search the microbatches and the rematerialization")
    verb.add_argument("--traffic", action="store_true", help="also list the operations with the most memory traffic")
    for name, default, text in (
        ("--storage-bandwidth", "10GB/s", "of the checkpoint storage, for all hosts together"),
        ("--host-bandwidth", "1GB/s", "between one host and the storage"),
    ):
        text = f"bandwidth {text} (default {default})"
        verb.add_argument(name, default=default, type=values.rate, metavar="SIZE/s", help=text)
    text = "length of the annealing that merging replaces, as a share of the run's tokens (default 0.2)"
    verb.add_argument("--annealing-share", default=0.2, type=values.share, metavar="SHARE", help=text)


def _add_merge_verb(subparsers: Any) -> None:
    verb = _add_verb(subparsers, verbs.merge, json=True, hosts=True)
    verb.add_argument(
        "source",
        nargs="+",
        help="a run, a checkpoint (Orbax or safetensors), a directory of checkpoints, hf://org/repo@revision, "
        "or a pattern of revisions such as hf://org/repo@step-{1000..9000..1000}; ordered by tokens or steps",
    )
    verb.add_argument("--out", required=True, help="the directory to write; must not exist")
    verb.add_argument(
        "--recipe", action="append", help="sma (default), ema:alpha=0.2, wma, lagfree:lag=0.5, ...; may be repeated"
    )
    verb.add_argument("--last", type=values.positive, metavar="N", help="merge only the newest N checkpoints")
    verb.add_argument(
        "--tokens",
        type=values.token_range,
        metavar="A:B",
        help="merge only from A to B tokens, such as 20B:40B or 2e10:",
    )
    verb.add_argument(
        "--every", type=values.positive_tokens, metavar="V", help="merge only every V tokens, counted from the newest"
    )
    verb.add_argument(
        "--tolerance", type=values.tokens, metavar="T", help="largest distance from --every's positions (V/10)"
    )
    _add_kind(verb, "of a run's snapshots to merge")
    _add_merge_options(verb)
    verb.add_argument(
        "--shard-size", default="5GB", type=values.size, metavar="SIZE", help="largest file (default 5GB)"
    )
    verb.add_argument(
        "--on",
        default="host",
        choices=("host", "mesh"),
        help="add on the cores of the host, part by part (default), or on the devices of all processes, which hold a "
        "share of the model each and write to buckets without a local disk",
    )
    verb.add_argument("--dry-run", action="store_true", help="print the plan of the merge and write nothing")


def _add_merge_options(verb: Any) -> None:
    """Add the options of merges of any checkpoints."""
    verb.add_argument("--across-stages", action="store_true", help="allow a merge of several runs or stages")
    verb.add_argument(
        "--order",
        default="position",
        choices=("position", "given"),
        help="oldest first by tokens or steps (default position), or given: as the command names the sources",
    )
    verb.add_argument(
        "--tokens-per-step", type=values.positive_tokens, metavar="T", help="to compute tokens from steps"
    )
    _add_subtree(verb)
    verb.add_argument(
        "--dtype", default="keep", choices=_OUTPUT_DTYPES, help="dtype of the output's floating-point leaves"
    )
    verb.add_argument(
        "--integers",
        default="equal",
        choices=("equal", "newest"),
        help="refuse integer leaves that differ (default), or take those of the newest checkpoint",
    )
    verb.add_argument("--format", default="keep", choices=("keep", "orbax", "safetensors"), help="format of the output")
    verb.add_argument(
        "--memory-limit", default="1GiB", type=values.size, metavar="SIZE", help="memory limit (default 1GiB)"
    )


def _add_score_options(verb: Any) -> None:
    """Add the options of a sweep of any checkpoints."""
    group = verb.add_argument_group("any checkpoints, scored by `pma evaluate` or a program")
    group.add_argument(
        "--score",
        metavar="COMMAND",
        help="a program that prints a number or a JSON object; {} is the merge's directory",
    )
    group.add_argument("--out", default="sweep", help="the directory of sweep.json and merges (default sweep)")
    group.add_argument(
        "--ends",
        default=(),
        type=values.ends,
        metavar="A,B",
        help="tokens or steps (20B), or 60%% of the newest (default 100%%)",
    )
    group.add_argument(
        "--keep", default="best", choices=("best", "all", "none"), help="the merges that stay (default best)"
    )
    group.add_argument(
        "--best",
        default="lowest",
        choices=("lowest", "highest"),
        help="the score that is best (default: with --score lowest, else as the metric says)",
    )
    group.add_argument(
        "--metric",
        type=values.name,
        metavar="NAME",
        help="the score, if there are several numbers, such as arc_easy/acc",
    )
    group.add_argument("--parallel", default=1, type=values.positive, metavar="N", help="programs at once (default 1)")
    group.add_argument(
        "--disk-limit",
        default="50GB",
        type=values.size,
        metavar="SIZE",
        help="limit of the merges on disk (default 50GB)",
    )
    group.add_argument(
        "--score-timeout",
        default=86400.0,
        type=values.seconds,
        metavar="S",
        help="end a program after S seconds (a day)",
    )
    group.add_argument("--dry-run", action="store_true", help="print merges, bytes and time, and write nothing")
    _add_merge_options(group)


def _add_preview_verbs(subparsers: Any) -> None:
    verb = _add_verb(subparsers, verbs.sweep, config=True, json=True, hosts=True)
    verb.add_argument(
        "source",
        nargs="+",
        help="the run whose newest snapshots are merged; RUN/sweep.json is written; or any checkpoints that `pma "
        "merge` reads",
    )
    recipes, windows = "sma,ema:alpha=0.1,ema:alpha=0.2,wma", "3,6,10,15"
    verb.add_argument(
        "--recipes", default=recipes, type=values.recipes, metavar="R,R", help=f"recipes (default {recipes})"
    )
    verb.add_argument(
        "--windows", default=windows, type=values.positives, metavar="N,N", help=f"windows (default {windows})"
    )
    verb.add_argument(
        "--intervals", default="1", type=values.positives, metavar="I,I", help="merge every I-th snapshot (default 1)"
    )
    _add_kind(verb, "of a run's snapshots; default point")
    _add_task_options(verb)
    _add_score_options(verb)

    verb = _add_verb(subparsers, verbs.watch, hosts=True)
    verb.add_argument("run", help="a run, in training or finished; previews are appended to RUN/watch.jsonl")
    verb.add_argument("--recipe", help="the recipe, such as wma (default: the run's preview.recipe)")
    verb.add_argument(
        "--windows", type=values.positives, metavar="N,N", help="windows (default: the run's preview.windows)"
    )
    _add_kind(verb, "default: the first that the run saves")
    verb.add_argument("--poll-seconds", default=5.0, type=values.seconds, help="seconds between checks (default 5)")
    verb.add_argument("--once", action="store_true", help="preview the existing snapshots and exit")


def _add_kind(verb: argparse.ArgumentParser, note: str) -> None:
    verb.add_argument(
        "--kind", type=values.snapshot_kind, metavar="KIND", help=f"point, block_mean, worker_<k> ({note})"
    )


def _add_evaluation_verbs(subparsers: Any) -> None:
    verb = _add_verb(subparsers, verbs.evaluate, config=True, json=True, hosts=True)
    verb.add_argument(
        "target", nargs="+", help="a run (its newest snapshot), a snapshot, or a directory of a Hugging Face model"
    )
    verb.add_argument(
        "--part",
        choices=["report", "select", "fit", "all"],
        default="report",
        help="the part of the held-out documents (default: report; training, previews and sweeps use select)",
    )
    verb.add_argument(
        "--numbers",
        action="store_true",
        help="print one line, a JSON object of the numbers of one target, and record nothing in its run",
    )
    _add_task_options(verb)

    verb = _add_verb(subparsers, verbs.inspect, json=True)
    verb.add_argument("target", help="a run, a snapshot, or a checkpoint or directory of them that `pma merge` reads")
    _add_subtree(verb)
    verb.add_argument("--verify", action="store_true", help="read all data again and compare it with its digests")
    verb.add_argument("--with-sources", action="store_true", help="with --verify: also verify the sources of a merge")

    verb = _add_verb(subparsers, verbs.report, json=True)
    verb.add_argument("run", nargs="+", help="the run, then the runs forked from it")
    verb.add_argument("--out", help="the directory to write to (default: that of the first run)")


def _add_task_options(verb: Any) -> None:
    """Add the options of scores of tasks."""
    group = verb.add_argument_group("tasks")
    group.add_argument(
        "--tasks",
        type=values.names,
        metavar="T,T",
        help="score tasks of lm-eval instead (arc_easy,hellaswag), folders of YAML tasks, olmo:NAME or pma:NAME",
    )
    group.add_argument("--limit", type=values.positive, metavar="N", help="only the first N documents of each task")
    group.add_argument("--shots", type=values.whole, metavar="K", help="examples in each prompt (default: the task's)")


def _add_conversion_verbs(subparsers: Any) -> None:
    verb = _add_verb(subparsers, verbs.import_, json=True)
    verb.add_argument("model", help="a Hugging Face model's directory, or hf://org/repo@revision")
    verb.add_argument("--out", required=True, help="the snapshot to write; must not exist")

    verb = _add_verb(subparsers, verbs.export, json=True)
    verb.add_argument(
        "snapshot",
        help="a snapshot of any kind, a merge, an imported model, or a run (its newest); or a checkpoint or merge of "
        "MaxText or levanter (Llama, Qwen3, Qwen3-MoE)",
    )
    verb.add_argument("--out", required=True, help="the directory to write; must not exist")
    verb.add_argument("--dtype", default="keep", choices=_OUTPUT_DTYPES, help="dtype of the output")
    verb.add_argument(
        "--shard-size", default="5GB", type=values.size, metavar="SIZE", help="largest file (default 5GB)"
    )
    verb.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json to use instead of the run's")
    group = verb.add_argument_group(
        "checkpoints of MaxText and levanter, which do not contain the model's configuration"
    )
    group.add_argument(
        "--model-config",
        metavar="FILE",
        help="config.json of the model, with rope_theta, rms_norm_eps, hidden_act and all sizes; what is missing, or "
        "differs from the tree, is refused",
    )
    group.add_argument(
        "--maxtext",
        dest="maxtext_settings",
        action="append",
        type=values.setting,
        metavar="KEY=VALUE",
        help="a key of MaxText's configuration on which its weights depend: rope_type=default or llama3.1; for "
        "Llama decoder_block; with tied embeddings normalize_embedding_logits=true or false; may be repeated",
    )


def _add_subtree(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--subtree",
        dest="subtrees",
        action=_AppendOnce,
        default=(),
        metavar="PATH",
        help="a subtree to read of another trainer's checkpoint, such as params or target/model; may be repeated",
    )


def _add_verb(
    subparsers: Any, function: Callable[..., None], *, config: bool = False, json: bool = False, hosts: bool = False
) -> argparse.ArgumentParser:
    """Add a parser for a verb, with the options that it shares with others in groups of their own."""
    text = inspect.getdoc(function) or ""
    verb = subparsers.add_parser(
        function.__name__.rstrip("_"),
        help=text.partition("\n")[0],
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.set_defaults(function=function, takes_config=config)
    verb.add_argument("--debug", action="store_true", help="show the traceback of an error (or set PMA_DEBUG=1)")
    if config:
        group = verb.add_argument_group("configuration")
        group.add_argument("--config.SECTION.KEY=VALUE", action="store_true", help="change any key; may be repeated")
    if json:
        group = verb.add_argument_group("output")
        group.add_argument("--json", action="store_true", help="print JSON instead of a table")
    if hosts:
        group = verb.add_argument_group("several hosts")
        group.add_argument(
            "--distributed", action="store_true", help="this is one of several processes of the command (docs/hosts.md)"
        )
        group.add_argument(
            "--heartbeat-seconds",
            type=values.positive,
            default=100,
            metavar="S",
            help="stop after another process has been silent for this long (default 100)",
        )
    return verb
