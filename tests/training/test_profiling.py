"""Traces of JAX's profiler, read back with JAX's own reader."""

import collections

import jax
import pytest
import tiny
from jax.profiler import ProfileData

from pma_jax.config.errors import UserError
from pma_jax.training.loop import train
from pma_jax.training.profiling import PROFILED_STEPS

STEP = tiny.BATCH_TOKENS


def count_calls(path, program):
    """Count how often a trace says that a program was called; JAX marks each call twice."""
    planes = ProfileData.from_file(str(path)).planes
    names = collections.Counter(e.name for plane in planes for line in plane.lines for e in line.events)
    return names[f"PjitFunction({program})"] / 2


@pytest.mark.slow
def test_three_steps_are_profiled_at_each_token_count_and_the_run_is_the_same(workspace, finished, tmp_path):
    at = (1, 6 * STEP, 9 * STEP - 1)
    run = train(tiny.config(workspace, training__profile_at_tokens=at), tmp_path / "run")
    folders = (run.path / "tensorboard" / "plugins" / "profile").iterdir()
    counts = {
        int(folder.name): count_calls(trace, "train_step") for folder in folders for trace in folder.glob("*.xplane.pb")
    }
    assert counts == dict.fromkeys([2 * STEP, 6 * STEP, 9 * STEP], PROFILED_STEPS)
    assert tiny.numbers(run) == tiny.numbers(finished)


@pytest.mark.slow
def test_trace_ends_with_the_run_and_another_one_in_progress_is_refused(workspace, tmp_path):
    config = tiny.config(workspace, training__profile_at_tokens=(tiny.HORIZON - 1,))
    with pytest.raises(UserError, match=r"training\.profile_at_tokens: .*one profile"), jax.profiler.trace(tmp_path):
        train(config, tmp_path / "run")
    run = train(config, tmp_path / "run")
    [trace] = (run.path / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb")
    assert count_calls(trace, "train_step") == 1
