"""A study: the trunks, forks and merges of an experiment, trained and evaluated through a cache of runs.

A trunk is a run at a constant learning rate, divided into `units` equal parts. It saves a snapshot of each kind (point
and block mean) at the end of each unit, and a training state where an annealed branch may fork. Scripts give positions
in units, so that one script works at every size: `--sizes dense_1b --config.training.total_tokens=20e9` runs it on
other models.

Dimension: D documents of a sample of held-out text.
"""

import dataclasses
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pma_jax import config as configuration
from pma_jax.config import Config, EvaluationConfig
from pma_jax.config.errors import UserError
from pma_jax.data.sampling import MINIMUM_DOCUMENTS, PARTS, REPORT, estimate
from pma_jax.evaluation.held_out import check_part_sizes, prepare_tokens, read_sample
from pma_jax.evaluation.sweep import RAW, Cell
from pma_jax.evaluation.trajectory import DocumentLosses, count_missing, evaluate_documents
from pma_jax.model.decoder import abstract_params, activated_parameter_count, parameter_count
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runtime.mesh import make_mesh
from pma_jax.storage.json_files import parse_untrusted_json
from pma_jax.studies import run_cache
from pma_jax.studies.tuning import TUNING_SEEDS

SIZES = ("science_small", "science_large", "science_moe")
TRUNK_EVALUATION_TOKENS = 4096  # held-out tokens of the evaluations while a trunk trains; the study uses more
DECIMALS = 4  # of summed losses in results.json; a mean loss over the tokens of the study is exact to 1e-8
FEWEST_UNITS = 32  # of a study that searches settings
BRANCH_DIVISORS = (32, 16, 8, 4, 2)  # the length of an annealed branch is its end divided by one of these


