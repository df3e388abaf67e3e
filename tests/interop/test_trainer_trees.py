"""Export of MaxText's and levanter's trees, compared with the trainers' rules in float64 and their own converters."""

import itertools
import json
from types import SimpleNamespace

import hf_models
import numpy as np
import pytest
import trainer_models
from hf_models import read_hf_tensors
from trainer_models import (
    levanter_model,
    maxtext_expected,
    maxtext_layers,
    maxtext_tree,
    save_levanter,
    save_maxtext,
    write_config,
)

from pma_jax.cli import main
from pma_jax.config.errors import UserError
from pma_jax.data.tokenizer import byte_tokenizer
from pma_jax.interop import hf, levanter, maxtext
from pma_jax.interop.hf_weights import map_leaves
from pma_jax.merging.from_storage import merge

KINDS = ("llama", "llama tied", "llama, one key head", "qwen3", "qwen3 tied", "mixture", "mixture tied")
MAXTEXT_KINDS = tuple(kind for kind in KINDS if kind != "mixture tied")  # whose router is not normalised
LLAMA = {"decoder_block": "llama2", "rope_type": "default"}
FORMS = ("scanned", "unscanned", "nnx")


def test_map_of_names_is_complete():
    """Test that each leaf of the decoder has one array in either tree, so that no weight is left out."""
    for kind in KINDS:
        made = hf_models.model(kind)
        expected = {name for mapping in map_leaves(made) for name in mapping.tensor_names}
        settings = {"decoder_block": "qwen3", "rope_type": "default", "normalize_embedding_logits": "false"}
        if made.router_normalized:
            arrays, _ = maxtext.list_arrays({}, made, settings)
            assert {name for array in arrays for name in array.tensor_names} == expected
        assert {name for array in levanter.list_arrays({}, made) for name in array.tensor_names} == expected


def export_maxtext(folder, made, tree, **settings):
    """Save, export and read back a tree; the settings are keys of MaxText."""
    save_maxtext(folder / "maxtext", tree)
    config = write_config(folder / "config.json", made)
    needed = {"normalize_embedding_logits": "false"} if made.tie_embeddings else {}
    needed |= {} if made.qk_norm else {"decoder_block": "llama2"}
    hf.export_snapshot(folder / "maxtext", folder / "theirs", model_config=config, maxtext_settings=needed | settings)
    return read_hf_tensors(folder / "theirs")


def assert_tensors(actual, expected):
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name].astype(np.float64), values, rtol=2e-7, err_msg=name)
        assert actual[name].shape == values.shape


# All kinds in one form, and one kind in all forms; the product of both is slow.
QUICK_MAXTEXT = {(kind, "default", "scanned") for kind in MAXTEXT_KINDS} | {
    ("qwen3", "llama3.1", form) for form in FORMS
}


@pytest.mark.parametrize(
    ("kind", "rope_type", "form"),
    [
        case if case in QUICK_MAXTEXT else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(MAXTEXT_KINDS, ("default", "llama3.1"), FORMS)
    ],
)
def test_maxtext_is_exported_by_its_rules(tmp_path, kind, rope_type, form):
    made = hf_models.model(kind)
    top, layers = maxtext_layers(made)
    actual = export_maxtext(tmp_path, made, maxtext_tree(top, layers, form), rope_type=rope_type)
    assert_tensors(actual, maxtext_expected(made, top, layers, rope_type))


@pytest.mark.parametrize("is_stacked", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_levanter_is_exported_by_its_rules(tmp_path, kind, is_stacked):
    made = hf_models.model(kind)
    leaves, expected = levanter_model(made, is_stacked=is_stacked)
    saved = save_levanter(tmp_path, leaves)
    hf.export_snapshot(saved, tmp_path / "theirs", model_config=write_config(tmp_path / "config.json", made))
    actual = read_hf_tensors(tmp_path / "theirs")
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, err_msg=name, strict=True)


def rotate_pairs(x_LxNxH, theta):
    """Rotate the pairs (2i, 2i + 1) of each head, as complex numbers."""
    L, _, H = x_LxNxH.shape
    angle_Lxh = np.arange(L)[:, None] * theta ** (-np.arange(0, H, 2) / H)
    rotated = (x_LxNxH[..., ::2] + 1j * x_LxNxH[..., 1::2]) * np.exp(1j * angle_Lxh)[:, None]
    return np.stack([rotated.real, rotated.imag], axis=-1).reshape(x_LxNxH.shape)


