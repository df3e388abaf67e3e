"""An experiment: the command line of a script in experiments/, its results.json and the generated page.

A script has a docstring (the question) and functions, and ends with
`run_experiment(__file__, measure, report, summarize, draw, plan)`:

    measure(study) -> dict             train and evaluate through the study; return what results.json stores
    report(results) -> str             format the generated section of the README from results.json
    summarize(results) -> IndexRow     format the experiment's row in experiments/README.md
    draw(results) -> dict              return the figures: file name -> PNG
    plan(study) -> Plan                list the runs that `measure` needs, as far as they are known before it
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from pma_jax.config.errors import UserError, error_line
from pma_jax.data.sampling import REPORT, SELECT
from pma_jax.runtime.allocator import keep_freed_memory
from pma_jax.runtime.formatting import format_text
from pma_jax.runtime.signals import Stopped
from pma_jax.storage import atomic
from pma_jax.storage.json_files import parse_untrusted_json, read_json
from pma_jax.studies import pages, recorded_runs
from pma_jax.studies.estimate import CostEstimate, Counted, describe_estimate, estimate
from pma_jax.studies.pages import IndexRow
from pma_jax.studies.planned import Plan, complete_all
from pma_jax.studies.study import SIZES, Study
from pma_jax.studies.tuning import TUNING_SEEDS

# `--tiny`: a model that trains in seconds, to check that a script runs. Its numbers mean nothing.
TINY = (
    "model.width=16",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=2",
    "model.head_dim=8",
    "model.hidden=16",
    "model.expert_hidden=8",
    "training.sequence_length_tokens=16",
    "training.batch_size_sequences=8",
    "training.total_tokens=4096",
    "schedule.warmup_tokens=256",
    "checkpoint.block_every_steps=1",
)
TINY_OPTIONS = {
    "sizes": (SIZES[0], SIZES[-1]),
    "seeds": (0, 1),
    "units": 16,
    "evaluation_tokens": 512,
    "recorded": None,
}
OPTIONS = ("sizes", "seeds", "units", "evaluation_tokens", "margin")  # fields of `Study` that results record
# Entries of `made` that all sizes of a page have in common.
COMMON_TO_SIZES = ("units", "evaluation_tokens", "margin", "text", "overrides", "part")


def run_experiment(
    script: str,
    measure: Callable[[Study], dict[str, Any]],
    report: Callable[[dict[str, Any]], str],
    summarize: Callable[[dict[str, Any]], IndexRow],
    draw: Callable[[dict[str, Any]], dict[str, bytes]],
    plan: Callable[[Study], Plan],
    defaults: dict[str, Any] | None = None,
    part: str = REPORT,
    by_size: bool = False,
    arguments: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Run an experiment from its command line: write results.json, the figures and the README's generated section.

    Runs and losses in the directory --runs are read, not computed again.

    Args:
        script: Path of the script; its folder is the default of --out.
        measure: Trains and evaluates; the docstring of this module describes the functions.
        report: Formats the generated section.
        summarize: Formats the row in the table of experiments.
        draw: Draws the figures.
        plan: Lists the runs that `measure` needs, which are trained first, `--jobs` at a time.
        defaults: Defaults of this experiment for fields of `Study` that the command line sets, such as its seeds.
        part: The part of the held-out text on which `measure` judges.
        by_size: The results are one entry per size, under "sizes": with `--add`, sizes are measured by several calls.
        arguments: Command-line arguments; by default those of the process.

    Returns:
        The content of results.json; empty with `--estimate`.

    Raises:
        SystemExit: An option or a file is invalid; the process exits with one line on standard error.
    """
    folder = Path(script).resolve().parent
    given = sys.argv[1:] if arguments is None else arguments
    options, overrides = _parse(folder, given, defaults or {}, part, by_size)
    try:
        if (page := options.out / "README.md").exists():
            pages.extract_results(page.read_text())  # checked before hours of training
        keep_freed_memory()
        if options.estimate:
            study = _study(options, overrides)
            print(describe_estimate(folder.name, _estimate(study, plan(study), options.counted)))
            return {}
        path = options.out / "results.json"
        results = _read_results(path) if options.redraw else _measure(measure, plan, part, options, overrides)
        results["row"] = dataclasses.asdict(summarize(results))
        _write(options.out, results, draw(results), render_results(report, results))
        if options.out == folder and (folder.parent / "README.md").exists():
            pages.update_index(folder.parent)
        print(render_results(report, results))
        return results
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        raise SystemExit(stopped.status) from stopped
    except (UserError, OSError) as error:
        raise SystemExit(f"error: {error_line(error)}") from error