@dataclasses.dataclass(frozen=True)
class Study:
    """Train, fork, merge and evaluate the runs of an experiment, through a cache of runs; record which were used."""

    cache: Path  # directory of the run cache
    sizes: tuple[str, ...] = SIZES  # names of configurations; the first is measured in most detail
    seeds: tuple[int, ...] = (0, 1, 2)
    units: int = 64  # per trunk; a multiple of 16
    evaluation_tokens: int = 131_072  # held-out tokens of a part, on which merges are compared
    minimum_documents: int = MINIMUM_DOCUMENTS  # of a part
    margin: float = 0.003  # nats within which the losses of two models count as equal
    tuned: Path | None = None  # results.json of the experiment tuning
    workers: int = 1  # processes that train at a time, for experiments that list their runs
    overrides: tuple[str, ...] = ()  # `section.key=value`, applied to every run
    runs_used: dict[str, Run] = dataclasses.field(default_factory=dict)  # by path

    @property
    def searches_settings(self) -> bool:
        """Whether experiments search settings; with fewer units, as in tests, they take the first ones."""
        return self.units >= FEWEST_UNITS

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        """The seeds on which settings are searched; no more than the study has."""
        return TUNING_SEEDS[: len(self.seeds)]

    def settings(self) -> dict[str, Any]:
        """Return what defines the runs and readings of the study, as JSON."""
        names = ("sizes", "seeds", "units", "evaluation_tokens", "overrides")
        return {"cache": str(self.cache), **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "Study":
        """Return the study of `settings`, after its way through JSON."""
        return cls(
            Path(settings["cache"]),
            sizes=tuple(settings["sizes"]),
            seeds=tuple(settings["seeds"]),
            units=settings["units"],
            evaluation_tokens=settings["evaluation_tokens"],
            overrides=tuple(settings["overrides"]),
        )

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

    def half_length_changes(self, size: str, rate_factor: float) -> tuple[int, tuple[str, ...]]:
        """Return the units and the changes of trunks of half the tokens, at `rate_factor` times the rate of `size`.

        With factor 1, the units are 0, those of the study: at a constant rate, the first half of the full-length trunks
        equals a half-length run.
        """
        if rate_factor == 1:
            return 0, ()
        full = self.trunk_config(size, self.seeds[0])
        total = f"training.total_tokens={full.training.total_tokens // 2}"
        return self.units // 2, (total, f"schedule.peak_rate={rate_factor * full.schedule.peak_rate}")

    def fork(self, run: Run, at: int, end: int, changes: Iterable[str] = (), weights: Snapshot | None = None) -> Run:
        """Fork a trunk at unit `at` and train the fork to unit `end`, or return the cached run.

        The fork starts from `weights` if they are given; see `run_cache.get_or_fork`.
        """
        changes = self.fork_changes(run, end, changes)
        return self._get(lambda: run_cache.get_or_fork(self.cache, run, at * self.unit_tokens(run), changes, weights))

    def fork_changes(self, run: Run, end: int, changes: Iterable[str] = ()) -> list[str]:
        """Return the changes of a trunk's configuration that make a fork which ends at unit `end`."""
        tokens = end * self.unit_tokens(run)
        total, interval = f"training.total_tokens={tokens}", f"checkpoint.state_interval_tokens={tokens}"
        return [total, interval, "checkpoint.keep_states_at_tokens=()", *changes]

    def merge(self, run: Run, cell: Cell, at: int) -> Snapshot:
        """Return the merge of a trunk's newest snapshots at unit `at`, as a snapshot that a fork can start from."""
        return run_cache.get_or_merge(run, cell, at * self.unit_tokens(run))

    def document_losses(self, run: Run, cells: Sequence[Cell], ends: Sequence[int], part: str) -> DocumentLosses:
        """Return the loss of each merge at each end on each document of a part of the held-out text.

        The ends are in units, those of the result in tokens. The cost is recorded in the cache of runs.
        """
        tokens, evaluation = [end * self.unit_tokens(run) for end in ends], self.evaluation_config(run)
        pairs = [(cell, at) for at in tokens for cell in cells]
        missing = count_missing(run, pairs, part, evaluation)
        if missing and run_cache.has_losses_only(run):
            raise run_cache.losses_only_error(run, f"those of {missing} merges that are to be evaluated")
        began = time.perf_counter()
        losses = evaluate_documents(run, pairs, part, evaluation)
        if missing:
            seconds = time.perf_counter() - began
            run_cache.add_evaluation_cost(run, seconds, missing * evaluation.tokens)
        return losses

    def losses(
        self, run: Run, cells: Iterable[Cell], ends: Sequence[int], part: str = REPORT
    ) -> dict[tuple[Cell, int], float]:
        """Return the loss of each merge at each end (in units), on a part of the held-out text.

        Merges that need more snapshots than exist at an end are left out. Choose the best on the part `select`, and
        publish its loss on the part `report`.
        """
        measured = self.document_losses(run, list(cells), ends, part)
        unit = self.unit_tokens(run)
        return {(cell, at // unit): estimate(x_D, measured.counts).loss for (cell, at), x_D in measured.nats.items()}

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
        measured = self.document_losses_over_seeds(get_run, cells, ends, part)
        tokens = sum(measured["document_tokens"])
        return {
            text: {end: [sum(x_D) / tokens for x_D in x_SD] for end, x_SD in at.items()}
            for text, at in measured["nats"].items()
        }

    def document_losses_over_seeds(
        self, get_run: Callable[[int], Run], cells: Iterable[Cell], ends: Sequence[int], part: str = REPORT
    ) -> dict[str, Any]:
        """Evaluate the run of every seed on each document, and return the losses in the layout of results.json.

        Returns:
            "document_tokens": number of targets of each document. "nats": {text of the merge: {end in units: [for each
            seed: [summed loss of each document]]}}, without the merges that need more snapshots than the run of some
            seed has at an end.

        Raises:
            UserError: The runs of the seeds are judged on different text.
        """
        cells, nats = list(cells), {}
        runs = [get_run(seed) for seed in self.seeds]
        each = [self.document_losses(run, cells, ends, part) for run in runs]
        if len({x.digest for x in each}) > 1:
            raise UserError(f"the runs of the seeds are judged on different text ({', '.join(x.digest for x in each)})")
        for cell in cells:
            at = {}
            for end in ends:
                pair = cell, end * self.unit_tokens(runs[0])
                if all(pair in x.nats for x in each):
                    at[str(end)] = [np.round(x.nats[pair], DECIMALS).tolist() for x in each]
            nats |= {cell.text: at} if at else {}
        return {"document_tokens": each[0].counts.tolist(), "nats": nats}

    def tuned_setting(self, size: str, contender: str) -> tuple[str, ...]:
        """Return the best setting of a contender, as overrides, from the results of the experiment tuning.

        Raises:
            UserError: The results are missing, do not contain the size, or were made on another text than the study's.
        """
        assert self.tuned is not None, "experiments that read tuned settings set it"
        if not self.tuned.exists():
            raise UserError(f"no tuned settings in {self.tuned}: run experiments/tuning/script.py first")
        results = parse_untrusted_json(self.tuned.read_bytes(), str(self.tuned), True)
        theirs, ours = results["made"].get("text", {}), self.describe_text()
        if theirs.get("corpus_digest") != ours["corpus_digest"]:
            raise UserError(
                f"{self.tuned} was made on another text ({theirs.get('corpus')}, {theirs.get('corpus_digest')}) than "
                f"this study's ({ours['corpus']}, {ours['corpus_digest']}): tune on this text, or choose that one"
            )
        if size not in results["sizes"]:
            raise UserError(f"{self.tuned} has no settings of {size}, only of {', '.join(results['sizes'])}")
        tokens, trunk = results["sizes"][size]["tokens"], self.trunk_config(size, self.seeds[0]).training.total_tokens
        if tokens != trunk:
            raise UserError(f"{self.tuned} tuned {size} for {tokens:,} tokens, not for the {trunk:,} of this study")
        return tuple(results["sizes"][size]["best"][contender])

    def describe_size(self, size: str) -> dict[str, Any]:
        """Return the table entries of a size: parameters (total and active per token), tokens of a trunk, peak rate."""
        config = self.trunk_config(size, self.seeds[0])
        shapes = abstract_params(config.model, make_mesh(config.mesh))
        return {
            "parameters": parameter_count(shapes),
            "active_parameters": activated_parameter_count(shapes, config.model),
            "unit_tokens": config.checkpoint.interval_tokens,
            "tokens": config.training.total_tokens,
            "sequence_tokens": config.training.sequence_length_tokens,
            "peak_rate": config.schedule.peak_rate,
        }

    def evaluation_config(self, run: Run) -> EvaluationConfig:
        """Return the evaluation of the study: the same held-out text for every run."""
        return dataclasses.replace(run.config.evaluation, tokens=self.evaluation_tokens)

    def describe_text(self) -> dict[str, Any]:
        """Return which text the study is trained and judged on, with the digests by which results are comparable.

        Raises:
            UserError: A part of the held-out text has too few documents or tokens for the study.
        """
        config = self.trunk_config(self.sizes[0], self.seeds[0])
        evaluation = dataclasses.replace(config.evaluation, tokens=self.evaluation_tokens)
        config = dataclasses.replace(config, evaluation=evaluation)
        tokens = prepare_tokens(config)
        check_part_sizes(tokens, config, *PARTS)
        parts = {part: read_sample(tokens, config, part).describe() for part in PARTS}
        for part, sample in parts.items():
            if sample["documents"] < self.minimum_documents:
                raise UserError(
                    f"the part {part!r} of the held-out text has {sample['documents']} documents, and intervals over "
                    f"documents need {self.minimum_documents}: choose a corpus of more documents or raise "
                    "data.held_out_percent"
                )
        data = config.data
        name = (data.package or "stdlib") if data.source == "packaged" else data.source
        return {"corpus": name, "corpus_digest": tokens.digest, "python": platform.python_version(), "parts": parts}

    def unit_tokens(self, run: Run) -> int:
        """Return the tokens per unit of a trunk."""
        return run.config.checkpoint.interval_tokens

    def training_cost(self) -> dict[str, float]:
        """Return the machine hours and the tokens of the training of all runs used here, including cached ones."""
        each = [run_cache.training_cost(run) for run in self.runs_used.values()]
        return {
            "runs": len(each),
            "tokens": sum(cost["tokens"] for cost in each),
            "training_hours": sum(cost["seconds"] for cost in each) / 3600,
        }

    def _get(self, get: Callable[[], Run]) -> Run:
        """Return the run that `get` returns, and record it."""
        run = get()
        self.runs_used[str(run.path)] = run
        return run