def maxtext_logits(made, top, layers, tokens_L):
    """Compute a dense model of MaxText in float64: rotary pairs side by side, and Llama's queries not scaled."""
    H, G = made.head_dim, made.heads // made.kv_heads

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + made.norm_epsilon) * scale

    x_LxD = top["token_embedder/embedding"][tokens_L].astype(np.float64)
    mask_LxL = np.where(np.tri(len(tokens_L)), 0, -np.inf)
    for layer in layers:
        y_LxD = norm(x_LxD, layer["pre_self_attention_layer_norm/scale"])
        q, k, v = (
            np.einsum("ld,dnh->lnh", y_LxD, layer[f"self_attention/{name}/kernel"])
            for name in ("query", "key", "value")
        )
        if made.qk_norm:
            q = norm(q, layer["self_attention/query_norm/scale"])
            k = norm(k, layer["self_attention/key_norm/scale"])
        q, k = rotate_pairs(q, made.rope_theta), rotate_pairs(k, made.rope_theta)
        q = q * H**-0.5 if made.qk_norm else q
        scores = np.einsum("lnh,mnh->nlm", q, np.repeat(k, G, axis=1)) + mask_LxL
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("nlm,mnh->lnh", weights, np.repeat(v, G, axis=1))
        x_LxD = x_LxD + np.einsum("lnh,nhd->ld", attended, layer["self_attention/out/kernel"])
        y_LxD = norm(x_LxD, layer["post_self_attention_layer_norm/scale"])
        gate = y_LxD @ layer["mlp/wi_0/kernel"]
        x_LxD = x_LxD + (gate / (1 + np.exp(-gate)) * (y_LxD @ layer["mlp/wi_1/kernel"])) @ layer["mlp/wo/kernel"]
    x_LxD = norm(x_LxD, top["decoder/decoder_norm/scale"])
    if made.tie_embeddings:
        return x_LxD @ top["token_embedder/embedding"].T / np.sqrt(made.width)  # normalize_embedding_logits
    return x_LxD @ top["decoder/logits_dense/kernel"]


@pytest.mark.parametrize("kind", ["llama", "llama tied", "qwen3", "qwen3 tied"])
def test_export_computes_what_maxtext_does(tmp_path, kind):
    made = hf_models.model(kind)
    top, layers = maxtext_layers(made)
    settings = {"rope_type": "llama3.1"} | ({"normalize_embedding_logits": "true"} if made.tie_embeddings else {})
    export_maxtext(tmp_path, made, maxtext_tree(top, layers, "scanned"), **settings)
    hf.import_model(tmp_path / "theirs", tmp_path / "ours")
    expected = np.stack([maxtext_logits(made, top, layers, tokens_L) for tokens_L in hf_models.TOKENS])
    hf_models.assert_logits(hf_models.pma_logits(tmp_path / "ours"), expected)


def test_queries_of_qwens_blocks_are_not_scaled(tmp_path):
    made = hf_models.model("llama")
    top, layers = maxtext_layers(made)
    tree = maxtext_tree(top, layers, "scanned")
    actual = export_maxtext(tmp_path, made, tree, rope_type="default", decoder_block="qwen2")
    for number, layer in enumerate(layers):
        expected = np.concatenate([*np.moveaxis(layer["self_attention/query/kernel"], 0, -1)])
        np.testing.assert_array_equal(actual[f"model.layers.{number}.self_attn.q_proj.weight"], expected)


def test_scaled_queries_are_rounded_once(tmp_path):
    made = hf_models.model("llama")
    top, layers = maxtext_layers(made, dtype="bfloat16")
    actual = export_maxtext(tmp_path, made, maxtext_tree(top, layers, "scanned"), rope_type="default")
    expected = maxtext_expected(made, top, layers, "default")
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values.astype(np.float32).astype(actual[name].dtype), err_msg=name)
        assert actual[name].dtype == "bfloat16"


def test_merge_of_maxtext_is_exported_by_the_command(tmp_path, capsys):
    made = hf_models.model("qwen3 tied")
    models = [maxtext_layers(made, seed) for seed in (0, 1)]
    for number, (top, layers) in enumerate(models):
        save_maxtext(tmp_path / "run", maxtext_tree(top, layers, "scanned"), 100 + number)
    merge([tmp_path / "run" / "100", tmp_path / "run" / "101"], [0.5, 0.5], tmp_path / "merged")
    config = write_config(tmp_path / "config.json", made, eos_token_id=3)
    arguments = ["export", str(tmp_path / "merged"), "--out", str(tmp_path / "theirs"), "--model-config", str(config)]
    arguments += ["--maxtext", "rope_type=default", "--maxtext", "normalize_embedding_logits=true"]
    assert main(arguments) == 0
    assert "divided by the root of the width" in capsys.readouterr().err
    first, second = (maxtext_expected(made, *model, "default", normalize=True) for model in models)
    expected = {name: (first[name] + second[name]) / 2 for name in first}
    actual = read_hf_tensors(tmp_path / "theirs")
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=1e-6, atol=1e-7, err_msg=name)
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert written["architectures"] == ["Qwen3ForCausalLM"] and written["eos_token_id"] == 3
    assert written["rope_theta"] == made.rope_theta and written["max_position_embeddings"] == 64


