"""A framework for experiments: the command line, the trunks and forks that are trained, and the generated page.

A script in experiments/ has a docstring (the question) and four functions, and ends with
`run_experiment(__file__, measure, report, summarize, draw)`:

    measure(study) -> dict             train and evaluate through the study; return what results.json stores
    report(results) -> str             format the generated section of the README from results.json
    summarize(results) -> IndexRow     format the experiment's row in experiments/README.md
    draw(results) -> dict              return the figures: file name -> PNG

A trunk is a run at a constant learning rate, divided into `units` equal parts. It saves a snapshot of each kind (point
and block mean) at the end of each unit, and a training state where an annealed branch may fork. Scripts give positions
in units, so that one script works at every size: `--sizes dense_1b --config.training.total_tokens=20e9` runs it on
other models.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from pma_jax import config as configuration
from pma_jax.config import Config, EvaluationConfig
from pma_jax.config.errors import UserError, error_line
from pma_jax.data.sampling import REPORT, SampleDescription
from pma_jax.evaluation.held_out import prepare_tokens, read_sample
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.evaluation.trajectory import evaluate_along_run
from pma_jax.model.decoder import abstract_params, activated_parameter_count, parameter_count
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runtime.allocator import keep_freed_memory
from pma_jax.runtime.formatting import format_text
from pma_jax.runtime.mesh import make_mesh
from pma_jax.storage import atomic
from pma_jax.storage.json_files import parse_untrusted_json
from pma_jax.studies import pages, run_cache
from pma_jax.studies.pages import IndexRow

SIZES = ("science_small", "science_large", "science_moe")
TRUNK_EVALUATION_TOKENS = 4096  # held-out tokens of the evaluations while a trunk trains; the study uses more
BRANCH_DIVISORS = (32, 16, 8, 4, 2)  # the length of an annealed branch is its end divided by one of these
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
# Defaults with `--tiny`. The keys are also the list of the fields of `Study` that the command line sets directly.
TINY_OPTIONS = {"sizes": (SIZES[0], SIZES[-1]), "seeds": (0, 1), "units": 16, "evaluation_tokens": 512}


@dataclasses.dataclass(frozen=True)
class Study:
    """Train, fork, merge and evaluate the runs of an experiment, through a cache of runs; record which were used."""

    cache: Path  # directory of the run cache
    sizes: tuple[str, ...] = SIZES  # names of configurations; the first is measured in most detail
    seeds: tuple[int, ...] = (0, 1, 2)
    units: int = 64  # per trunk; a multiple of 16
    evaluation_tokens: int = 32_768  # held-out tokens on which merges are compared
    overrides: tuple[str, ...] = ()  # `section.key=value`, applied to every run
    runs_used: dict[str, Run] = dataclasses.field(default_factory=dict)  # by path
    run_seconds: list[float] = dataclasses.field(default_factory=list)  # wall time to train or read each run

    def trunk_config(self, size: str, seed: int, changes: Iterable[str] = ()) -> Config:
        """Return the configuration of a trunk: `size` with the overrides and the study's intervals.

        `training.total_tokens` is rounded down so that each unit has the same whole number of steps. Other options in
        `overrides` and `changes` take precedence over those that the study sets.
        """
        raw = configuration.load(size)
        given = [*self.overrides, *changes]
        configuration.override(raw, given)
        batch = raw.training.batch_size_sequences * raw.training.sequence_length_tokens
        unit = max(raw.training.total_tokens // (batch * self.units), 1) * batch
        derived = {
            "training.total_tokens": unit * self.units,
            "training.seed": seed,
            "training.log_interval_tokens": unit,
            "schedule.decay": "none",
            "checkpoint.interval_tokens": unit,
            "checkpoint.kinds": "point,block_mean",
            "checkpoint.state_interval_tokens": unit * self.units,
            "checkpoint.keep_states": 1,
            "checkpoint.keep_states_at_tokens": ",".join(str(u * unit) for u in self.fork_units()),
            "checkpoint.keep_windows": 0,
            "evaluation.tokens": min(TRUNK_EVALUATION_TOKENS, self.evaluation_tokens),
            "preview.windows": "()",
        }
        given_keys = {text.partition("=")[0] for text in given} - {"training.total_tokens"}
        configuration.override(raw, [f"{key}={value}" for key, value in derived.items() if key not in given_keys])
        return configuration.resolve(raw)

    def fork_units(self) -> list[int]:
        """Return the units at which trunks save a training state.

        Branches of every length in `branch_lengths` fork there to end at a quarter, half or all of the trunk.
        """
        ends = (self.units // 4, self.units // 2, self.units)
        return sorted({end - length for end in ends for length in self.branch_lengths(end)})

    def branch_lengths(self, end: int) -> list[int]:
        """Return the lengths, in units, of the annealed branches that end at unit `end`: `end` / 32 to `end` / 2."""
        return [end // divisor for divisor in BRANCH_DIVISORS if end // divisor]

    def trunk(self, size: str, seed: int, changes: Iterable[str] = ()) -> Run:
        """Return the trained trunk of a size and seed, with snapshots of both kinds at every unit."""
        config = self.trunk_config(size, seed, changes)
        return self._get(lambda: run_cache.get_or_train(self.cache, config))

    def half_length_trunks(self, size: str, rate_factor: float) -> tuple["Study", dict[int, Run]]:
        """Return a study of half the units, and trunks at `rate_factor` times the learning rate of `size`, by seed.

        With factor 1, return the full-length trunks: at a constant rate, their first half equals a half-length run.
        Evaluate them only at the units of the returned study; the default end of `loss` is the end of the run.
        """
        half, full = dataclasses.replace(self, units=self.units // 2), self.trunk_config(size, self.seeds[0])
        changes = [
            f"training.total_tokens={full.training.total_tokens // 2}",
            f"schedule.peak_rate={rate_factor * full.schedule.peak_rate}",
        ]
        return half, {
            seed: self.trunk(size, seed) if rate_factor == 1 else half.trunk(size, seed, changes) for seed in self.seeds
        }

    def fork(self, run: Run, at: int, end: int, changes: Iterable[str] = (), weights: Snapshot | None = None) -> Run:
        """Fork a trunk at unit `at` and train the fork to unit `end`, or return the cached run.

        The fork starts from `weights` if they are given; see `run_cache.get_or_fork`.
        """
        changes = [
            f"training.total_tokens={end * self.unit_tokens(run)}",
            f"checkpoint.state_interval_tokens={end * self.unit_tokens(run)}",
            "checkpoint.keep_states_at_tokens=()",
            *changes,
        ]
        return self._get(lambda: run_cache.get_or_fork(self.cache, run, at * self.unit_tokens(run), changes, weights))

    def anneal(self, run: Run, at: int, end: int, shape: str = "linear", weights: Snapshot | None = None) -> Run:
        """Fork a trunk at unit `at`; decay the fork's learning rate to `schedule.final_rate` (0 by default) at `end`.

        `shape` is linear, cosine or minus_sqrt.
        """
        decay = [f"schedule.decay={shape}", f"schedule.decay_start_tokens={at * self.unit_tokens(run)}"]
        return self.fork(run, at, end, decay, weights)

    def merge(self, run: Run, cell: Cell, at: int) -> Snapshot:
        """Return the merge of a trunk's newest snapshots at unit `at`, as a snapshot that a fork can start from."""
        return run_cache.get_or_merge(run, cell, at * self.unit_tokens(run))

    def losses(
        self, run: Run, cells: Iterable[Cell], ends: Sequence[int], part: str = REPORT
    ) -> dict[tuple[Cell, int], float]:
        """Return the loss of each merge at each end (in units), on a part of the held-out text.

        Merges that need more snapshots than exist at an end are left out. Choose the best on the part `select`, and
        publish its loss on the part `report`.
        """
        tokens = [end * self.unit_tokens(run) for end in ends]
        losses = evaluate_along_run(run, cells, tokens, part, self.evaluation_config(run))
        return {(cell, at // self.unit_tokens(run)): evaluated.loss for (cell, at), evaluated in losses.items()}

    def loss(self, run: Run, cell: Cell = RAW, end: int | None = None, part: str = REPORT) -> float:
        """Return the held-out loss of a merge at unit `end`; by default, of the newest snapshot without merging.

        Raises:
            KeyError: There are too few snapshots for the merge.
        """
        end = run.config.training.total_tokens // self.unit_tokens(run) if end is None else end
        return self.losses(run, [cell], [end], part)[cell, end]

    def losses_over_seeds(
        self, get_run: Callable[[int], Run], cells: Iterable[Cell], ends: Sequence[int], part: str = REPORT
    ) -> dict[str, dict[str, list[float]]]:
        """Evaluate the run of every seed, and return the losses in the layout of results.json.

        Returns:
            {text of the merge: {end in units: [one loss per seed]}}. Merges that need more snapshots than the run of
            some seed has at an end are left out there.
        """
        cells = list(cells)
        each = [self.losses(get_run(seed), cells, ends, part) for seed in self.seeds]
        results: dict[str, dict[str, list[float]]] = {}
        for cell in cells:
            at = {str(end): [x[cell, end] for x in each] for end in ends if all((cell, end) in x for x in each)}
            results |= {cell.text: at} if at else {}
        return results

    def describe_size(self, size: str) -> dict[str, Any]:
        """Return the table entries of a size: parameters (total and active per token), tokens of a trunk, peak rate."""
        config = self.trunk_config(size, self.seeds[0])
        shapes = abstract_params(config.model, make_mesh(config.mesh))
        return {
            "parameters": parameter_count(shapes),
            "active_parameters": activated_parameter_count(shapes, config.model),
            "unit_tokens": config.checkpoint.interval_tokens,
            "tokens": config.training.total_tokens,
            "peak_rate": config.schedule.peak_rate,
        }

    def evaluation_config(self, run: Run) -> EvaluationConfig:
        """Return the evaluation of the study: the same held-out text for every run."""
        return dataclasses.replace(run.config.evaluation, tokens=self.evaluation_tokens)

    def describe_text(self) -> SampleDescription:
        """Return how the held-out text of the results was sampled, for the first size."""
        config = self.trunk_config(self.sizes[0], self.seeds[0])
        evaluation = dataclasses.replace(config.evaluation, tokens=self.evaluation_tokens)
        config = dataclasses.replace(config, evaluation=evaluation)
        return read_sample(prepare_tokens(config), config, REPORT).describe()

    def unit_tokens(self, run: Run) -> int:
        """Return the tokens per unit of a trunk."""
        return run.config.checkpoint.interval_tokens

    def training_cost(self) -> dict[str, float]:
        """Return the wall hours and tokens of training of all runs used here, including cached ones."""
        each = [run_cache.training_cost(run) for run in self.runs_used.values()]
        return {
            "runs": len(each),
            "tokens": sum(cost["tokens"] for cost in each),
            "training_hours": sum(cost["seconds"] for cost in each) / 3600,
        }

    def _get(self, get: Callable[[], Run]) -> Run:
        """Return the run that `get` returns, and record it and the wall time of the call."""
        began = time.perf_counter()
        run = get()
        self.run_seconds.append(time.perf_counter() - began)
        self.runs_used[str(run.path)] = run
        return run


def run_experiment(
    script: str,
    measure: Callable[[Study], dict[str, Any]],
    report: Callable[[dict[str, Any]], str],
    summarize: Callable[[dict[str, Any]], IndexRow],
    draw: Callable[[dict[str, Any]], dict[str, bytes]],
    arguments: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Run an experiment from its command line: write results.json, the figures and the README's generated section.

    Runs and losses in the directory --runs are read, not computed again.

    Args:
        script: Path of the script; its folder is the default of --out.
        measure: Trains and evaluates; the docstring of this module describes the four functions.
        report: Formats the generated section.
        summarize: Formats the row in the table of experiments.
        draw: Draws the figures.
        arguments: Command-line arguments; by default those of the process.

    Returns:
        The content of results.json.

    Raises:
        SystemExit: An option or a file is invalid; the process exits with one line on standard error.
    """
    folder = Path(script).resolve().parent
    options, overrides = _parse(folder, sys.argv[1:] if arguments is None else arguments)
    try:
        page = options.out / "README.md"
        if page.exists():
            pages.extract_results(page.read_text())  # checked before hours of training
        keep_freed_memory()
        path = options.out / "results.json"
        results = (
            parse_untrusted_json(path.read_bytes(), str(path), True)
            if options.redraw
            else _measure(measure, options, overrides)
        )
        results["row"] = dataclasses.asdict(summarize(results))
        atomic.write_text(epath.Path(path), json.dumps(results, indent=1) + "\n")
        for name, png in draw(results).items():
            (options.out / name).write_bytes(png)
        if page.exists():
            page.write_text(pages.replace_results(page.read_text(), render_results(report, results)))
        if options.out == folder and (folder.parent / "README.md").exists():
            pages.update_index(folder.parent)
        print(render_results(report, results))
        return results
    except (UserError, OSError) as error:
        raise SystemExit(f"error: {error_line(error)}") from error


def render_results(report: Callable[[dict[str, Any]], str], results: dict[str, Any]) -> str:
    """Return the README's generated section: the script's report, then where its numbers come from."""
    return f"{report(results)}\n\n{describe_provenance(results['made'])}"


def describe_provenance(made: dict[str, Any]) -> str:
    """Describe, in a sentence or two, the commit, the cost and the options that the numbers were made with."""
    commit = f"Made at commit `{made['commit']}`" if made["commit"] else "Made outside of a repository"
    given = f"; overrides: `{' '.join(made['overrides'])}`" if made["overrides"] else ""
    return (
        f"{commit}: {made['runs']} runs of {made['tokens'] / 1e6:.1f}M tokens in {made['training_hours']:.2f} machine "
        f"hours (wall time; a run that several experiments use counts in each), and {made['evaluation_hours']:.2f} "
        f"hours of evaluation. Seeds {', '.join(map(str, made['seeds']))}; judged on "
        f"{_describe_text(made['held_out'])}, the same for every model{given}. All numbers: "
        "[results.json](results.json)."
    )


def _describe_text(text: SampleDescription | str) -> str:
    """Describe the held-out text of results; those of early versions have a sentence instead of a description."""
    return text if isinstance(text, str) else f"{format_text(text)} of the held-out text"


def _measure(measure: Callable[[Study], dict[str, Any]], options: Any, overrides: Sequence[str]) -> dict[str, Any]:
    settings = {name: getattr(options, name) for name in TINY_OPTIONS}
    study = Study(options.runs.resolve(), overrides=tuple(overrides), **settings)
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    results = measure(study)
    made = {"commit": _commit(), **settings, "overrides": list(overrides), **study.training_cost()}
    made["held_out"] = study.describe_text()
    made["evaluation_hours"] = (time.perf_counter() - began - sum(study.run_seconds)) / 3600
    return json.loads(json.dumps({"made": made, **results}))


def _parse(folder: Path, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the configuration overrides as `section.key=value`."""
    parser = argparse.ArgumentParser(
        description=f"The experiment {folder.name}; --config.KEY=VALUE changes the configuration of every run."
    )
    names = lambda text: tuple(text.split(","))  # noqa: E731
    parser.add_argument("--runs", type=Path, required=True, help="directory of cached runs that experiments share")
    parser.add_argument("--out", type=Path, default=folder, help="directory of results.json, figures and README.md")
    parser.add_argument("--sizes", type=names, help=f"names of configurations (default {','.join(SIZES)})")
    parser.add_argument("--seeds", type=lambda text: tuple(map(int, text.split(","))), help="seeds (default 0,1,2)")
    parser.add_argument("--units", type=int, help="units per trunk, a multiple of 16 (default 64)")
    parser.add_argument("--evaluation-tokens", type=int, help="held-out tokens to compare merges on (default 32768)")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model and two seeds, to test the script")
    parser.add_argument("--redraw", action="store_true", help="only rewrite tables and figures, from results.json")
    defaults = {field.name: field.default for field in dataclasses.fields(Study)}
    parser.set_defaults(**{name: defaults[name] for name in TINY_OPTIONS})
    if parser.parse_known_args(arguments)[0].tiny:
        parser.set_defaults(**TINY_OPTIONS)
    options, rest = parser.parse_known_args(arguments)
    wrong = [word for word in rest if not (word.startswith("--config.") and "=" in word)]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if options.units % 16:
        parser.error(f"--units must be a multiple of 16, not {options.units}")
    options.out = options.out.resolve()
    overrides = [word.removeprefix("--config.") for word in rest]
    return options, [*(TINY if options.tiny else ()), *overrides]


def _commit() -> str | None:
    """Return the short hash of HEAD, with `+` if tracked files of the package have changed; None without git."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno", "--", "."], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return name.stdout.strip() + ("+" if changed.stdout.strip() else "")
