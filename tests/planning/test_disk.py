from pathlib import Path

import jax
import pytest
import tiny

from pma_jax.config import SNAPSHOT_KINDS, resolve
from pma_jax.planning import disk
from pma_jax.runtime.mesh import make_mesh
from pma_jax.training.loop import train
from pma_jax.training.state import abstract_state

OVERHEAD = 100_000  # Bytes that Orbax adds to a snapshot or a state with this few leaves.
RETENTION = {
    "checkpoint__kinds": ("point", "block_mean"),
    "checkpoint__window": 2,
    "checkpoint__keep_windows": 1,
    "checkpoint__archive_interval_tokens": 8 * tiny.BATCH_TOKENS,
    "checkpoint__keep_states": 1,
    "checkpoint__keep_states_at_tokens": (5 * tiny.BATCH_TOKENS,),
    "model__width": 64,
    "model__hidden": 128,
}


def files_bytes(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


@pytest.mark.slow
def test_bytes_on_disk_match_a_run_with_retention(workspace, tmp_path):
    config = tiny.config(workspace, **RETENTION)
    run = train(config, tmp_path / "run")
    state = abstract_state(config, make_mesh(config.mesh))
    actual = disk.estimate_storage_bytes(config, state)
    folders = {
        name: sorted(int(p.name) for p in (run.path / kind.folder).iterdir()) for name, kind in SNAPSHOT_KINDS.items()
    }
    assert folders["point"] == folders["block_mean"] and len(folders["point"]) == actual["snapshots_kept_of_each_kind"]
    assert len(run.states) == actual["states_kept"] == 2
    assert (
        2 * len(folders["point"]) * actual["snapshot_bytes"] + 2 * actual["state_bytes"] == actual["bytes_at_the_end"]
    )
    # One more state, which is written before the old one is removed. Of each kind two more snapshots: previews of a run
    # that resumes from step 8 or 16 need those of step 4 and 12.
    assert actual["bytes_at_most"] - actual["bytes_at_the_end"] == 4 * actual["snapshot_bytes"] + actual["state_bytes"]
    # Arrays are stored uncompressed; names, shapes and the configuration come on top.
    snapshot, saved = run.of_kind("point")[-1].path, run.states[-1].path
    for path, bytes_ in ((snapshot, actual["snapshot_bytes"]), (saved, actual["state_bytes"])):
        assert bytes_ <= files_bytes(path) <= bytes_ + OVERHEAD, path
    everything = sum(files_bytes(run.path / folder) for folder in run.step_folders)
    saved_count = 2 * len(folders["point"]) + len(run.states)
    assert actual["bytes_at_the_end"] <= everything <= actual["bytes_at_the_end"] + saved_count * OVERHEAD


@pytest.mark.parametrize(
    "checkpoint_keys",
    [
        {},
        {"interval_tokens": 1000, "state_interval_tokens": 1700},
        {"interval_tokens": 300, "state_interval_tokens": 300, "keep_states_at_tokens": (1, 999, 6000, 9999)},
        {"interval_tokens": 10**9, "state_interval_tokens": 10**9},
        {"interval_tokens": 700, "state_interval_tokens": 100},
    ],
)
@pytest.mark.parametrize("total", [6144, 6145, 6000])
def test_marks_equal_those_of_the_run(checkpoint_keys, total):
    config = resolve(
        {
            "training": {"sequence_length_tokens": 32, "batch_size_sequences": 8, "total_tokens": total},
            "checkpoint": checkpoint_keys or {"interval_tokens": 1024, "state_interval_tokens": 2048},
            "schedule": {"warmup_tokens": 100},
        }
    )
    ends = range(256, -(-total // 256) * 256 + 1, 256)
    actual = disk.estimate_storage_bytes(config, abstract_state(config, make_mesh(config.mesh)))
    assert actual["snapshots_saved_of_each_kind"] == sum(map(config.is_snapshot_due, ends))
    assert actual["states_saved"] == sum(map(config.is_state_due, ends))


@pytest.mark.mesh
def test_block_means_take_one_float32_copy_of_the_model(workspace):
    config = tiny.config(workspace, checkpoint__kinds=("block_mean",), mesh__data=2, mesh__fsdp=2, mesh__tensor=2)
    state = abstract_state(config, make_mesh(config.mesh))
    actual = disk.estimate_storage_bytes(config, state)
    assert actual["block_mean_bytes_per_device"] == disk.bytes_per_device(state.params) + 4
    # Norms are replicated on each device, matrices are split in four.
    assert actual["snapshot_bytes"] / 8 < disk.bytes_per_device(state.params) < actual["snapshot_bytes"] / 2
    without = abstract_state(tiny.config(workspace), make_mesh(config.mesh))
    assert disk.estimate_storage_bytes(config, without)["block_mean_bytes_per_device"] == 0


def test_write_time_is_bytes_over_bandwidth(workspace):
    config = tiny.config(workspace, spikes__detect=False)
    state = jax.eval_shape(lambda s: s, abstract_state(config, make_mesh(config.mesh)))
    for hosts, storage, host, one, every in ((1, 1e6, 1e9, 1e6, 1e6), (8, 1e9, 1e6, 1e6, 8e6), (8, 3e6, 1e6, 1e6, 3e6)):
        actual = disk.estimate_write_and_merge_seconds(config, state, hosts, storage, host)
        size = disk.tree_bytes(state.params)
        assert actual["write_snapshot_seconds"] == pytest.approx(size / every)
        assert actual["merge_window_seconds"] == pytest.approx((3 + 1) * size / one)
        assert actual["merge_window_on_mesh_seconds"] == pytest.approx((3 + 1) * size / every)
        assert actual["write_state_seconds"] == pytest.approx(3 * actual["write_snapshot_seconds"], rel=1e-3)
