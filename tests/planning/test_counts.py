from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from pma_jax.planning import counts, hlo

# Recorded from XLA for TPU (v5e:2x2): each of five scan steps gathers a [1024, 1024] bfloat16 matrix along an axis of 2
# devices and multiplies a device's 256 rows by it; then all 4 devices sum.
RECORDED = (Path(__file__).parent / "tpu_program.txt").read_text()

# How XLA for TPU compiles a gather that overlaps products, and a sum of which each device keeps a part.
SPREAD = """HloModule spread, num_partitions=8

%start (p.0: bf16[1,16]) -> (bf16[1,16], bf16[4,16]) {
  %p.0 = bf16[1,16]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[4,16]{1,0:T(8,128)(2,1)} all-gather(%p.0), channel_id=7, replica_groups=[2,4]<=[8]
  ROOT %call.1 = (bf16[1,16]{1,0}, bf16[4,16]{1,0}) custom-call(%all-gather.1), custom_call_target="Start"
}

%done (p.1: bf16[1,16], p.2: bf16[4,16]) -> bf16[4,16] {
  %p.1 = bf16[1,16]{1,0} parameter(0)
  %p.2 = bf16[4,16]{1,0} parameter(1)
  %all-gather.2 = bf16[4,16]{1,0} all-gather(%p.1), channel_id=7, replica_groups=[2,4]<=[8]
  ROOT %call.2 = bf16[4,16]{1,0} custom-call(%p.1, %p.2, %all-gather.2), custom_call_target="Done"
}

%all-reduce-scatter (p.3: f32[64]) -> f32[8] {
  %p.3 = f32[64]{0} parameter(0)
  %all-reduce.1 = f32[64]{0} all-reduce(%p.3), channel_id=9, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %constant.1 = s32[] constant(0)
  ROOT %dynamic-slice.1 = f32[8]{0} dynamic-slice(%all-reduce.1, %constant.1), dynamic_slice_sizes={8}
}

ENTRY %main (a: bf16[1,16], b: f32[64]) -> (bf16[4,16], f32[8]) {
  %a = bf16[1,16]{1,0} parameter(0)
  %b = f32[64]{0} parameter(1)
  %fusion.1 = (bf16[1,16]{1,0}, bf16[4,16]{1,0}) fusion(%a), kind=kCustom, calls=%start
  %get-tuple-element.1 = bf16[1,16]{1,0} get-tuple-element(%fusion.1), index=0
  %get-tuple-element.2 = bf16[4,16]{1,0} get-tuple-element(%fusion.1), index=1
  %fusion.2 = bf16[4,16]{1,0} fusion(%get-tuple-element.1, %get-tuple-element.2), kind=kCustom, calls=%done
  %fusion.3 = f32[8]{0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter
  ROOT %tuple.1 = (bf16[4,16]{1,0}, f32[8]{0}) tuple(%fusion.2, %fusion.3)
}
"""


def one_instruction(line, devices=16):
    """Return a program of one line that operates on its parameters."""
    return hlo.parse_hlo(f"""HloModule one, num_partitions={devices}

ENTRY %main (a: f32[8,4], b: f32[4,6]) -> f32[8,6] {{
  %a = f32[8,4]{{1,0}} parameter(0)
  %b = f32[4,6]{{1,0}} parameter(1)
  ROOT {line}
}}
""")


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile()


def on(mesh, shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))


def test_program_recorded_for_tpu():
    program = hlo.parse_hlo(RECORDED)
    assert (program.devices, hlo.loop_trip_counts(program)) == (4, [5])
    gather, total = counts.collectives(program)
    assert gather == counts.Collective("all-gather", 1024 * 1024 * 2, 2, 5)
    assert gather.sent_bytes_per_execution == 512 * 1024 * 2
    assert total == counts.Collective("all-reduce", 4, 4, 1)
    assert counts.matmul_flops(program) == 5 * 2 * 256 * 1024 * 1024
    # The rows and, five times, a slice of the stacked matrices come from HBM; all but scalars then stays in VMEM.
    assert counts.memory_traffic_bytes(program) == pytest.approx(256 * 1024 * 2 + 5 * 512 * 1024 * 2, abs=200)


def test_gather_spread_over_fusions_counts_once_and_a_sliced_sum_is_a_scatter():
    gather, scatter = counts.collectives(hlo.parse_hlo(SPREAD))
    assert gather == counts.Collective("all-gather", 4 * 16 * 2, 4, 1)
    assert scatter == counts.Collective("reduce-scatter", 64 * 4, 8, 1)
    assert scatter.sent_bytes_per_execution == 64 * 4 * 7 / 8


