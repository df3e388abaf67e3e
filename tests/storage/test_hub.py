"""hf:// addresses, against a local directory served on loopback as the hub's endpoint."""

import hub_server
import numpy as np
import pytest
from hub_server import commit
from safetensors.numpy import save

from pma_jax.merging import from_storage, gather
from pma_jax.merging.engine.merge import merge
from pma_jax.merging.engine.plan import plan
from pma_jax.merging.engine.provenance import read
from pma_jax.storage.formats import hub
from pma_jax.storage.formats.names import expand_braces
from pma_jax.storage.formats.open import open_source, read_leaf


@pytest.fixture
def endpoint(tmp_path):
    revisions = {
        f"stage1-step-{step}": {
            "model.safetensors": save({"w": np.full(5, step, np.float32)}),
            "config.json": b"{}",
            "training_args.bin": b"\x80",
        }
        for step in (100, 200, 400)
    }
    revisions["stage2-step-500"] = revisions["stage1-step-400"]
    revisions["pickled"] = {"pytorch_model.bin": b"\x80"}
    with hub_server.serve(revisions, tmp_path / "cache") as fetched:
        yield fetched


def test_suite_is_expanded_downloaded_and_merged(endpoint, tmp_path):
    addresses, notes = hub.expand_revisions("hf://org/suite@stage1-step-{100..400..100}")
    assert addresses == [f"hf://org/suite@stage1-step-{step}" for step in (100, 200, 400)]
    assert notes == ["org/suite has no stage1-step-300 (1 missing)"]
    sources = [open_source(address) for address in addresses]
    assert [source.step for source in sources] == [100, 200, 400]
    assert not any(file.endswith(".bin") for _, file in endpoint)
    merge(plan(sources, [0.25, 0.25, 0.5]), [tmp_path / "out"])
    np.testing.assert_array_equal(read_leaf(open_source(tmp_path / "out"), "w"), np.full(5, 275, np.float32))
    assert read(tmp_path / "out")["sources"][0]["source"] == f"hf://org/suite@{commit('stage1-step-100')}"


def test_only_selected_revisions_are_downloaded(endpoint, tmp_path):
    gathered = gather.select_checkpoints(gather.open_checkpoints(["hf://org/suite@stage1-step-*"]), last=2)
    assert endpoint == [], "names alone decide"
    made, used = from_storage.plan_merge(gathered, ["sma:1"])
    assert [source.step for source in used.sources] == [400]
    assert [file for how, file in endpoint if how == "GET"].count("model.safetensors") == 1
    merge(made, [tmp_path / "out"])
    np.testing.assert_array_equal(read_leaf(open_source(tmp_path / "out"), "w"), np.full(5, 400, np.float32))


def test_pattern_that_crosses_stages_is_reported(endpoint):
    addresses, notes = hub.expand_revisions("hf://org/suite@stage*")
    assert [address.split("@")[1] for address in addresses] == [
        "stage1-step-100",
        "stage1-step-200",
        "stage1-step-400",
        "stage2-step-500",
    ]
    assert "several stages" in notes[0]


def test_revisions_without_a_step_are_left_out_and_stages_apart(endpoint):
    gathered = gather.open_checkpoints(["hf://org/suite@*"])
    assert [source.step for source in gathered.sources[:3]] == [100, 200, 400]
    assert any("left out of hf://org/suite@*" in note and "pickled" in note for note in gathered.notes)
    with pytest.raises(ValueError, match=r"boundary between org/suite stage1 .* and org/suite stage2"):
        gather.select_checkpoints(gathered)
    named = ["hf://org/suite@stage2-step-500", "hf://org/suite@stage1-step-400"]
    with pytest.raises(ValueError, match="boundary between org/suite stage1"):
        gather.select_checkpoints(gather.open_checkpoints(named))
    series = gather.select_checkpoints(gather.open_checkpoints(named), across_stages=True)
    assert [source.step for source in series.sources] == [400, 500]
    assert endpoint == [], "names alone decide"


def test_one_commit_under_two_names_is_refused(endpoint):
    commit_of_100 = f"hf://org/suite@{commit('stage1-step-100')}"
    gathered = gather.open_checkpoints(["hf://org/suite@stage1-step-100", commit_of_100])
    with pytest.raises(ValueError, match="is given twice"):
        from_storage.plan_merge(gathered, ["sma"])


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("hf://org/suite@pickled", "only pickles .*convert"),
        ("hf://org/suite@gone", "request to the Hugging Face hub failed"),
        ("hf://org", "is not hf://"),
        ("hf://org/../x@a", "is not hf://"),
    ],
)
def test_unavailable_address_is_one_line(endpoint, address, match):
    with pytest.raises(ValueError, match=match) as error:
        open_source(address)
    assert "\n" not in str(error.value)


def test_patterns_without_a_match_list_the_available_names(endpoint):
    with pytest.raises(ValueError, match="no revision matches; org/suite has pickled, stage1-step-100"):
        hub.expand_revisions("hf://org/suite@final*")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a", ["a"]),
        ("s{1..3}", ["s1", "s2", "s3"]),
        ("s{0..10..5}x{a,b}", ["s0xa", "s0xb", "s5xa", "s5xb", "s10xa", "s10xb"]),
    ],
)
def test_braces_expand_ranges_and_alternatives(pattern, names):
    assert expand_braces(pattern) == names


@pytest.mark.parametrize("pattern", ["{5..1}", "{0..999999999999}", "{1..2..0}", "{1..5000}{1..5000}"])
def test_brace_expansion_is_bounded(pattern):
    with pytest.raises(ValueError, match="expands to"):
        expand_braces(pattern)
