import dataclasses
import json
import subprocess
import sys

import ml_collections
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pma_jax import config
from pma_jax.config import Config, MeshConfig, ReplicasConfig
from pma_jax.config.errors import UserError


def with_keys(**sections):
    return config.resolve(sections)


# --- Defaults, resolving, overriding ----------------------------------------------------------------------------------


def test_defaults_resolve_to_the_default_config():
    assert config.resolve(config.defaults()) == Config()


def test_config_file_with_an_unknown_key_fails():
    with pytest.raises(AttributeError):
        config.defaults().training.totl_tokens = 3


def test_missing_section_or_key_takes_its_default():
    resolved = with_keys(training={"seed": 7})
    assert resolved == dataclasses.replace(Config(), training=dataclasses.replace(Config().training, seed=7))


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("checkpoint.interval_tokens=4e6", 4_000_000),
        ("checkpoint.interval_tokens=4_000_000", 4_000_000),
        ("schedule.peak_rate=1", 1.0),
        ("schedule.peak_rate=3e-4", 3e-4),
        ("model.qk_norm=true", True),
        ("model.qk_norm=False", False),
        ("preview.windows=3,6", (3, 6)),
        ("preview.windows=(3,)", (3,)),
        ("preview.windows=", ()),
        ("checkpoint.keep_states_at_tokens=4.9e6,6e6", (4_900_000, 6_000_000)),
        ("checkpoint.kinds=block_mean,point", ("block_mean", "point")),
        ("data.source=files", "files"),
        ("data.files=a/*.txt,b/*.jsonl", ("a/*.txt", "b/*.jsonl")),
        ("data.hub_name=a=b", "a=b"),
    ],
)
def test_override_is_parsed_as_its_keys_type(assignment, value):
    raw = config.defaults()
    config.override(raw, [assignment])
    section, key = assignment.partition("=")[0].split(".")
    stored = raw[section][key]
    assert stored == value and type(stored) is type(value)
    if (section, key) != ("checkpoint", "interval_tokens"):
        assert getattr(getattr(config.resolve(raw), section), key) == value


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("checkpoint.intervall_tokens=1e6", "'checkpoint.interval_tokens'"),
        ("trainig.seed=1", "'training.seed'"),
        ("seed=1", "unknown config key 'seed'"),
        ("training.seed", "no value"),
        ("training.seed=1.5", "'training.seed' takes a whole number, not 1.5"),
        ("training.seed=x", "a whole number, not 'x'"),
        ("schedule.peak_rate=fast", "a number, not 'fast'"),
        ("model.qk_norm=2", "true or false"),
        ("preview.windows=3,x", "a whole number, not 'x'"),
        ("training.total_tokens=inf", "a whole number"),
        ("training.total_tokens=None", "a whole number"),
        ("training.total_tokens=", "a whole number"),
        ("training.a.b=3", "unknown config key 'training.a.b'"),
    ],
)
def test_invalid_override_is_refused_with_what_is_valid(assignment, message):
    raw = config.defaults()
    with pytest.raises(ValueError, match=r"config|override") as refused:
        config.override(raw, [assignment])
    assert message in str(refused.value)
    assert raw.to_dict() == config.defaults().to_dict(), "a refused override changes nothing"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"trainin": {}}, "'training'"),
        ({"training": {"sed": 1}}, "training.sed"),
        ({"training": {"seed": "1"}}, "a whole number"),
        ({"training": {"seed": True}}, "a whole number"),
        ({"model": {"qk_norm": 1}}, "true or false"),
        ({"data": {"source": "web"}}, "packaged, files, tokens, hub"),
        ({"schedule": {"decay": "step"}}, "minus_sqrt"),
        ({"schedule": {"decay": "inverse_sqrt", "warmup_tokens": 0}}, "decay_start_tokens"),
        ({"schedule": {"decay": "inverse_sqrt", "decay_start_tokens": 300_000, "final_rate": 1e-5}}, "final_rate"),
        ({"model": {"compute_dtype": "float16"}}, "bfloat16"),
        ({"model": {"heads": 4, "kv_heads": 3}}, "divide"),
        ({"model": {"head_dim": 7}}, "even"),
        ({"model": {"experts": -1}}, "from 0 to"),
        ({"model": {"experts": 4, "experts_per_token": 5}}, "more than the 4 of model.experts"),
        ({"model": {"experts_per_token": 0}}, "from 1 to"),
        ({"model": {"router_scores": "tanh"}}, "softmax, sigmoid"),
        ({"training": {"balance_loss_weight": -0.1}}, "from 0 to"),
        ({"mesh": {"expert": 2}}, "no experts"),
        ({"training": {"batch_size_sequences": 16, "accumulation_steps": 3}}, "divide"),
        ({"training": {"total_tokens": 0}}, "from 1 to"),
        ({"checkpoint": {"interval_tokens": 100}}, "less than one step"),
        ({"checkpoint": {"keep_states": 0}}, "from 1 to"),
        ({"checkpoint": {"kinds": ("point", "mean")}}, "point, block_mean"),
        ({"checkpoint": {"kinds": ()}}, "each kind at most once"),
        ({"checkpoint": {"kinds": ("point", "point")}}, "each kind at most once"),
        ({"checkpoint": {"kinds": ("block_mean",), "block_every_steps": 49}}, "more than the 48 steps"),
        ({"spikes": {"optimizer": "forget"}}, "reset, keep, restore"),
        ({"spikes": {"attempts": -1}}, "from 0 to"),
        ({"spikes": {"loss_z": 0}}, "above 0"),
        ({"spikes": {"detect": False, "attempts": 1}}, "need spikes.detect=true"),
        ({"spikes": {"attempts": 1, "window_tokens": 15 * 2048}}, "less than 16 steps"),
        ({"spikes": {"attempts": 1}, "checkpoint": {"keep_windows": 1, "window": 5}}, "keeps 5 snapshots"),
        ({"preview": {"windows": (0,)}}, "from 1 to"),
        ({"data": {"held_out_percent": 100}}, "above 0 and below 100"),
        ({"schedule": {"decay": "linear", "decay_start_tokens": 10}}, "warm-up"),
        ({"schedule": {"decay": "linear", "decay_start_tokens": 6_000_000}}, "total_tokens"),
    ],
)
def test_invalid_value_is_refused_with_its_key(sections, message):
    with pytest.raises(ValueError) as refused:
        config.resolve(sections)
    assert message in str(refused.value)


