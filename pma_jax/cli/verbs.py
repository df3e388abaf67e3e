"""`pma VERB …`: one function a verb, each thin. JAX is imported by the verbs that need it, not by `--help`."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pma_jax.cli.arguments import parser
from pma_jax.runtime import signals
from pma_jax.runtime.errors import error_line
from pma_jax.storage.paths import is_bucket, locate

CONFIG_PREFIX = "--config."
NOTHING = "nothing was written"
# Verb -> what is left when a signal stops it.
AFTER_STOP = {
    "train": "the same command goes on from the last saved state",
    "fork": "the same command goes on from the last saved state",
    "merge": "nothing was published; the same command goes on where this one stopped",
    "sweep": "nothing of this grid was written",
    "watch": "the same command goes on from the last preview",
    "report": "what was written is whole; the same command writes the rest",
    **dict.fromkeys(("evaluate", "inspect", "plan", "import", "export"), NOTHING),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; exit status 0: done, 1: could not (one line says why), 2: called wrongly.

    130 and 143: stopped by SIGINT (Ctrl-C) or SIGTERM; one line says what is left.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    overrides = [word.removeprefix(CONFIG_PREFIX) for word in words if word.startswith(CONFIG_PREFIX)]
    options = parser(VERBS).parse_args([word for word in words if not word.startswith(CONFIG_PREFIX)])
    if overrides and not options.takes_config:
        print(f"error: `pma {options.verb}` takes no --config.key=value", file=sys.stderr)
        return 2
    options.overrides, options.words = overrides, words
    _quiet()
    try:
        with signals.catch_signals(interrupts=True), _together(options):
            options.function(options)
    except (ValueError, OSError) as error:
        print(f"error: {error_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(str(stop) or f"stopped: {AFTER_STOP[options.verb]}", file=sys.stderr)
        return getattr(stop, "status", 130)
    return 0


def train(options: argparse.Namespace) -> None:
    """Train, or resume what --workdir holds."""
    from pma_jax.runtime.allocator import keep_freed_memory

    keep_freed_memory()
    _join(options)
    from pma_jax import config as configuration
    from pma_jax.training import loop

    config = configuration.resolve(configuration.load(options.config), options.overrides)
    _say_done(loop.train(config, options.workdir))


def fork(options: argparse.Namespace) -> None:
    """Start a new run from another's full state, and train it."""
    from pma_jax.runtime.allocator import keep_freed_memory

    keep_freed_memory()
    _join(options)
    from pma_jax.runs.directory import open_run
    from pma_jax.training import fork, loop

    source = open_run(options.run)
    config = fork.fork_config(source, options.overrides)
    fork.fork(source, options.at_tokens, config, options.workdir, options.weights)
    _say_done(loop.train(config, options.workdir))


def merge(options: argparse.Namespace) -> None:
    """Average checkpoints of any trainer, from storage to storage."""
    _join(options)
    from pma_jax.merging import from_storage, gather
    from pma_jax.merging.engine import merge as engine

    gathered = gather.select_checkpoints(
        gather.gather(
            options.source, subtree=options.subtree, kind=options.kind, tokens_per_step=options.tokens_per_step
        ),
        last=options.last,
        between=options.tokens,
        every=options.every,
        tolerance=options.tolerance,
        across_stages=options.across_stages,
    )
    recipes = options.recipe or ["sma"]
    plan, gathered = from_storage.plan_merge(
        gathered,
        recipes,
        dtype=options.dtype,
        format=options.format,
        memory_limit_bytes=options.memory_limit,
        shard_bytes=options.shard_size,
    )
    outs = from_storage.output_paths(options.out, recipes)
    description = from_storage.describe_merge(plan, gathered, outs)
    (process, processes), meet = _share(options)
    if options.dry_run:
        engine.check_outputs(plan, outs)
    else:
        with _progress(process == 0) as progress:
            command = " ".join(["pma", *options.words])
            merged = engine.merge(
                plan, outs, command=command, progress=progress, share=(process, processes), barrier=meet
            )
        description |= {"notes": [*gathered.notes, *merged.notes], "seconds": merged.seconds}
    if process > 0:
        return
    for note in dict.fromkeys(description["notes"]):
        print(f"note: {note}", file=sys.stderr)
    if options.json:
        print(json.dumps(description, indent=2))
    elif options.dry_run:
        print(from_storage.format_plan(description))
    else:
        print(from_storage.format_result(description))


