"""The most expensive operations of a step, from a trace of JAX's profiler (TensorBoard is not needed)."""

import collections
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

# Kind -> pattern of the name of a kernel or its HLO instruction; the first match applies. nvjet is a name of cuBLAS.
KINDS = {
    "attention": r"fmha|flash|cudnn.*(attention|sdpa)|sdpa",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|matmul|mosaic_gpu",
    "collectives": r"nccl|all-reduce|all-gather|reduce-scatter|all-to-all|collective",
    "copies": r"memcpy|memset|copy|transpose|dynamic-(update-)?slice",
    "fusions and the rest": r"",
}


def top_costs(run: Callable[[], Any], steps: int, hlo: str, count: int = 15) -> dict[str, Any]:
    """Trace `run` and sum up its operations.

    Args:
        run: Function that runs `steps` steps and waits for them; it must have run before, so that nothing compiles.
        steps: Number of steps of `run`, by which times are divided.
        hlo: Text of the compiled program, which names the source of each instruction.
        count: Number of operations to list.

    Returns:
        `busy_seconds_per_step` (sum over device threads or streams), `kinds` (kind -> share of the busy time), and
        `top`: the most expensive operations, with seconds and calls per step, share, and source.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        traces = sorted(Path(folder).rglob("*.xplane.pb"))
        assert len(traces) == 1, f"{len(traces)} traces were written, not one"
        data = jax.profiler.ProfileData.from_file(str(traces[0]))
        spent = sum_operations(data)
    if not spent:
        raise RuntimeError("the trace contains no device operation")
    total = sum(seconds for seconds, _ in spent.values())
    sources = dict(re.findall(r'%?([\w.\-]+) = [^\n]*?op_name="([^"]*)"', hlo))
    kinds: dict[str, float] = collections.defaultdict(float)
    for (kernel, instruction), (seconds, _) in spent.items():
        kinds[kind_of(f"{kernel} {instruction}", sources.get(instruction, ""))] += seconds / total
    ranked = sorted(spent.items(), key=lambda item: -item[1][0])[:count]
    return {
        "busy_seconds_per_step": total / steps,
        "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "top": [
            {
                "operation": instruction or kernel,
                "kernel": kernel[:80],
                "of": sources.get(instruction, "")[-120:],
                "seconds_per_step": seconds / steps,
                "share": seconds / total,
                "calls_per_step": calls / steps,
            }
            for (kernel, instruction), (seconds, calls) in ranked
        ],
    }


def kind_of(name: str, source: str) -> str:
    """Return the kind of an operation, a key of KINDS; fusions whose source is a matrix product count as products."""
    if source.endswith("dot_general"):
        return "matrix products"
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower()))


def sum_operations(data: jax.profiler.ProfileData) -> dict[tuple[str, str], tuple[float, int]]:
    """Return (kernel, HLO instruction) -> (own seconds, calls), summed over all lines of all devices."""
    planes = list(data.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    spent: dict[tuple[str, str], list] = collections.defaultdict(lambda: [0.0, 0])
    for plane in devices or planes:
        lines = list(plane.lines)
        # A GPU's streams contain the kernels; lines such as "XLA Modules" would count them twice.
        streams = [line for line in lines if line.name.startswith("Stream")]
        for line in streams or lines:
            for key, seconds in own_times(line.events, kernels=bool(streams)):
                spent[key][0] += seconds
                spent[key][1] += 1
    return {key: (seconds, calls) for key, (seconds, calls) in spent.items()}


def own_times(events: Iterable[Any], kernels: bool) -> Iterable[tuple[tuple[str, str], float]]:
    """Yield each operation of a line, and its seconds without those of nested operations (such as a loop's body).

    Kernels are not nested: one that starts before the previous one has ended overlaps with it, and both count in full.
    """
    operations = []
    for event in events:
        stats = {name: value for name, value in event.stats if name in ("hlo_op", "hlo_module")}
        if kernels or "hlo_op" in stats:
            operations.append((event.start_ns, -event.duration_ns, event.name, str(stats.get("hlo_op", ""))))
    if kernels:
        yield from (((kernel, instruction), -minus / 1e9) for _, minus, kernel, instruction in operations)
        return
    enclosing: list[list] = []  # [end, key, own seconds] of the operations that enclose the next one
    for start, minus_duration, kernel, instruction in sorted(operations):
        duration = -minus_duration
        while enclosing and enclosing[-1][0] <= start:
            _, key, own = enclosing.pop()
            yield key, own
        if enclosing:
            enclosing[-1][2] -= duration / 1e9
        enclosing.append([start + duration, (kernel, instruction), duration / 1e9])
    for _, key, own in enclosing:
        yield key, own
