import dataclasses

import jax
import pytest

from pma_jax.config import Config, MeshConfig, ModelConfig, TrainingConfig
from pma_jax.model.decoder import init_params, parameter_count
from pma_jax.planning import aot, cost, counts, hlo
from pma_jax.runtime.mesh import AXES, make_mesh

L, B = 256, 8
MODEL = ModelConfig(vocabulary_size=512, width=64, layers=3, heads=4, kv_heads=2, head_dim=16, hidden=96)


def program(name, model, mesh=None):
    training = TrainingConfig(sequence_length_tokens=L, batch_size_sequences=B)
    config = Config(model=model, training=training)
    config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, batch_size_sequences=B))
    mesh = mesh or jax.make_mesh((1,) * len(AXES), AXES, devices=jax.devices()[:1])
    report = aot.compile_program(aot.program_lowerings(config, mesh)[name], mesh)
    assert report.out_of_memory_message is None and report.program is not None
    return report


@pytest.mark.parametrize("tied", [False, True])
def test_matrix_parameters_exclude_norms_embedding_and_output(tied):
    model = dataclasses.replace(MODEL, tie_embeddings=tied)
    with jax.set_mesh(jax.make_mesh((1,) * len(AXES), AXES, devices=jax.devices()[:1])):
        count = parameter_count(jax.eval_shape(lambda: init_params(model, jax.random.key(0))))
    norms = model.width * (2 * model.layers + 1)
    assert (
        cost.active_matrix_parameters(model) == count - norms - (1 if tied else 2) * model.vocabulary_size * model.width
    )


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "passes"), [("evaluation_step", 1), pytest.param("train_step", 3, marks=pytest.mark.slow)]
)
def test_analytic_flops_equal_the_compilers(name, passes, scan):
    """Compare parameters and output to the last FLOP, and attention within its bounds.

    Attention lies between the causal half and the full square: how much above the diagonal is computed and
    discarded is the kernel's choice. In the backward pass a kernel may also recompute the scores, one more than its
    four products there, at most 4/3 of three passes.
    """
    actual = counts.matmul_flops(program(name, dataclasses.replace(MODEL, scan_layers=scan)).program)
    parts = {part: flops * B * L * passes for part, flops in cost.forward_flops_per_token(MODEL, L).items()}
    attention = actual - parts["parameters"] - parts["output_projection"]
    assert parts["attention"] <= attention <= (1 if passes == 1 else 4 / 3) * 2 * parts["attention"]


@pytest.mark.slow
def test_remat_costs_one_more_forward_pass():
    plain, remat = (
        counts.matmul_flops(program("train_step", dataclasses.replace(MODEL, remat=remat)).program)
        for remat in ("none", "full")
    )
    blocks = (
        sum(flops for part, flops in cost.forward_flops_per_token(MODEL, L).items() if part != "output_projection")
        * B
        * L
    )
    # Except the last product of each block, whose result the backward pass does not need; attention's share as above.
    assert 0.7 * blocks < remat - plain < 1.2 * blocks


@pytest.mark.long
@pytest.mark.mesh
def test_mesh_divides_the_products():
    complete = counts.matmul_flops(program("train_step", MODEL).program)
    mesh = make_mesh(MeshConfig(2, 2, 2))
    part = program("train_step", MODEL, mesh)
    assert part.program.devices == 8
    assert 8 * counts.matmul_flops(part.program) == pytest.approx(complete, rel=1e-6)


def test_training_is_three_forward_passes():
    forward = cost.forward_flops_per_token(MODEL, L)
    assert cost.training_flops_per_token(MODEL, L) == 3 * sum(forward.values())
    # The rule of thumb of six FLOPs per parameter, for a model with little attention (Kaplan et al. 2020).
    large = ModelConfig(
        vocabulary_size=32_000, width=4096, layers=32, heads=32, kv_heads=32, head_dim=128, hidden=11_008
    )
    parameters = cost.active_matrix_parameters(large) + large.width * large.vocabulary_size
    assert cost.training_flops_per_token(large, 2048) == pytest.approx(6 * parameters, rel=0.05)


def test_roofline_is_the_slowest_of_three():
    chip = cost.CHIPS["tpu7x"]
    assert chip.devices == 2
    program = hlo.parse_hlo("""HloModule m, num_partitions=4

ENTRY %main (a: bf16[1024,1024]) -> bf16[1024,1024] {
  %a = bf16[1024,1024]{1,0} parameter(0)
  %b = bf16[1024,1024]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %c = bf16[1024,1024]{1,0} all-reduce(%b), replica_groups=[1,4]<=[4], to_apply=%add
}
""")
    actual = cost.roofline(program, chip)
    assert actual.compute_seconds == pytest.approx(2 * 1024**3 / (2307e12 / 2))
    # Read a twice and write b; read b and write c.
    assert actual.memory_seconds == pytest.approx(5 * 2 * 1024**2 / (7380e9 / 2))
    assert actual.network_seconds == pytest.approx(2 * 3 / 4 * 2 * 1024**2 / (600e9 / 2))
    assert actual.slice_network_seconds == 0
    assert (actual.seconds, actual.limit) == (actual.network_seconds, "network")
    slower = dataclasses.replace(actual, slice_network_seconds=1.0)
    assert (slower.seconds, slower.limit) == (1.0, "slice network")


def test_every_chip_gives_the_source_of_its_figures():
    for name, chip in cost.CHIPS.items():
        assert "cloud.google.com" in chip.source and chip.topologies
        assert all(
            f"{name}:" in known for known in (cost.format_known_topologies(), cost.format_known_topologies(name))
        )


@pytest.mark.parametrize("window", [0, 1, 3, 100])
def test_attention_counts_the_keys_visible_to_each_position(window):
    model = ModelConfig(layers=2, heads=3, head_dim=4, attention_window_tokens=window)
    seen = [sum(0 <= q - k < (window or 8) for k in range(8)) for q in range(8)]
    assert cost.forward_flops_per_token(model, 8)["attention"] == pytest.approx(2 * 3 * 4 * 4 * sum(seen) / 8)


def test_mixture_counts_the_experts_used_per_token():
    dense = dataclasses.replace(MODEL, hidden=96)
    mixture = dataclasses.replace(MODEL, experts=8, experts_per_token=2, expert_hidden=32, shared_experts=1)
    router = MODEL.layers * MODEL.width * 8
    assert cost.active_matrix_parameters(mixture) == cost.active_matrix_parameters(dense) + router
