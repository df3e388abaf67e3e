"""The subcommands (verbs) of `pma`, one function each. The function's docstring is the help text of the subcommand.

Each function imports what it needs, so that `--help` does not import JAX.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pma_jax.config.errors import UserError
from pma_jax.runtime.progress import show_progress
from pma_jax.storage.paths import as_path, exists, is_bucket

# Options of `pma sweep` that a sweep of a run in memory does not have.
_SCORE_OPTIONS = (
    *("out", "ends", "keep", "best", "metric", "parallel", "disk_limit", "score_timeout", "dry_run", "across_stages"),
    *("order", "tokens_per_step", "dtype", "integers", "format", "memory_limit"),
)


def train(options: argparse.Namespace) -> None:
    """Train a model, or resume the run in --workdir.

    Example:
        pma train --config demo --workdir runs/demo --config.training.seed=1
    """
    from pma_jax.training import loop

    _print_run_summary(loop.train(_load_config(options), options.workdir))


def fork(options: argparse.Namespace) -> None:
    r"""Start a new run from a training state (weights and optimizer) of another run, and train it.

    Example:
        pma fork runs/demo --at-tokens 4.9e6 --workdir runs/annealed \
            --config.schedule.decay=cosine --config.schedule.decay_start_tokens=4.9e6
    """
    from pma_jax import config as configuration
    from pma_jax.runs.directory import open_run
    from pma_jax.training import fork, loop

    source = open_run(options.run)
    config = configuration.resolve(source.config, options.overrides)
    fork.fork(source, options.at_tokens, config, options.workdir, options.weights)
    _print_run_summary(loop.train(config, options.workdir))


def merge(options: argparse.Namespace) -> None:
    """Average checkpoints of pma_jax or another trainer, without loading a complete model into memory.

    Example:
        pma merge runs/demo --last 10 --recipe sma --out runs/demo/merged/sma-10
        pma merge gs://bucket/run --last 10 --out gs://bucket/merged --on mesh --distributed
    """
    from pma_jax.cli import merging
    from pma_jax.merging import from_storage

    plan, series = merging.plan_selected(options)
    outs = from_storage.output_paths(options.out, plan.recipes)
    description = from_storage.describe_merge(plan, series, outs)
    if options.dry_run:
        description |= merging.check_outputs(options, plan, outs)
    else:
        with show_progress("bytes", is_shown=merging.process_index_and_count(options)[0] == 0) as progress:
            started = time.perf_counter()
            result = merging.run(options, plan, outs, progress)
        description |= {"notes": [*series.notes, *result.notes], "seconds": time.perf_counter() - started}
    if merging.process_index_and_count(options)[0] > 0:
        return
    _print_notes(description["notes"])
    format_text = from_storage.format_plan if options.dry_run else from_storage.format_result
    _print_result(options, description, lambda: format_text(description))


def sweep(options: argparse.Namespace) -> None:
    """Evaluate a grid of merges of a run's newest snapshots in memory, or of any checkpoints with programs.

    Several runs, or checkpoints of Hugging Face models, are scored by `pma evaluate`; any others need --score.

    Example:
        pma sweep runs/demo --recipes sma,wma --windows 3,6,10,15
        pma sweep runs/demo --windows 3,6,10 --tasks pma:last_line,arc_easy
        pma sweep models --windows 3,6 --ends 60%,100% --tasks arc_easy --out scored
        pma sweep checkpoints --windows 3,6 --score 'python score.py {}' --out scored
    """
    _check_task_options(options)
    if options.score is not None or not _is_one_run(options.source):
        _sweep_with_program(options)
        return
    _check_sweep_of_run(options)
    from pma_jax.cli import run_sweep
    from pma_jax.runtime import hosts

    result = run_sweep.sweep(options)
    if hosts.is_first_process():
        _print_table(options, result, run_sweep.table(result))
        _print_notes(run_sweep.notes(result))
        print(f"wrote {run_sweep.write_figure(options, result)}", file=sys.stderr)


def watch(options: argparse.Namespace) -> None:
    """Evaluate merges of a run's newest snapshots while another process trains the run.

    Example:
        pma watch runs/demo --recipe wma --windows 6,10
    """
    from pma_jax.evaluation import watch as watching
    from pma_jax.runs.directory import open_run
    from pma_jax.runtime import hosts

    run = open_run(options.run)
    for line in watching.watch(
        run, options.recipe, options.windows, options.kind, poll_seconds=options.poll_seconds, once=options.once
    ):
        if hosts.is_first_process():
            print(line, flush=True)


def evaluate(options: argparse.Namespace) -> None:
    """Compute the held-out loss of models, with its standard error over documents, or their scores on tasks.

    Example:
        pma evaluate runs/demo runs/demo/merged/sma-10 --config.evaluation.tokens=131072
        pma evaluate runs/demo runs/demo/merged/sma-10 --tasks pma:last_line,arc_easy --limit 200
        pma evaluate models/demo --config.data.source=files --config.data.files=text/*.txt
    """
    _check_task_options(options)
    if options.numbers and (options.json or len(options.target) > 1):
        raise UserError("--numbers prints the numbers of one target, as JSON: give one, and leave out --json")
    from pma_jax.runtime import hosts

    if options.tasks is None:
        from pma_jax.cli import losses as scores
    else:
        from pma_jax.cli import tasks as scores
    rows = scores.evaluate(options)
    if not hosts.is_first_process():
        return
    if options.numbers:
        print(json.dumps(scores.numbers(rows[0]), allow_nan=False))
    else:
        _print_table(options, rows, scores.table(rows))
    _print_notes(scores.notes(rows))


def inspect(options: argparse.Namespace) -> None:
    """Describe a run or a checkpoint of any format. With --verify, check its data against its digests.

    Example:
        pma inspect runs/demo
    """
    from pma_jax.merging import inspect as inspection
    from pma_jax.merging import verify

    if options.verify or options.with_sources:
        problems = verify.verify(options.target, options.with_sources)
        if problems:
            raise UserError(f"{options.target} is corrupt: {'; '.join(problems[:10])} ({len(problems)} in total)")
        print(f"{options.target}: all data matches its digests")
        return
    description = inspection.inspect(options.target, options.subtrees)
    _print_result(options, description, lambda: inspection.format_description(description))


def plan(options: argparse.Namespace) -> None:
    """Estimate memory, FLOPs, step time and storage of a run on TPUs, and what merging saves. Needs no TPU.

    Example:
        pma plan --config demo --topology v5e:2x2 --config.training.batch_size_sequences=64
    """
    from pma_jax.planning import aot, run_plan, search
    from pma_jax.planning.plan_text import format_plan

    # Checked before the programs are compiled, which takes minutes.
    if options.out and not is_bucket(options.out) and not Path(options.out).parent.is_dir():
        raise UserError(f"--out {options.out}: the directory {Path(options.out).parent} does not exist; create it")
    if options.search and options.traffic:
        raise UserError("--search compares settings, and --traffic describes one: give one of them")
    without_effect = {"storage_bandwidth", "host_bandwidth", "annealing_share"} & getattr(options, "given", set())
    if options.search and without_effect:
        name = min(without_effect).replace("_", "-")
        raise UserError(f"--search compares train steps: leave out --{name}, which has no effect on them")
    config, topology = _load_config(options), aot.tpu_topology(options.topology)
    log = functools.partial(print, file=sys.stderr, flush=True)
    if options.search:
        tried = search.search(config, topology, log)
        _write_plan(options, tried)
        _print_result(options, tried, lambda: search.format_search(tried))
        if not tried[0]["compiled"]:
            raise UserError(
                f"the train step does not fit in the memory of {options.topology} with any of these settings"
            )
        return
    estimates = run_plan.plan_run(
        config,
        topology,
        storage_bytes_per_second=options.storage_bandwidth,
        host_bytes_per_second=options.host_bandwidth,
        annealing_share=options.annealing_share,
        heaviest_operations=10 if options.traffic else 0,
        log=log,
    )
    _write_plan(options, estimates)
    _print_result(options, estimates, lambda: format_plan(estimates))
    messages = run_plan.out_of_memory_messages(estimates)
    if messages:
        raise UserError(f"the run does not fit in the memory of {options.topology}: {'; '.join(messages)}")


def _write_plan(options: argparse.Namespace, numbers: Any) -> None:
    if options.out:
        as_path(options.out).write_text(json.dumps(numbers, indent=2) + "\n")


def import_(options: argparse.Namespace) -> None:
    """Convert a Hugging Face model (Llama, Mistral, Qwen3, Qwen3-MoE) to a snapshot.

    Example:
        pma import models/Qwen3-0.6B --out imported/qwen3
    """
    from pma_jax.interop import hf

    with show_progress("bytes") as progress:
        result = hf.import_model(options.model, options.out, progress=progress)
    _print_conversion(options, result)


def export(options: argparse.Namespace) -> None:
    """Convert a snapshot, or a checkpoint of MaxText or levanter, to a directory that Hugging Face transformers loads.

    Example:
        pma export runs/demo/merged/sma-10 --out models/demo
    """
    from pma_jax.interop import hf

    settings = dict(options.maxtext_settings or ())
    if len(settings) < len(options.maxtext_settings or ()):
        raise UserError("--maxtext: a key is given twice; give each once")
    with show_progress("bytes") as progress:
        result = hf.export_snapshot(
            options.snapshot,
            options.out,
            dtype=options.dtype,
            shard_bytes=options.shard_size,
            tokenizer=options.tokenizer,
            model_config=options.model_config,
            maxtext_settings=settings,
            progress=progress,
        )
    _print_conversion(options, result)


def report(options: argparse.Namespace) -> None:
    """Write report.json, report.png and report.html of a run and its forks, or of all runs of a grid.

    Example:
        pma report runs/demo runs/demo-annealed
        pma report runs/grid
    """
    from pma_jax.cli import reports

    contents, text, written = reports.write(options)
    _print_result(options, contents, lambda: text)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)


def _sweep_with_program(options: argparse.Namespace) -> None:
    from pma_jax.cli import grid

    if options.dry_run:
        description = grid.describe(options)
        _print_result(options, description, lambda: grid.format_description(description))
        _print_notes([*description["notes"], *(f"skipped {k}: {v}" for k, v in description["left_out"].items())])
        return
    content = grid.sweep(options, lambda line: print(line, file=sys.stderr, flush=True))
    _print_result(options, content, lambda: grid.format_content(content))
    _print_notes(grid.content_notes(content))
    grid.check_scored(content)


def _is_one_run(addresses: Sequence[str]) -> bool:
    """Return whether the addresses are one run, whose merges are evaluated in memory, or a path that does not exist."""
    from pma_jax.merging.listing import is_run_directory
    from pma_jax.storage.formats import hub

    if len(addresses) > 1 or addresses[0].startswith(hub.PREFIX):
        return False
    path = as_path(addresses[0])
    return is_run_directory(path) or not exists(path)


def _check_sweep_of_run(options: argparse.Namespace) -> None:
    """Raise UserError if a sweep of one run has options of sweeps that programs score, or configuration keys."""
    if options.overrides:
        raise UserError(f"--config.{options.overrides[0]}: a run's merges are evaluated with its keys: leave it out")
    given = {name for name in _SCORE_OPTIONS if name in getattr(options, "given", ()) or getattr(options, name) is True}
    given |= {"subtree"} if options.subtrees else set()
    if given:
        option = f"--{min(given).replace('_', '-')}"
        raise UserError(
            f"{option} needs --score: without it, a run's merges are evaluated in memory; leave out {option}, or name "
            f"{options.source[0]}/snapshots instead"
        )


def _check_task_options(options: argparse.Namespace) -> None:
    given = {"limit", "shots"} & getattr(options, "given", set())
    if given and options.tasks is None:
        raise UserError(f"--{min(given)} needs --tasks: name the tasks, such as --tasks arc_easy")
    if options.tasks is not None and getattr(options, "score", None) is not None:
        raise UserError("--tasks and --score are two ways to score the same merges: leave one of them out")


def _load_config(options: argparse.Namespace) -> Any:
    from pma_jax import config as configuration

    return configuration.resolve(configuration.load(options.config), options.overrides)


def _print_result(options: argparse.Namespace, data: Any, as_text: Callable[[], str]) -> None:
    """Print `data` as JSON with --json, otherwise as text. Of a name that is not UTF-8, its bytes are escaped."""
    print((json.dumps(data, indent=2) if options.json else as_text()).encode(errors="backslashreplace").decode())


def _print_table(options: argparse.Namespace, data: Any, rows: Sequence[Sequence[str]]) -> None:
    from pma_jax.runtime.formatting import align_columns

    _print_result(options, data, lambda: align_columns(rows))


def _print_notes(notes: Sequence[str]) -> None:
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr)


def _print_conversion(options: argparse.Namespace, result: dict[str, Any]) -> None:
    _print_notes(result["notes"])
    tokenizer = f"tokenizer: {', '.join(result['tokenizer'])}" if result["tokenizer"] else "no tokenizer"
    size = f"{result['parameters']:,} parameters, {result['bytes']:,} bytes"
    text = f"{result['architecture']}, {size}; {tokenizer}\nwritten to {result['out']}"
    _print_result(options, result, lambda: text)


def _print_run_summary(run: Any) -> None:
    from pma_jax.runtime import hosts

    if not hosts.is_first_process():
        return
    snapshots = run.snapshots
    newest = snapshots[-1]
    loss = "" if newest.loss is None else f", held-out loss {newest.loss:.4f}"
    print(f"{run.path}: {newest.tokens:,} tokens, {len(snapshots)} snapshots{loss}")