# --- Files ------------------------------------------------------------------------------------------------------------


def test_file_and_shipped_name_load(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from pma_jax import config\ndef get_config():\n    c = config.defaults()\n    c.training.seed = 3\n"
    )
    file.write_text(file.read_text() + "    return c\n")
    assert config.resolve(config.load(str(file))).training.seed == 3
    assert isinstance(config.load("demo"), ml_collections.ConfigDict)
    config.resolve(config.load("demo"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no configuration file"),
        ("raise RuntimeError('broken today')", "broken today"),
        ("def get_config(:", "does not run"),
        ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
        ("x = 3", "no get_config()"),
        ("def get_config():\n    return {}", "returned dict"),
        ("def get_config():\n    raise KeyError('lost')", "lost"),
        ("def get_config():\n    return None", "returned NoneType"),
    ],
)
def test_invalid_file_is_refused_with_its_path(tmp_path, text, message):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError) as refused:
        config.load(str(file))
    assert message in str(refused.value) and str(file) in str(refused.value)


def test_folder_with_a_shipped_name_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    config.resolve(config.load("demo"))


def test_unknown_name_lists_the_shipped_ones():
    with pytest.raises(ValueError, match="demo"):
        config.load("dmo")


# --- Text form, identity ----------------------------------------------------------------------------------------------

counts = st.integers(1, 10**9)
texts = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8)


@st.composite
def configs(draw):
    batch, length = draw(st.integers(1, 512)), draw(st.integers(1, 4096))
    return with_keys(
        data={
            "source": draw(st.sampled_from(("packaged", "files", "hub"))),
            "files": tuple(draw(st.lists(texts, max_size=3))),
            "text_field": draw(texts),
            "held_out_percent": draw(st.floats(0.001, 99.0)),
            "cache_dir": draw(texts),
        },
        schedule={"peak_rate": draw(st.floats(1e-12, 1e3)), "warmup_tokens": draw(counts)},
        training={
            "total_tokens": draw(counts),
            "sequence_length_tokens": length,
            "batch_size_sequences": batch,
            "seed": draw(st.integers(-(2**63), 2**63 - 1)),
        },
        checkpoint={
            "interval_tokens": batch * length + draw(st.integers(0, 10**9)),
            "keep_states_at_tokens": tuple(draw(st.lists(counts, max_size=4))),
        },
        preview={"windows": tuple(draw(st.lists(st.integers(1, 99), max_size=4)))},
        mesh={"data": draw(st.integers(1, 8))},
    )


@given(configs())
def test_json_round_trips(made):
    text = config.to_json(made)
    assert config.from_json(text) == made
    assert config.to_json(config.from_json(text)) == text
    assert config.digest(config.from_json(text)) == config.digest(made)
    assert config.differences_affecting_results(made, config.from_json(text)) == []


@given(configs(), configs())
def test_digests_are_equal_exactly_when_configurations_are(a, b):
    assert (config.digest(a) == config.digest(b)) == (config.differences_affecting_results(a, b) == [])


def test_digest_is_the_same_in_another_process():
    code = "from pma_jax import config; print(config.digest(config.resolve(config.load('demo'))))"
    actual = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)  # Each with its own hash seed.
    }
    assert actual == {config.digest(config.resolve(config.load("demo"))) + "\n"}


