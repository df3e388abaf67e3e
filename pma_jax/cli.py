"""`pma VERB …`: one function a verb, each thin. JAX is imported by the verbs that need it, not by `--help`."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

CONFIG_PREFIX = "--config."
KINDS = ("point", "block_mean")  # checkpoint.FOLDERS has them too, but imports JAX
WHOLE = ("import", "export")  # verbs that begin anew after an interruption


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; exit status 0: done, 1: could not (one line says why), 2: called wrongly."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    overrides = [word.removeprefix(CONFIG_PREFIX) for word in words if word.startswith(CONFIG_PREFIX)]
    options = _parser().parse_args([word for word in words if not word.startswith(CONFIG_PREFIX)])
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pma",
        description="Train language models by tokens, merge their checkpoints, and see what annealing would give.",
        epilog="Every verb has --help with an example. A mistake is one line and exit status 1 (or 2: called wrongly).",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    verb = _verb(verbs, train, "pma train --config demo --workdir runs/demo --config.training.seed=1")
    verb.add_argument("--config", required=True, help="a .py file with get_config(), or a shipped name such as demo")
    verb.add_argument("--workdir", required=True, help="the run's directory; a run that is there is resumed")
    _takes_config(verb)

    verb = _verb(
        verbs,
        fork,
        "pma fork runs/demo --at-tokens 4.9e6 --workdir runs/annealed "
        "--config.schedule.decay=cosine --config.schedule.decay_start_tokens=4.9e6",
    )
    verb.add_argument("run", help="the run to start from")
    verb.add_argument("--at-tokens", required=True, type=_tokens, help="where RUN saved a full state")
    verb.add_argument("--workdir", required=True, help="the new run's directory; the same fork is resumed")
    _takes_config(verb)

    _merge_options(_verb(verbs, merge, "pma merge runs/demo --last 10 --recipe sma --out runs/demo/merged/sma-10"))

    verb = _verb(verbs, sweep, "pma sweep runs/demo --recipes sma,wma --windows 3,6,10,15")
    verb.add_argument("run", help="the run whose newest snapshots are merged; RUN/sweep.json is written")
    verb.add_argument("--recipes", default="sma,ema:alpha=0.1,ema:alpha=0.2,wma", type=_texts, metavar="R,R")
    verb.add_argument("--windows", default="3,6,10,15", type=_windows, metavar="N,N")
    verb.add_argument("--intervals", default="1", type=_windows, metavar="I,I", help="every I-th snapshot (default 1)")
    verb.add_argument("--kind", choices=KINDS, default="point", help="of snapshots (default point)")
    _takes_json(verb)

    verb = _verb(verbs, watch, "pma watch runs/demo --recipe wma --windows 6,10")
    verb.add_argument("run", help="a run that is being trained, or was; previews are added to RUN/watch.jsonl")
    verb.add_argument("--recipe", help="such as wma (default: the run's preview.recipe)")
    verb.add_argument("--windows", type=_windows, metavar="N,N", help="default: the run's preview.windows")
    verb.add_argument("--kind", choices=KINDS, help="of snapshots (default: the first kind that the run saves)")
    verb.add_argument("--poll-seconds", default=5.0, type=_seconds, help="between looks at the run (default 5)")
    verb.add_argument("--once", action="store_true", help="preview what is there, and end")

    verb = _verb(verbs, evaluate, "pma evaluate runs/demo runs/demo/merged/sma-10 --config.evaluation.tokens=131072")
    verb.add_argument("target", nargs="+", help="a run (its newest snapshot) or a snapshot")
    _takes_config(verb)
    _takes_json(verb)

    verb = _verb(verbs, inspect, "pma inspect runs/demo")
    verb.add_argument("target", help="a run, a snapshot, or a checkpoint in any format that `pma merge` reads")
    verb.add_argument("--subtree", help="where an Orbax tree holds the parameters")
    verb.add_argument("--verify", action="store_true", help="recompute the digests of a merge, and compare")
    verb.add_argument("--with-sources", action="store_true", help="the same, of what it was made from too")
    _takes_json(verb)

    verb = _verb(verbs, plan, "pma plan --config demo --topology v5e:2x2 --config.training.batch_size_sequences=64")
    verb.add_argument("--config", required=True, help="a .py file with get_config(), or a shipped name such as demo")
    verb.add_argument("--topology", required=True, metavar="CHIP:SHAPE", help="a slice of TPUs, such as v5p:4x4x8")
    verb.add_argument("--out", metavar="FILE", help="write the plan there, as JSON")
    verb.add_argument(
        "--storage-bandwidth",
        default="1GB/s",
        type=_rate,
        metavar="SIZE/s",
        help="of the storage of checkpoints, all devices together (default 1GB/s)",
    )
    verb.add_argument(
        "--annealing-share",
        default=0.2,
        type=_share,
        metavar="SHARE",
        help="of the tokens, of the annealing that merging replaces (default 0.2)",
    )
    _takes_config(verb)
    _takes_json(verb)

    verb = _verb(verbs, import_, "pma import models/Qwen3-0.6B --out imported/qwen3")
    verb.add_argument("model", help="a Hugging Face model's directory, or hf://org/repo@revision")
    verb.add_argument("--out", required=True, help="the snapshot to write; must not exist")
    _takes_json(verb)

    verb = _verb(verbs, export, "pma export runs/demo/merged/sma-10 --out models/demo")
    verb.add_argument("snapshot", help="a snapshot of any kind, a merge, an imported model, or a run (its newest)")
    verb.add_argument("--out", required=True, help="the directory to write; must not exist")
    verb.add_argument("--dtype", default="keep", choices=("keep", "float32", "bfloat16"), help="of what is written")
    verb.add_argument("--shard-size", default="5GB", type=_size, metavar="SIZE", help="of a safetensors file (5GB)")
    verb.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json, instead of the one that the run has")
    _takes_json(verb)

    verb = _verb(verbs, report, "pma report runs/demo runs/demo-annealed")
    verb.add_argument("run", nargs="+", help="the run, then the runs forked from it")
    verb.add_argument("--out", help="the directory to write to (default: the first run's)")
    _takes_json(verb)
    return parser


def _merge_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "source",
        nargs="+",
        help="a run, a checkpoint (Orbax or safetensors), a directory of checkpoints, hf://org/repo@revision, "
        "or a pattern of revisions such as hf://org/repo@step-{1000..9000..1000}; ordered by tokens or steps",
    )
    verb.add_argument("--out", required=True, help="the directory to write; must not exist")
    verb.add_argument(
        "--recipe", action="append", help="such as sma (default), ema:alpha=0.2, wma, lagfree:lag=0.5; may be repeated"
    )
    verb.add_argument("--last", type=_positive, metavar="N", help="only the newest N")
    verb.add_argument("--tokens", type=_token_range, metavar="A:B", help="only from A to B tokens, both included")
    verb.add_argument("--every", type=_tokens, metavar="V", help="only every V tokens, back from the newest")
    verb.add_argument("--tolerance", type=_tokens, metavar="T", help="how far from its mark --every takes one (V/10)")
    verb.add_argument("--across-stages", action="store_true", help="let one merge span several runs or stages")
    verb.add_argument("--tokens-per-step", type=_tokens, metavar="T", help="where a name tells only the step")
    verb.add_argument("--kind", choices=("point", "block_mean"), help="which snapshots of a run")
    verb.add_argument("--subtree", help="where an Orbax tree holds the parameters, such as params or target/model")
    verb.add_argument("--dtype", default="keep", choices=("keep", "float32", "bfloat16"), help="of what is written")
    verb.add_argument("--format", default="keep", choices=("keep", "orbax", "safetensors"), help="of what is written")
    verb.add_argument("--memory-limit", default="1GiB", type=_size, metavar="SIZE", help="resident memory (1GiB)")
    verb.add_argument("--shard-size", default="5GB", type=_size, metavar="SIZE", help="of a safetensors file (5GB)")
    verb.add_argument(
        "--dry-run", action="store_true", help="print what would be read, summed and written; write nothing"
    )
    _takes_json(verb)


def _verb(verbs: Any, function: Any, example: str) -> argparse.ArgumentParser:
    text = function.__doc__
    verb = verbs.add_parser(
        function.__name__.rstrip("_"),  # `import` is a word of Python's
        help=text,
        description=text,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.set_defaults(function=function, takes_config=False)
    return verb


def _takes_config(verb: argparse.ArgumentParser) -> None:
    verb.set_defaults(takes_config=True)
    verb.add_argument("--config.SECTION.KEY=VALUE", action="append", help="change any key of the configuration")


def _takes_json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="print JSON for machines instead of a table")


def _tokens(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 4.9e6") from None
    if not 0 <= value < float("inf") or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of tokens")
    return int(value)


def _token_range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of tokens, such as 2e6:6e6")
    return _tokens(first), _tokens(last)


def _size(text: str) -> int:
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ").strip()
    unit = text[len(number) :].strip().upper()
    try:
        count = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 2GiB or 500MB") from None
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 bytes")
    return count


def _rate(text: str) -> int:
    if not text.endswith("/s"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 500MB/s or 2GiB/s")
    return _size(text.removesuffix("/s"))


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and up to 1, such as 0.2")
    return value


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _windows(text: str) -> list[int]:
    return [_positive(item) for item in text.split(",")]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _texts(text: str) -> list[str]:
    # A comma also stands inside a recipe (lagfree:lag=0.5,order=1): a new one begins with a letter, without "=".
    parts: list[str] = []
    for item in text.split(","):
        begins = item[:1].isalpha() and "=" not in item.split(":")[0]
        if parts and not begins:
            parts[-1] += f",{item}"
        else:
            parts.append(item)
    return parts


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