def test_collective_on_another_core_of_the_chip_is_counted():
    # XLA for TPU7x runs collectives on the chip's SparseCores.
    (actual,) = counts.collectives(
        hlo.parse_hlo("""HloModule offloaded, num_partitions=8

%called (p: bf16[1,16], t: token[]) -> bf16[4,16] {
  %t = token[] parameter(1)
  %p = bf16[1,16]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[4,16]{1,0} all-gather(%p), channel_id=60, replica_groups=[2,4]<=[8], dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (a: bf16[1,16]) -> bf16[4,16] {
  %a = bf16[1,16]{1,0} parameter(0)
  %t0 = token[] after-all()
  %start = ((bf16[1,16], token[]), bf16[4,16]) call-start(%a, %t0), async_execution_thread="s", to_apply=%called
  ROOT %done = bf16[4,16]{1,0} call-done(%start)
}
""")
    )
    assert actual == counts.Collective("all-gather", 4 * 16 * 2, 4, 1)


@pytest.mark.parametrize(
    ("groups", "first", "count"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", [0, 1, 2, 3], 2),
        ("[4,4]<=[16]", [0, 1, 2, 3], 4),
        ("[2,8]<=[4,4]T(1,0)", [0, 4, 8, 12, 1, 5, 9, 13], 2),
        ("mesh['axis_0'=4,'axis_1'=4] {'axis_1'}", [0, 1, 2, 3], 4),
        ("mesh['axis_0'=4,'axis_1'=4] {'axis_0'}", [0, 4, 8, 12], 4),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=8], device_ids=([2,8]T(1,0)) {'axis_0'}", [0, 4], 8),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=8], device_ids=([2,8]T(1,0)) {'axis_0','axis_2'}", None, 1),
        ("mesh['x'=16] {'x':(2)4}", [0, 2, 4, 6], 4),
        (
            "mesh['x'=2,'y'=8], device_ids=(0,8,1,9,2,10,3,11,4,12,5,13,6,14,7,15) {'x'}",
            [0, 4],
            8,
        ),
        ("{}", list(range(16)), 1),
    ],
)
def test_groups_of_a_collective(groups, first, count):
    line = f"%r = f32[8,4]{{1,0}} all-reduce(%a), channel_id=1, replica_groups={groups}, to_apply=%add"
    (actual,) = counts.collectives(one_instruction(line))
    assert actual.groups.shape == (count, actual.group_devices)
    assert first is None or actual.groups[0].tolist() == first
    assert np.unique(actual.groups).size == actual.groups.size
    assert actual == counts.Collective("all-reduce", 8 * 4 * 4, actual.group_devices, 1)


def test_collectives_between_ranges_of_the_devices():
    line = "%r = f32[8,4]{{1,0}} {}"
    inside, across = (
        one_instruction(line.format(call))
        for call in (
            "all-reduce(%a), replica_groups=[4,4]<=[16], to_apply=%add",
            "collective-permute(%a), source_target_pairs={{0,4},{4,0}}",
        )
    )
    assert counts.crossing(inside, 4) == [] and len(counts.crossing(inside, 8)) == 1
    assert len(counts.crossing(across, 4)) == 1 and counts.crossing(across, 2) == []


@pytest.mark.parametrize(
    ("line", "kind", "payload"),
    [
        ("%r = (f32[8,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%a), replica_groups=[4,4]<=[16]", "all-gather", 512),
        ("%r = f32[8,4]{1,0} all-reduce-start(%a), replica_groups=[4,4]<=[16]", "all-reduce", 128),
        ("%r = f32[2,4]{1,0} reduce-scatter(%a), replica_groups=[4,4]<=[16]", "reduce-scatter", 128),
        ("%r = f32[8,4]{1,0} all-to-all(%a), replica_groups=[4,4]<=[16]", "all-to-all", 128),
        ("%r = f32[8,4]{1,0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}", "collective-permute", 128),
    ],
)
def test_bytes_of_a_collective(line, kind, payload):
    (actual,) = counts.collectives(one_instruction(line))
    assert (actual.kind, actual.payload_bytes) == (kind, payload)


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("%r = f32[8,6]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2 * 8 * 4 * 6),
        ("%r = f32[8,6]{1,0} convolution(%a, %b), dim_labels=bf_io->bf", 2 * 8 * 4 * 6),
        ("%r = f32[8,6]{1,0} multiply(%a, %a)", 0),
    ],
)
def test_flops_of_an_instruction(line, count):
    assert counts.matmul_flops(one_instruction(line)) == count