def test_options_that_are_off_are_not_part_of_the_digest():
    # Cached runs are found by it. A change of any other key's default changes it too.
    assert config.digest(Config()) == "2983483b2d31c197", "the digest from before GPA, BEMA and replicas existed"
    on = ({"name": "gpa_adamw"}, {"name": "gpa_adamw", "gpa_interpolation": 0.5}, {"bema_interval_tokens": 4096})
    on += ({"bema_interval_tokens": 4096, "bema_lag": 20.0}, {})
    assert len({config.digest(with_keys(optimizer=keys)) for keys in on}) == len(on)


def test_the_mesh_is_part_of_the_digest_where_it_determines_the_number_of_workers():
    def digest(count, replica):
        replicas = ReplicasConfig(method="diloco", count=count)
        return config.digest(dataclasses.replace(Config(), replicas=replicas, mesh=MeshConfig(replica=replica)))

    assert digest(0, 2) != digest(0, 4)
    assert digest(4, 2) == digest(4, 4)


def test_every_key_except_locations_is_part_of_the_digest():
    base = Config()
    changed = {"str": "other", "int": 77, "float": 0.77, "tuple": (77,), "bool": None}
    for section in dataclasses.fields(base):
        for key in dataclasses.fields(getattr(base, section.name)):
            old = getattr(getattr(base, section.name), key.name)
            new = (not old) if isinstance(old, bool) else changed[type(old).__name__]
            other = dataclasses.replace(
                base, **{section.name: dataclasses.replace(getattr(base, section.name), **{key.name: new})}
            )
            name = f"{section.name}.{key.name}"
            lives_there = section.name in ("mesh", "runtime", "tracking") or name in (
                "data.cache_dir",
                "training.profile_at_tokens",
            )
            assert config.differences_affecting_results(base, other) == (
                [] if lives_there else [f"{name}: {old} -> {new}"]
            )


# --- Tokens to steps --------------------------------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 5000), st.integers(1, 400))
def test_marks_do_not_drift(batch, length, extra, steps):
    # For any V and batch size: T tokens contain floor(T / V) marks, each at the step that reached it.
    interval = batch * length + extra
    made = with_keys(
        training={"sequence_length_tokens": length, "batch_size_sequences": batch},
        checkpoint={"interval_tokens": interval},
    )
    assert made.batch_tokens == batch * length
    ends = range(made.batch_tokens, steps * made.batch_tokens + 1, made.batch_tokens)
    marks = [t for t in ends if made.is_mark(t, interval)]
    assert len(marks) == steps * made.batch_tokens // interval
    for k, tokens in enumerate(marks, start=1):
        assert 0 <= tokens - k * interval < made.batch_tokens


@given(st.integers(1, 500), st.integers(0, 5000), st.integers(1, 20), st.integers(1, 200))
def test_every_jth_step_since_the_mark_is_added_to_a_block_mean(batch, extra, every, steps):
    interval = batch * every + extra
    training = {"sequence_length_tokens": batch, "batch_size_sequences": 1, "total_tokens": 10**9}
    made = with_keys(
        training=training,
        checkpoint={"interval_tokens": interval, "kinds": ("block_mean",), "block_every_steps": every},
    )
    since_mark = 0
    for tokens in range(batch, steps * batch + 1, batch):
        since_mark += 1
        assert made.is_block_mean_step(tokens) == (since_mark % every == 0)
        if made.is_snapshot_due(tokens):
            assert since_mark >= every, "a block mean is never empty"
            since_mark = 0
    assert not any(with_keys(training=training).is_block_mean_step(t) for t in range(batch, steps * batch + 1, batch))


def test_run_without_block_means_ignores_j():
    made = with_keys(checkpoint={"interval_tokens": 2048, "block_every_steps": 4})
    assert made.checkpoint.interval_tokens // made.batch_tokens < made.checkpoint.block_every_steps


def test_snapshots_states_and_named_states_are_at_their_marks():
    made = with_keys(
        training={"sequence_length_tokens": 10, "batch_size_sequences": 10, "total_tokens": 1050},
        checkpoint={"interval_tokens": 250, "state_interval_tokens": 400, "keep_states_at_tokens": (601, 700)},
    )
    ends = range(100, 1101, 100)
    assert [t for t in ends if made.is_snapshot_due(t)] == [300, 500, 800, 1000, 1100]
    assert [t for t in ends if made.is_state_due(t)] == [400, 700, 800, 1100]
    assert [t for t in ends if made.is_permanent_state(t)] == [700]
    assert [t for t in ends if made.is_run_complete(t)] == [1100]


def test_json_contains_every_key():
    assert json.loads(config.to_json(Config())).keys() == dataclasses.asdict(Config()).keys()