# --- The trainers' own converters, where they are installed -----------------------------------------------------------


@pytest.mark.parametrize("form", ["scanned", "unscanned"])
@pytest.mark.parametrize(
    ("kind", "model_name"),
    [("llama", "llama3.1-8b"), ("qwen3", "qwen3-8b"), ("qwen3 tied", "qwen3-0.6b"), ("mixture", "qwen3-30b-a3b")],
)
def test_export_equals_maxtexts_converter(tmp_path, kind, model_name, form):
    mapping = pytest.importorskip("maxtext.checkpoint_conversion.utils.param_mapping")
    shapes = pytest.importorskip("maxtext.checkpoint_conversion.utils.hf_shape").HF_SHAPE
    process = pytest.importorskip("maxtext.checkpoint_conversion.utils.utils").process_maxtext_param
    made = hf_models.model(kind)
    top, layers = maxtext_layers(made)
    tree = maxtext_tree(top, layers, form)
    rope_type = "llama3.1" if kind == "llama" else "default"
    actual = export_maxtext(tmp_path, made, tree, rope_type=rope_type)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    scanned = form == "scanned"
    names = mapping.PARAM_MAPPING[model_name](config, None, scanned)
    hooks = mapping.HOOK_FNS[model_name](config, None, scanned, saving_to_hf=True)
    settings = SimpleNamespace(scan_layers=scanned, param_scan_axis=1, weight_dtype="float32")
    expected = {}

    def visit(node, path):
        for key, value in node.items():
            if isinstance(value, dict):
                visit(value, [*path, key])
            else:
                name = "-".join(["params", *path, key])
                expected.update(process(name, value, names, hooks, shapes[model_name](config), settings))

    visit(tree["params"]["params"], [])
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], np.asarray(values), err_msg=name, strict=True)


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("kind", ["llama", "llama tied", "qwen3", "mixture"])
def test_export_equals_levanters_converter(tmp_path, kind, scan_layers):
    llama = pytest.importorskip("levanter.models.llama")
    qwen = pytest.importorskip("levanter.models.qwen")
    mixture = pytest.importorskip("levanter.models.qwen3_moe")
    haliax = pytest.importorskip("haliax")
    serialization = pytest.importorskip("levanter.tensorstore_serialization")
    import jax
    from haliax.state_dict import to_torch_compatible_state_dict

    made = hf_models.model(kind)
    keys = {
        "max_seq_len": 64,
        "hidden_dim": made.width,
        "intermediate_dim": made.hidden,
        "num_layers": made.layers,
        "num_heads": made.heads,
        "num_kv_heads": made.kv_heads,
        "head_dim": made.head_dim,
        "tie_word_embeddings": made.tie_embeddings,
        "scan_layers": scan_layers,
        "use_qk_norm": made.qk_norm,
    }
    if made.experts:
        keys |= {"num_experts": made.experts, "num_experts_per_tok": made.experts_per_token}
        config = mixture.Qwen3MoeConfig(**keys, moe_intermediate_dim=made.expert_hidden)
    else:
        config = (qwen.Qwen3Config if made.qk_norm else llama.LlamaConfig)(**keys)
    vocabulary = haliax.Axis("vocab", made.vocabulary_size)
    model = config.model_type.init(vocabulary, config, key=jax.random.key(0))
    expected = {name: np.asarray(values) for name, values in to_torch_compatible_state_dict(model).items()}
    path = tmp_path / "step-100"
    serialization.tree_serialize_leaves_tensorstore(str(path), {"model": model})
    (path / "metadata.json").write_text(json.dumps({"step": 100, "timestamp": "", "is_temporary": False}))
    hf.export_snapshot(path, tmp_path / "theirs", model_config=write_config(tmp_path / "config.json", made))
    actual = read_hf_tensors(tmp_path / "theirs")
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, err_msg=name, strict=True)


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("llama", {}, "depend on rope_type"),
        ("llama", {"rope_type": "default"}, "depend on decoder_block"),
        ("qwen3", {"rope_type": "default", "decoder_block": "llama2"}, "has no norms of queries, but Qwen3 has"),
        ("qwen3 tied", {"rope_type": "default"}, "depend on normalize_embedding_logits"),
        ("llama", {"rope_type": "yarn"}, "--maxtext rope_type=yarn: is not supported"),
        ("llama", {"rope": "default"}, "--maxtext rope: is not one of decoder_block, rope_type"),
        ("mixture tied", {"rope_type": "default", "normalize_embedding_logits": "true"}, "norm_topk_prob is false"),
    ],
)
def test_settings_of_maxtext_are_not_guessed(tmp_path, kind, settings, message):
    made = hf_models.model(kind)
    saved = save_maxtext(tmp_path / "maxtext", maxtext_tree(*maxtext_layers(made), "scanned"))
    config = write_config(tmp_path / "config.json", made)
    with pytest.raises(UserError, match=message):
        hf.export_snapshot(saved, tmp_path / "out", model_config=config, maxtext_settings=settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"hidden_act": None}, "hidden_act is missing"),
        ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling has the type 'llama3'"),
        ({"num_attention_heads": 2, "head_dim": 16}, "has shape"),
        ({"num_key_value_heads": 4}, "has shape"),
        ({"num_hidden_layers": 2}, "has shape"),
        ({"vocab_size": 250}, "has shape"),
        ({"tie_word_embeddings": True}, "lm_head/weight is unexpected"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "q_norm/weight is missing"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "architectures is MistralForCausalLM"),
    ],
)
def test_config_that_is_incomplete_or_does_not_fit_is_refused(tmp_path, fields, message):
    made = hf_models.model("llama")
    saved = save_levanter(tmp_path, levanter_model(made)[0])
    config = write_config(tmp_path / "config.json", made, **fields)
    with pytest.raises(UserError, match=message) as raised:
        hf.export_snapshot(saved, tmp_path / "out", model_config=config)
    assert "\n" not in str(raised.value) and not (tmp_path / "out").exists()