@pytest.mark.parametrize(("config", "expected"), [('{"cost_estimate":{"flops":"77"}}', (77, 0)), ("{}", (0, 1))])
def test_declared_and_undeclared_kernel_flops_are_counted_separately(config, expected):
    line = f'%r = f32[8,6]{{1,0}} custom-call(%a), custom_call_target="tpu_custom_call", backend_config={config}'
    program = one_instruction(line)
    assert counts.count_kernels(program) == counts.KernelCounts(*expected) and counts.matmul_flops(program) == 0


def test_flops_of_a_batched_product_written_as_a_dilated_convolution():
    # From a decoder's attention on TPU: scores of 2 x 16 heads, [1024, 128] times [128, 1024]. XLA for TPU writes it
    # with a window over the batch, of which one element in 2 x 16 is real.
    window = "window={size=2x16 stride=1x15 lhs_dilate=2x16}"
    program = hlo.parse_hlo(f"""HloModule scores, num_partitions=1

ENTRY %main (q: bf16[2,16,1024,128], k: bf16[2,16,128,1024]) -> f32[2,16,1024,1024] {{
  %q = bf16[2,16,1024,128] parameter(0)
  %k = bf16[2,16,128,1024] parameter(1)
  ROOT %c = f32[2,16,1024,1024] convolution(%q, %k), {window}, dim_labels=01bf_01io->01bf
}}
""")
    assert counts.matmul_flops(program) == 2 * (2 * 16) * 1024 * 128 * 1024


@pytest.mark.mesh
def test_collectives_of_a_compilation_for_eight_devices():
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    with jax.set_mesh(mesh):
        x, w = on(mesh, (16, 64), P("x", "y")), on(mesh, (64, 32), P("y", None))
        both = compiled(lambda x, w: jnp.einsum("sd,de->se", x, w, out_sharding=P("x", None)), x, w).as_text()
        complete = compiled(lambda x: jax.reshard(x, P("x", None)), x).as_text()
    # A sum over the 4 devices of `y` of products [8, 32]; a gather of [8, 64].
    assert counts.collectives(hlo.parse_hlo(both)) == [counts.Collective("all-reduce", 8 * 32 * 4, 4, 1)]
    assert counts.matmul_flops(hlo.parse_hlo(both)) == 2 * 8 * 16 * 32
    assert counts.collectives(hlo.parse_hlo(complete)) == [counts.Collective("all-gather", 8 * 64 * 4, 4, 1)]


@pytest.mark.mesh
def test_collective_in_a_loop_counts_once_per_iteration():
    mesh = jax.make_mesh((8,), ("x",))

    def part(x):
        def body(c, _):
            return jax.lax.psum(jnp.sin(c), "x") / 8, None

        y = jax.lax.scan(body, x, None, length=7)[0]
        return jax.lax.psum_scatter(y, "x", tiled=True), jax.lax.ppermute(y, "x", [(i, (i + 1) % 8) for i in range(8)])

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(part, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        program = hlo.parse_hlo(compiled(mapped, on(mesh, (8 * 16, 3), P("x"))).as_text())
    actual = {c.kind: c for c in counts.collectives(program)}
    assert hlo.loop_trip_counts(program) == [7]
    assert actual["all-reduce"] == counts.Collective("all-reduce", 16 * 3 * 4, 8, 7)
    assert actual["reduce-scatter"] == counts.Collective("reduce-scatter", 16 * 3 * 4, 8, 1)
    assert (
        actual["collective-permute"].payload_bytes
        == actual["collective-permute"].sent_bytes_per_execution
        == 16 * 3 * 4
    )


def test_flops_equal_the_compilers_without_loops_and_include_every_iteration():
    def chain(x, w, length, unroll):
        return jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=length, unroll=unroll)[0]

    x, w = np.ones((128, 64), np.float32), np.ones((64, 64), np.float32)
    rolled, unrolled = (compiled(lambda x, w, u=u: chain(x, w, 6, u), x, w) for u in (1, 6))
    one = 2 * 128 * 64 * 64
    assert (
        counts.matmul_flops(hlo.parse_hlo(rolled.as_text()))
        == counts.matmul_flops(hlo.parse_hlo(unrolled.as_text()))
        == 6 * one
    )
    # The compiler counts the loop's body once, which is why its figure is not used.
    assert unrolled.cost_analysis()["flops"] == pytest.approx(6 * one, rel=1e-3)
    assert rolled.cost_analysis()["flops"] == pytest.approx(one, rel=1e-3)