# --- Bounds -----------------------------------------------------------------------------------------------------------


def keys_of(*types):
    """List (section, key, default) of the keys whose defaults have one of these types."""
    return [
        (section, key, default)
        for section, values in dataclasses.asdict(Config()).items()
        for key, default in values.items()
        if type(default) in types
    ]


@pytest.mark.parametrize(
    "text", ["nan", "inf", "-inf", "1e400", "-1e400", "-1e30", "1e39", "9" * 5000, "true", "", "x"]
)
def test_every_float_is_bounded(text):
    for section, key, _ in keys_of(float):
        with pytest.raises(UserError, match=rf"{section}\.{key}") as refused:
            config.resolve({}, [f"{section}.{key}={text}"])
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "text", ["nan", "inf", "1e400", "-1e30", "1e30", "1" * 400, "9" * 5000, "1.5", "true", "", "x"]
)
def test_every_whole_number_is_bounded(text):
    for section, key, _ in keys_of(int):
        with pytest.raises(UserError, match=rf"{section}\.{key}") as refused:
            config.resolve({}, [f"{section}.{key}={text}"])
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize("text", ["a\0b", "a\nb", "\ud800", "\x1b[2J", "x" * 5000], ids=range(5))
def test_every_text_is_printable(text):
    for section, key, _ in keys_of(str):
        with pytest.raises(UserError, match=rf"{section}\.{key}") as refused:
            config.resolve({section: {key: text}})
        str(refused.value).encode()


@pytest.mark.parametrize("value", [None, [], {}, object(), 10**5000, "x" * 10**6], ids=range(6))
def test_every_key_refuses_other_types_in_one_short_line(value):
    for section, key, _ in keys_of(int, float, bool):
        with pytest.raises(UserError, match=rf"{section}\.{key}") as refused:
            config.resolve({section: {key: value}})
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"training": {"batch_size_sequences": 10**8}, "checkpoint": {"interval_tokens": 10**12}},
            "limit of 1,073,741",
        ),
        ({"evaluation": {"batch_size_sequences": 10**9}}, "evaluation.batch_size_sequences"),
        ({"evaluation": {"batch_size_sequences": 5000}}, "must be at most 4,096"),
        ({"training": {"total_tokens": 10**16}}, "training.total_tokens in steps"),
        ({"spikes": {"window_tokens": 11 * 10**9}}, "spikes.window_tokens"),
        ({"spikes": {"patience_tokens": 10**16}}, "spikes.patience_tokens in steps"),
        ({"model": {"width": 2**24, "layers": 10**6}}, "the parameters of model"),
        ({"mesh": {"data": 2**20, "fsdp": 2}}, "the devices of the axes of mesh"),
        ({"model": {"attention_window_tokens": 99999999999}}, "must be from 0 to 2,147,483,647"),
        ({"mesh": {"data": 0}}, "mesh.data must be 1 or more"),
        ({"mesh": {"cpu_devices": 100_000}}, "from 0 to 1,024"),
        ({"data": {"files": ("",)}}, "must not be empty"),
        ({"preview": {"windows": (1,) * 20_000}}, "at most 10,000 items"),
        ([], "mapping of sections"),
        ({"training": 3}, "config section 'training'"),
    ],
)
def test_impossible_sizes_are_refused_before_anything_is_allocated(sections, message):
    with pytest.raises(UserError) as refused:
        config.resolve(sections)
    assert message in str(refused.value)


def test_real_large_runs_are_within_the_bounds():
    config.resolve(
        {
            "model": {
                "vocabulary_size": 2**18,
                "width": 2**15,
                "layers": 200,
                "heads": 256,
                "kv_heads": 16,
                "head_dim": 256,
            }
            | {"experts": 128, "experts_per_token": 16, "expert_hidden": 2**13},
            "training": {"total_tokens": 10**14, "sequence_length_tokens": 2**20, "batch_size_sequences": 1024},
            "checkpoint": {"interval_tokens": 10**11, "state_interval_tokens": 10**12},
            "evaluation": {"tokens": 10**9, "batch_size_sequences": 512},
            "spikes": {"window_tokens": 10**13},
            "mesh": {"data": 64, "fsdp": 2048},
        }
    )


def test_negative_zero_is_zero():
    assert config.to_json(with_keys(optimizer={"clip_norm": -0.0})) == config.to_json(
        with_keys(optimizer={"clip_norm": 0})
    )


@pytest.mark.parametrize(
    "text", ["import sys\nsys.exit(0)", "def get_config():\n    raise SystemExit", "\0", "x = '\xe9'"]
)
def test_file_that_exits_or_is_no_text_is_refused(tmp_path, text):
    (tmp_path / "mine.py").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"mine\.py"):
        config.load(str(tmp_path / "mine.py"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"], "no __pycache__"