def test_options_that_do_not_fit_the_checkpoint_are_refused(tmp_path, finished, capsys):
    made = hf_models.model("llama")
    config = write_config(tmp_path / "config.json", made)
    saved = save_levanter(tmp_path, levanter_model(made)[0])
    with pytest.raises(UserError, match="pass it with --model-config"):
        hf.export_snapshot(saved, tmp_path / "out")
    with pytest.raises(UserError, match="is levanter's: leave out --maxtext"):
        hf.export_snapshot(saved, tmp_path / "out", model_config=config, maxtext_settings={"rope_type": "default"})
    with pytest.raises(UserError, match="leave out --model-config"):
        hf.export_snapshot(finished.path, tmp_path / "out", model_config=config)
    assert main(["export", str(saved), "--out", str(tmp_path / "out"), "--maxtext", "rope_type"]) == 2
    twice = ["--maxtext", "rope_type=default", "--maxtext", "rope_type=llama3.1"]
    assert main(["export", str(saved), "--out", str(tmp_path / "out"), *twice]) != 0
    assert "a key is given twice" in capsys.readouterr().err


def test_biases_and_further_arrays_are_refused(tmp_path):
    made = hf_models.model("llama")
    top, layers = maxtext_layers(made)
    for layer in layers:
        layer["self_attention/query/bias"] = np.zeros((made.heads, made.head_dim), np.float32)
    saved = save_maxtext(tmp_path / "maxtext", maxtext_tree(top, layers, "unscanned"))
    config = write_config(tmp_path / "config.json", made)
    with pytest.raises(UserError, match=r"query\.bias is unexpected"):
        hf.export_snapshot(saved, tmp_path / "out", model_config=config, maxtext_settings=LLAMA)


def test_dim_of_the_layers_that_is_not_known_is_refused(tmp_path):
    made = hf_models.model("llama")
    square = trainer_models.ModelConfig(**(vars(made) | {"layers": made.width}))
    saved = save_maxtext(tmp_path / "maxtext", maxtext_tree(*maxtext_layers(square), "scanned"))
    config = write_config(tmp_path / "config.json", square)
    with pytest.raises(UserError, match="the width is the number of layers"):
        hf.export_snapshot(saved, tmp_path / "out", model_config=config, maxtext_settings=LLAMA)


def test_tokenizer_is_the_one_that_is_named(tmp_path, monkeypatch, capsys):
    made = hf_models.model("llama")
    saved = save_levanter(tmp_path, levanter_model(made)[0])
    config = write_config(tmp_path / "config.json", made)
    byte_tokenizer().save(tmp_path / "tokenizer.json")
    monkeypatch.chdir(tmp_path)  # whose tokenizer.json is not taken by chance
    result = hf.export_snapshot(saved, tmp_path / "without", model_config=config)
    assert not result["tokenizer"] and any("no tokenizer is written" in note for note in result["notes"])
    arguments = ["export", str(saved), "--model-config", str(config), "--tokenizer", "tokenizer.json"]
    assert main([*arguments, "--out", str(tmp_path / "with")]) == 0
    assert (
        json.loads((tmp_path / "with" / "tokenizer_config.json").read_text())["tokenizer_class"]
        == "PreTrainedTokenizerFast"
    )