def sweep(options: argparse.Namespace) -> None:
    """Evaluate a grid of merges of a run's newest snapshots."""
    _join(options)
    from pma_jax.evaluation import sweep as sweeping
    from pma_jax.runs.directory import open_run
    from pma_jax.runtime import hosts

    run = open_run(options.run)
    result = sweeping.sweep(run, options.recipes, options.windows, options.intervals, options.kind)
    if not hosts.is_first():
        return
    from pma_jax.reporting import heat_map

    _table(options, result, [["merge", "loss"], *([r["text"], f"{r['loss']:.4f}"] for r in result["rows"])])
    for text, why in result["left_out"].items():
        print(f"note: {text} is left out: {why}", file=sys.stderr)
    if result["passes"] > 1:
        print(
            f"note: not all merges fit into memory at once: snapshots were read {result['passes']} times",
            file=sys.stderr,
        )
    print(f"written {heat_map.write_sweep_figure(result, run.path)}", file=sys.stderr)


def watch(options: argparse.Namespace) -> None:
    """Preview the merged models of a run that another process is training."""
    _join(options)
    from pma_jax.evaluation import watch as watching
    from pma_jax.runs.directory import open_run
    from pma_jax.runtime import hosts

    run = open_run(options.run)
    for line in watching.watch(
        run, options.recipe, options.windows, options.kind, poll_seconds=options.poll_seconds, once=options.once
    ):
        if hosts.is_first():
            print(line, flush=True)


def evaluate(options: argparse.Namespace) -> None:
    """Held-out loss of runs and snapshots."""
    _join(options)
    from pma_jax.evaluation import targets
    from pma_jax.runtime import hosts

    rows = targets.evaluate_targets(options.target, options.overrides)
    if not hosts.is_first():
        return
    header = ["target", "tokens", "loss", "perplexity", "bits/byte"]
    cells = [
        [r["target"], f"{r['tokens']:,}", f"{r['loss']:.4f}", f"{r['perplexity']:.3f}", f"{r['bits_per_byte']:.4f}"]
        for r in rows
    ]
    _table(options, rows, [header, *cells])


def inspect(options: argparse.Namespace) -> None:
    """What a run or a checkpoint of any format holds."""
    from pma_jax.merging import inspect as inspection
    from pma_jax.merging import verify

    if options.verify or options.with_sources:
        problems = verify.verify(options.target, options.with_sources)
        if problems:
            raise ValueError(f"{options.target} is not what was written: {'; '.join(problems[:10])} ({len(problems)})")
        print(f"{options.target}: every digest is that of what was written")
        return
    facts = inspection.inspect(options.target, options.subtree)
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        print(inspection.as_text(facts))


