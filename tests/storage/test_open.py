"""Which files are a checkpoint: incomplete shards, ambiguous directories, links, and formats that are not read."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from pma_jax.config.errors import UserError
from pma_jax.storage.formats.open import open_source

LEAVES = {"a": np.ones(3, np.float32), "b": np.zeros(2, np.float32)}


def write_shards(folder, listed=("a", "b"), written=("a", "b")):
    folder.mkdir(parents=True, exist_ok=True)
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name in written:
        save_file({name: LEAVES[name]}, folder / names[name])
    index = {"metadata": {}, "weight_map": {name: names[name] for name in listed}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def refused(path, match):
    with pytest.raises(UserError, match=match) as error:
        open_source(path)
    assert "\n" not in str(error.value)


def test_one_shard_of_several_is_refused(tmp_path):
    save_file(LEAVES, tmp_path / "model-00001-of-00002.safetensors")
    refused(tmp_path, "shard 1 of 2, not a complete checkpoint")
    refused(tmp_path / "model-00001-of-00002.safetensors", "shard 1 of 2")
    (tmp_path / "single").mkdir()
    save_file(LEAVES, tmp_path / "single" / "model-00001-of-00001.safetensors")
    assert open_source(tmp_path / "single").leaves.keys() == LEAVES.keys()


def test_shards_that_do_not_fit_their_index_are_refused(tmp_path):
    refused(write_shards(tmp_path / "missing", written="a"), "model-00002-of-00002.safetensors is missing")
    refused(write_shards(tmp_path / "unlisted", listed="a"), "does not list model-00002-of-00002.safetensors")
    folder = write_shards(tmp_path / "wrong")
    save_file(LEAVES, folder / "model-00001-of-00002.safetensors")
    refused(folder, "index and shard disagree about 'b'")
    folder = write_shards(tmp_path / "absent")
    save_file({"c": LEAVES["a"]}, folder / "model-00001-of-00002.safetensors")
    refused(folder, "index and shard disagree")


def test_other_weights_beside_an_index(tmp_path):
    folder = write_shards(tmp_path / "both")
    save_file(LEAVES, folder / "consolidated.safetensors")
    source = open_source(folder)
    assert source.leaves.keys() == LEAVES.keys()
    assert "consolidated.safetensors" in source.notes[0]
    save_file(LEAVES, folder / "model.safetensors")
    refused(folder, "does not list model.safetensors")
    assert open_source(folder / "model.safetensors.index.json").leaves.keys() == LEAVES.keys()
    (folder / "other.safetensors.index.json").write_text((folder / "model.safetensors.index.json").read_text())
    refused(folder, "has 2 indexes")


def test_links_out_of_a_checkpoint_are_left_out(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(LEAVES, folder / "model.safetensors")
    (folder / "tokenizer.json").symlink_to("/etc/passwd")
    (tmp_path / "secret.json").write_text("{}")
    (folder / "vocab.json").symlink_to("../secret.json")
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").symlink_to("config.json")
    source = open_source(folder)
    assert [file.name for file in source.other_files] == ["config.json", "generation_config.json"]
    assert [note for note in source.notes if "tokenizer.json: is a symbolic link" in note]


def test_links_of_the_hub_cache_are_followed(tmp_path):
    snapshot, blobs = tmp_path / "models--o--m" / "snapshots" / "abc", tmp_path / "models--o--m" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file(LEAVES, blobs / "1")
    (blobs / "2").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/2")
    source = open_source(snapshot)
    assert source.leaves.keys() == LEAVES.keys()
    assert [file.name for file in source.other_files] == ["tokenizer.json"]
    (tmp_path / "link").symlink_to(snapshot)
    assert [file.name for file in open_source(tmp_path / "link").other_files] == ["tokenizer.json"]


@pytest.mark.parametrize(
    ("file", "match"),
    [
        ("pytorch_model.bin", "pickle.*AutoModelForCausalLM"),
        ("pytorch_model-00001-of-00002.bin", "pickle.*AutoModelForCausalLM"),
        ("step1/pytorch_model.bin", "pickle.*AutoModelForCausalLM"),
        ("flax_model.msgpack", "msgpack.*convert it"),
        ("params.npy", "NumPy"),
        ("__0_0.distcp", "DCP.*dcp_to_torch"),
        (".metadata", "DCP"),
        ("model-q4.gguf", "GGUF"),
        ("model.pt", "pickle.*torch.load"),
        ("model.ckpt", "pickle"),
        ("tf_model.h5", "Keras"),
        ("mp_rank_00_model_states.pt", "DeepSpeed.*zero_to_fp32"),
        ("global_step10/zero_pp_rank_0_mp_rank_00_model_states.pt", "DeepSpeed"),
        ("iter_0001000/mp_rank_00/model_optim_rng.pt", "Megatron"),
        ("mp_rank_00/model_optim_rng.pt", "Megatron"),
        ("model.nemo", "NeMo"),
    ],
)
def test_formats_that_are_not_read_are_named(tmp_path, file, match):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x80\x04")
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x04")
    (tmp_path / "optimizer.pt").write_bytes(b"\x80\x04")
    refused(tmp_path, match)
    if path.parent == tmp_path and path.suffix:
        refused(path, match)
