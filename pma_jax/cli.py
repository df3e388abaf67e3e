"""`pma VERB …`: one function a verb, each thin. JAX is imported by the verbs that need it, not by `--help`."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pma_jax.arguments import parser

CONFIG_PREFIX = "--config."
WHOLE = ("import", "export")  # verbs that begin anew after an interruption


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; exit status 0: done, 1: could not (one line says why), 2: called wrongly."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    overrides = [word.removeprefix(CONFIG_PREFIX) for word in words if word.startswith(CONFIG_PREFIX)]
    options = parser(VERBS).parse_args([word for word in words if not word.startswith(CONFIG_PREFIX)])
    if overrides and not options.takes_config:
        print(f"error: `pma {options.verb}` takes no --config.key=value", file=sys.stderr)
        return 2
    options.overrides, options.words = overrides, words
    _quiet()
    try:
        options.function(options)
    except (ValueError, OSError) as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        done = {"watch": "preview"}.get(options.verb, "saved state")
        goes_on = f"the same command goes on from the last {done}"
        print(f"stopped: {'nothing was written' if options.verb in WHOLE else goes_on}", file=sys.stderr)
        return 130
    return 0


def train(options: argparse.Namespace) -> None:
    """Train, or resume what --workdir holds."""
    from pma_jax.host_memory import keep_freed_memory

    keep_freed_memory()
    from pma_jax import config as configuration
    from pma_jax.training import loop

    raw = configuration.load(options.config)
    configuration.override(raw, options.overrides)
    run = loop.train(configuration.resolve(raw), options.workdir)
    _say_done(run)


def fork(options: argparse.Namespace) -> None:
    """Start a new run from another's full state, and train it."""
    from pma_jax.host_memory import keep_freed_memory

    keep_freed_memory()
    from pma_jax import checkpoint
    from pma_jax.training import forking, loop

    source = checkpoint.open_run(options.run)
    config = forking.fork_config(source, options.overrides)
    forking.fork(source, options.at_tokens, config, options.workdir)
    _say_done(loop.train(config, options.workdir))


def merge(options: argparse.Namespace) -> None:
    """Average checkpoints of any trainer, from storage to storage."""
    from pma_jax.merging import engine, gather, storage

    gathered = gather.choose(
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
    plan, gathered = storage.plan_merge(
        gathered,
        recipes,
        dtype=options.dtype,
        format=options.format,
        memory_limit_bytes=options.memory_limit,
        shard_bytes=options.shard_size,
    )
    outs = storage.outputs(options.out, recipes)
    description = storage.describe(plan, gathered, outs)
    if options.dry_run:
        engine.check_outputs(plan, outs)
    else:
        with _progress() as progress:
            merged = engine.merge(plan, outs, command=" ".join(["pma", *options.words]), progress=progress)
        description |= {"notes": [*gathered.notes, *merged.notes], "seconds": merged.seconds}
    for note in dict.fromkeys(description["notes"]):
        print(f"note: {note}", file=sys.stderr)
    if options.json:
        print(json.dumps(description, indent=2))
    elif options.dry_run:
        print(storage.as_text(description))
    else:
        print(storage.as_sentence(description))


def sweep(options: argparse.Namespace) -> None:
    """Evaluate a grid of merges of a run's newest snapshots."""
    from pma_jax import checkpoint
    from pma_jax.evaluation import sweep as sweeping

    run = checkpoint.open_run(options.run)
    result = sweeping.sweep(run, options.recipes, options.windows, options.intervals, options.kind)
    from pma_jax.reporting import heat_map

    _table(options, result, [["merge", "loss"], *([r["text"], f"{r['loss']:.4f}"] for r in result["rows"])])
    for text, why in result["left_out"].items():
        print(f"note: {text} is left out: {why}", file=sys.stderr)
    if result["passes"] > 1:
        print(
            f"note: not all merges fit into memory at once: snapshots were read {result['passes']} times",
            file=sys.stderr,
        )
    print(f"written {heat_map.write(result, run.path)}", file=sys.stderr)


def watch(options: argparse.Namespace) -> None:
    """Preview the merged models of a run that another process is training."""
    from pma_jax import checkpoint
    from pma_jax.evaluation import watch as watching

    run = checkpoint.open_run(options.run)
    for line in watching.watch(
        run, options.recipe, options.windows, options.kind, poll_seconds=options.poll_seconds, once=options.once
    ):
        print(line, flush=True)


def evaluate(options: argparse.Namespace) -> None:
    """Held-out loss of runs and snapshots."""
    from pma_jax.evaluation import targets

    rows = targets.evaluate_targets(options.target, options.overrides)
    header = ["target", "tokens", "loss", "perplexity", "bits/byte"]
    cells = [
        [r["target"], f"{r['tokens']:,}", f"{r['loss']:.4f}", f"{r['perplexity']:.3f}", f"{r['bits_per_byte']:.4f}"]
        for r in rows
    ]
    _table(options, rows, [header, *cells])


def inspect(options: argparse.Namespace) -> None:
    """What a run or a checkpoint of any format holds."""
    from pma_jax import inspection

    if options.verify or options.with_sources:
        problems = inspection.verify(options.target, options.with_sources)
        if problems:
            raise ValueError(f"{options.target} is not what was written: {'; '.join(problems[:10])} ({len(problems)})")
        print(f"{options.target}: every digest is as {inspection.PROVENANCE} says")
        return
    facts = inspection.inspect(options.target, options.subtree)
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        print(inspection.as_text(facts))


def plan(options: argparse.Namespace) -> None:
    """Compile a run for a TPU topology, without a TPU: memory, FLOPs, step time, storage, what merging saves."""
    from pma_jax import config as configuration
    from pma_jax.planning import aot
    from pma_jax.planning import plan as planning

    if options.out and not Path(options.out).parent.is_dir():  # said before minutes of compiling, not after
        raise ValueError(f"--out {options.out}: there is no directory {Path(options.out).parent}: make it first")
    raw = configuration.load(options.config)
    configuration.override(raw, options.overrides)
    numbers = planning.plan(
        configuration.resolve(raw),
        aot.tpu_topology(options.topology),
        storage_bytes_per_second=options.storage_bandwidth,
        annealing_share=options.annealing_share,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if options.out:
        Path(options.out).write_text(json.dumps(numbers, indent=2) + "\n")
    print(json.dumps(numbers, indent=2) if options.json else planning.as_text(numbers))
    refused = planning.refusals(numbers)
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
    from pma_jax import checkpoint
    from pma_jax.reporting import report as reporting

    run, *forks = [checkpoint.open_run(path) for path in options.run]
    numbers = reporting.build_report(run, forks)
    written = reporting.write_report(numbers, run, options.out or run.path)
    if options.json:
        print(json.dumps(numbers, indent=2))
    else:
        print(reporting.print_table(numbers))
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
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar with bytes and rate on a terminal; nothing in a log."""
    if not sys.stderr.isatty():
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


def _say_done(run: Any) -> None:
    newest = run.snapshots[-1]
    loss = "" if newest.loss is None else f", held-out loss {newest.loss:.4f}"
    print(f"{run.path}: {newest.tokens:,} tokens, {len(run.snapshots)} snapshots{loss}")


def _quiet() -> None:
    """Warnings of the libraries' own housekeeping stay out of a user's terminal; errors do not."""
    import logging

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.getLogger("absl").setLevel(logging.ERROR)
    # A read that fails leaves others behind in Orbax's event loop; main says what failed, in one line.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    show = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            show(unraisable)

    sys.unraisablehook = hook


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