def _estimate(study: Study, plan: Plan, counted: Path | None) -> CostEstimate:
    """Estimate a plan; leave out the runs that the file `counted` names, and add the others to it."""
    if counted is None:
        return estimate(study, plan)
    known: Counted = read_json(counted, Counted) if counted.exists() else {"hours": 0.0, "trained": []}
    estimated = estimate(study, plan, frozenset(known["trained"]))
    added = {"hours": known["hours"] + estimated.hours, "trained": sorted({*known["trained"], *estimated.trained})}
    atomic.write_text(epath.Path(counted), json.dumps(added) + "\n")
    return estimated


def _write(folder: Path, results: dict[str, Any], figures: Mapping[str, bytes], section: str) -> None:
    """Write results.json, the figures and the generated section of the page, if there is a page."""
    atomic.write_text(epath.Path(folder, "results.json"), json.dumps(results, indent=1) + "\n")
    for name, png in figures.items():
        (folder / name).write_bytes(png)
    page = folder / "README.md"
    if page.exists():
        page.write_text(pages.replace_results(page.read_text(), section))


def render_results(report: Callable[[dict[str, Any]], str], results: dict[str, Any]) -> str:
    """Return the README's generated section: the script's report, then where its numbers come from."""
    earlier = results.get("earlier", [])
    calls = [
        describe_provenance(made, of_sizes=bool(earlier), judged=results.get("judged", ""))
        for made in (*earlier, results["made"])
    ]
    return "\n\n".join([report(results), *calls])


def describe_provenance(made: dict[str, Any], of_sizes: bool = False, judged: str = "") -> str:
    """Describe, in a sentence or two, the commit, the cost and the options that the numbers were made with.

    Args:
        made: The entry of results.json.
        of_sizes: Begin with the names of the sizes.
        judged: On what models are judged, if not on the text of the study: the entry of results.json.
    """
    commit = f"Made at commit `{made['commit']}`" if made["commit"] else "Made outside of a repository"
    if of_sizes:
        commit = f"{', '.join(made['sizes'])}: {commit[0].lower()}{commit[1:]}"
    given = f"; overrides: `{' '.join(made['overrides'])}`" if made["overrides"] else ""
    return (
        f"{commit}: {made['runs']} runs with {made['tokens'] / 1e6:.1f}M tokens in all, in "
        f"{made['training_hours']:.2f} machine hours (time of all cores; a run that several experiments use counts in "
        f"each). Seeds {', '.join(map(str, made['seeds']))}; judged on {judged or _describe_text(made)}{given}. All "
        "numbers: [results.json](results.json)."
    )


def _describe_text(made: Mapping[str, Any]) -> str:
    """Describe the held-out text of results."""
    text = made["text"]
    judged = format_text(text["parts"][made["part"]])
    digest = text["corpus_digest"][:12]
    held_out = f"the held-out text of {text['corpus']} (digest {digest})"
    return f"{judged} of {held_out}, the same for all models that are compared"


def _measure(
    measure: Callable[[Study], dict[str, Any]],
    plan: Callable[[Study], Plan],
    part: str,
    options: Any,
    overrides: Sequence[str],
) -> dict[str, Any]:
    study, settings = _study(options, overrides), {name: getattr(options, name) for name in OPTIONS}
    made = {"commit": _commit(), **settings, "overrides": list(overrides), "jobs": options.jobs}
    made |= {"text": study.describe_text(), "part": part}
    earlier = _read_earlier(options.out / "results.json", made) if options.add else None
    options.out.mkdir(parents=True, exist_ok=True)
    work = plan(study)
    estimated = estimate(study, work)
    print(describe_estimate(options.out.name, estimated), file=sys.stderr, flush=True)
    began = time.perf_counter()
    complete_all(study, work, study.workers)
    results = measure(study)
    # Of this call: a resumed one has less to do.
    made |= study.training_cost() | {"estimated_hours": estimated.hours, "hours": (time.perf_counter() - began) / 3600}
    results = json.loads(json.dumps({"made": made, **results}))
    return results if earlier is None else _add_sizes(earlier, results)


def _read_results(path: Path) -> dict[str, Any]:
    return parse_untrusted_json(path.read_bytes(), str(path), allow_nan=True)


def _read_earlier(path: Path, made: dict[str, Any]) -> dict[str, Any]:
    """Read the results to which sizes are added.

    Raises:
        UserError: They do not exist, or were made with other options or on another text.
    """
    if not path.exists():
        raise UserError(f"--add: there is no {path} to add to: leave --add out")
    earlier = _read_results(path)
    ours = json.loads(json.dumps(made))
    for name in COMMON_TO_SIZES:
        if earlier["made"].get(name) != ours[name]:
            raise UserError(
                f"--add: {path} was made with another value of {name!r}: sizes on one page have the same. Give the "
                "options of its entry 'made', or measure all sizes without --add"
            )
    return earlier