def test_bytes_of_an_element_wise_program_are_those_of_its_arrays():
    x = np.ones((1000, 64), np.float32)
    program = hlo.parse_hlo(compiled(lambda a, b: jnp.sin(a) * b + 1, x, x).as_text())
    assert counts.memory_traffic_bytes(program) == 3 * x.nbytes


def test_slice_costs_the_bytes_it_takes():
    stack = np.ones((50, 64, 64), np.float32)
    program = hlo.parse_hlo(
        compiled(lambda s: jax.lax.scan(lambda c, x: (c + x * 2, None), s[0] * 0, s)[0], stack).as_text()
    )
    matrix = 64 * 64 * 4
    # Each of 50 steps reads a matrix and the sum, and writes the sum.
    assert 50 * 3 * matrix <= counts.memory_traffic_bytes(program) <= 55 * 3 * matrix


LOOP = """HloModule loop, num_partitions=1

%body (s: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %s = (s32[], f32[4,4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[4,4] get-tuple-element(%s), index=1
  %step = s32[] constant(STEP)
  %next = s32[] add(%i, %step)
  %y = f32[4,4] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[4,4]) tuple(%next, %y)
}

%condition (c: (s32[], f32[4,4])) -> pred[] {
  %c = (s32[], f32[4,4]) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %limit = s32[] constant(9)
  ROOT %less = pred[] compare(%j, %limit), direction=DIRECTION
}

ENTRY %main (a: f32[4,4], n: s32[]) -> (s32[], f32[4,4]) {
  %a = f32[4,4] parameter(0)
  %n = s32[] parameter(1)
  %two = s32[] constant(2)
  %first = s32[] copy(%two)
  %start = (s32[], f32[4,4]) tuple(%FIRST, %a)
  ROOT %loop = (s32[], f32[4,4]) while(%start), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(
    ("changes", "trips"),
    [
        ({"STEP": "1", "DIRECTION": "LT", "FIRST": "first"}, 7),
        ({"STEP": "2", "DIRECTION": "LT", "FIRST": "first"}, 4),
        ({"STEP": "0", "DIRECTION": "LT", "FIRST": "first"}, None),
        ({"STEP": "-1", "DIRECTION": "LT", "FIRST": "first"}, None),
        ({"STEP": "1", "DIRECTION": "GT", "FIRST": "first"}, None),
        ({"STEP": "1", "DIRECTION": "LT", "FIRST": "n"}, None),
    ],
)
def test_unknown_trip_count_is_not_guessed(changes, trips):
    text = LOOP
    for word, value in changes.items():
        text = text.replace(word, value)
    program = hlo.parse_hlo(text)
    assert hlo.loop_trip_counts(program) == [trips]
    assert counts.matmul_flops(program) == (trips or 1) * 2 * 4**3


CONDITION = """HloModule condition, num_partitions=2

%much (a.1: f32[4,4]) -> f32[4,4] {
  %a.1 = f32[4,4] parameter(0)
  %y.1 = f32[4,4] dot(%a.1, %a.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %k.1 = f32[4,4] custom-call(%y.1), custom_call_target="tpu_custom_call", backend_config={}
  ROOT %s.1 = f32[4,4] all-reduce(%k.1), replica_groups=[1,2]<=[2], to_apply=%add
}

%little (a.2: f32[4,4]) -> f32[4,4] {
  %a.2 = f32[4,4] parameter(0)
  ROOT %y.2 = f32[4,4] dot(%a.2, %a.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (p: s32[], a: f32[4,4]) -> f32[4,4] {
  %p = s32[] parameter(0)
  %a = f32[4,4] parameter(1)
  ROOT %r = f32[4,4] conditional(%p, %a, %a), branch_computations={%much, %little}
}
"""


def test_conditional_counts_its_shortest_branch():
    program = hlo.parse_hlo(CONDITION)
    assert counts.matmul_flops(program) == 2 * 4**3
    assert counts.collectives(program) == [] and counts.count_kernels(program) == counts.KernelCounts(0, 0)
    assert counts.memory_traffic_bytes(program) == 3 * 4**2 * 4