def plan(options: argparse.Namespace) -> None:
    """Compile a run for a TPU topology, without a TPU: memory, FLOPs, step time, storage, what merging saves."""
    from pma_jax import config as configuration
    from pma_jax.planning import aot, run_plan
    from pma_jax.planning.plan_text import format_plan

    # Said before minutes of compiling, not after.
    if options.out and not is_bucket(options.out) and not Path(options.out).parent.is_dir():
        raise ValueError(f"--out {options.out}: there is no directory {Path(options.out).parent}: make it first")
    numbers = run_plan.plan_run(
        configuration.resolve(configuration.load(options.config), options.overrides),
        aot.tpu_topology(options.topology),
        storage_bytes_per_second=options.storage_bandwidth,
        annealing_share=options.annealing_share,
        log=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if options.out:
        locate(options.out).write_text(json.dumps(numbers, indent=2) + "\n")
    print(json.dumps(numbers, indent=2) if options.json else format_plan(numbers))
    refused = run_plan.out_of_memory_messages(numbers)
    if refused:
        raise ValueError(f"does not fit {options.topology}: {'; '.join(refused)}")


def import_(options: argparse.Namespace) -> None:
    """Turn a Hugging Face model (Llama, Qwen3, Qwen3-MoE) into a snapshot."""
    from pma_jax.interop import hf

    with _progress() as progress:
        made = hf.import_model(options.model, options.out, progress=progress)
    _say_converted(options, made)


def export(options: argparse.Namespace) -> None:
    """Turn a snapshot into a directory that Hugging Face transformers loads."""
    from pma_jax.interop import hf

    with _progress() as progress:
        made = hf.export_snapshot(
            options.snapshot,
            options.out,
            dtype=options.dtype,
            shard_bytes=options.shard_size,
            tokenizer=options.tokenizer,
            progress=progress,
        )
    _say_converted(options, made)


def report(options: argparse.Namespace) -> None:
    """Write report.json, report.png and report.html of a run and its forks."""
    from pma_jax.reporting import report as reporting
    from pma_jax.runs.directory import open_run

    run, *forks = [open_run(path) for path in options.run]
    numbers = reporting.build_report(run, forks)
    written = reporting.write_report(numbers, run, options.out or run.path)
    if options.json:
        print(json.dumps(numbers, indent=2))
    else:
        print(reporting.format_report(numbers))
    for path in written:
        print(f"written {path}", file=sys.stderr)


# `import` is a word of Python's, so its function's name ends in "_".
VERBS: dict[str, Callable[[argparse.Namespace], None]] = {
    verb.__name__.rstrip("_"): verb
    for verb in (train, fork, merge, sweep, watch, evaluate, inspect, plan, import_, export, report)
}


def _table(options: argparse.Namespace, data: Any, rows: list[list[str]]) -> None:
    if options.json:
        print(json.dumps(data, indent=2))
        return
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        first, *rest = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([first.strip().ljust(widths[0]), *rest]))


@contextlib.contextmanager
def _progress(is_shown: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """A bar with bytes and rate on a terminal; nothing in a log."""
    if not is_shown or not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("", total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _say_converted(options: argparse.Namespace, made: dict[str, Any]) -> None:
    for note in made["notes"]:
        print(f"note: {note}", file=sys.stderr)
    if options.json:
        print(json.dumps(made, indent=2))
        return
    tokenizer = f"tokenizer: {', '.join(made['tokenizer'])}" if made["tokenizer"] else "no tokenizer"
    print(f"{made['architecture']}, {made['parameters']:,} parameters, {made['bytes']:,} bytes; {tokenizer}")
    print(f"written to {made['out']}")


@contextlib.contextmanager
def _together(options: argparse.Namespace) -> Iterator[None]:
    """With --distributed, an error of this process ends it with its line at once: the others may wait for it."""
    if not getattr(options, "distributed", False):
        yield
        return
    from pma_jax.runtime import hosts

    with hosts.exit_on_error():
        yield


def _join(options: argparse.Namespace) -> None:
    if not options.distributed:
        return
    from pma_jax.runtime import hosts

    # JAX's collectives on CPU (gloo) chat on standard output, which is for tables and JSON.
    sys.stdout = os.fdopen(os.dup(1), "w")
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 1)
    hosts.join(options.heartbeat_seconds)


def _share(options: argparse.Namespace) -> tuple[tuple[int, int], Callable[[Exception | None], None] | None]:
    """((this process, number of processes), how they meet); alone, without importing JAX."""
    if not options.distributed:
        return (0, 1), None
    from pma_jax.runtime import hosts

    return hosts.process_index_and_count(), hosts.raise_if_any_failed


def _say_done(run: Any) -> None:
    from pma_jax.runtime import hosts

    if not hosts.is_first():
        return
    newest = run.snapshots[-1]
    loss = "" if newest.loss is None else f", held-out loss {newest.loss:.4f}"
    print(f"{run.path}: {newest.tokens:,} tokens, {len(run.snapshots)} snapshots{loss}")


def _quiet() -> None:
    """What the libraries log of their own housekeeping stays out of a user's terminal: errors come as exceptions."""
    import logging

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Orbax logs a write that fails four times, with the traceback of every thread; main says it in one line.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    # A read that fails leaves others behind in Orbax's event loop; main says what failed, in one line.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    show = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            show(unraisable)

    sys.unraisablehook = hook