def _add_sizes(earlier: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Return results with the sizes of earlier ones, in their order, and where those that are kept come from."""
    kept = [name for name in earlier["sizes"] if name not in results["sizes"]]
    calls = []
    for made in (*earlier.get("earlier", []), earlier["made"]):
        if sizes := [name for name in made["sizes"] if name in kept]:
            calls.append(made | {"sizes": sizes})
    return results | {"earlier": calls, "sizes": earlier["sizes"] | results["sizes"]}


def _study(options: Any, overrides: Sequence[str]) -> Study:
    """Return the study of the options; its cache has the recorded runs too."""
    settings = {name: getattr(options, name) for name in OPTIONS}
    study = Study(
        options.runs.resolve(), overrides=tuple(overrides), workers=options.jobs, tuned=options.tuned, **settings
    )
    for size in study.sizes:
        study.trunk_config(size, study.seeds[0])  # reports a wrong size or key before the cache is written
    if options.recorded and options.recorded.exists():
        recorded_runs.read_into_cache(options.recorded, options.runs)
    return study


def _parse(
    folder: Path, arguments: Sequence[str], defaults: dict[str, Any], part: str, by_size: bool
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the configuration overrides as `section.key=value`."""
    parser = argparse.ArgumentParser(
        description=f"The experiment {folder.name}; --config.KEY=VALUE changes the configuration of every run."
    )
    names = lambda text: tuple(text.split(","))  # noqa: E731
    add = parser.add_argument
    add("--runs", type=Path, required=True, help="directory of cached runs that experiments share")
    add("--out", type=Path, default=folder, help="directory of results.json, figures and README.md")
    add("--jobs", type=int, default=1, help="runs to train at a time, each on its share of the cores (default 1)")
    add("--sizes", type=names, help="names of configurations (default %(default)s)")
    add("--seeds", type=lambda text: tuple(map(int, text.split(","))), help="seeds (default %(default)s)")
    add("--units", type=int, help="units per trunk, a multiple of 16 (default %(default)s)")
    add("--evaluation-tokens", type=int, help="held-out tokens to compare merges on (default %(default)s)")
    add("--margin", type=float, help="nats within which losses count as equal (default %(default)s)")
    add("--tuned", type=Path, help="results.json of the experiment tuning (default %(default)s)")
    add(
        "--recorded",
        type=Path,
        help="losses of runs that were trained on another machine: made by pma_jax.studies.recorded_runs (default "
        "%(default)s, if it exists)",
    )
    add(
        "--estimate",
        action="store_true",
        help="only estimate the machine time, after short runs of sizes whose speed is not known",
    )
    add(
        "--counted",
        type=Path,
        help="with --estimate: a file of the runs that other estimates count, to leave out; this one adds its own",
    )
    if by_size:
        add("--add", action="store_true", help="keep the sizes of results.json that this call does not measure")
    add("--tiny", action="store_true", help="use a tiny model and two seeds, to test the script")
    add("--redraw", action="store_true", help="only rewrite tables and figures, from results.json")
    of_study = {field.name: field.default for field in dataclasses.fields(Study)}
    tuned = folder.parent / "tuning" / "results.json"
    files = {"tuned": tuned, "recorded": folder.parent / "recorded_runs.jsonl.gz"}
    parser.set_defaults(**{name: of_study[name] for name in OPTIONS} | files | {"add": False} | defaults)
    if parser.parse_known_args(arguments)[0].tiny:
        parser.set_defaults(**TINY_OPTIONS)
    options, rest = parser.parse_known_args(arguments)
    wrong = [word for word in rest if not (word.startswith("--config.") and "=" in word)]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    _check(parser, options, part, files["recorded"])
    options.out = options.out.resolve()
    overrides = [word.removeprefix("--config.") for word in rest]
    return options, [*(TINY if options.tiny else ()), *overrides]


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace, part: str, default_recorded: Path) -> None:
    """Exit with the parser's error if options contradict each other, or name what does not exist."""
    if options.add + options.redraw + options.estimate > 1:
        parser.error("--add measures, and --redraw and --estimate do not: give one of them")
    if options.counted and not options.estimate:
        parser.error("--counted belongs to --estimate")
    tuning_seeds = set(options.seeds) & set(TUNING_SEEDS)
    if part == REPORT and tuning_seeds:
        parser.error(f"--seeds {', '.join(map(str, sorted(tuning_seeds)))}: settings are tuned on these: choose others")
    if part == SELECT and not options.tiny and len(tuning_seeds) < len(options.seeds):
        parser.error(f"--seeds: settings are tuned on {', '.join(map(str, TUNING_SEEDS))}, which no result uses")
    if options.runs.exists() and not options.runs.is_dir():
        parser.error(f"--runs: {options.runs} is not a directory")
    if options.recorded not in (None, default_recorded) and not options.recorded.exists():
        parser.error(f"--recorded: there is no file {options.recorded}")
    if options.units % 16:
        parser.error(f"--units must be a multiple of 16, not {options.units}")


def _commit() -> str | None:
    """Return the short hash of HEAD, with `+` if tracked files of the package have changed; None without git."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno", "--", "."], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return name.stdout.strip() + ("+" if changed.stdout.strip() else "")
