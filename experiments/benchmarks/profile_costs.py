"""Where a step's time goes: a trace by JAX's profiler, read without TensorBoard."""

import collections
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

# A kernel's kind by its name or its HLO instruction's: the first that matches. cuBLAS's are nvjet, cutlass and gemm.
KINDS = {
    "attention": r"fmha|flash|cudnn.*(attention|sdpa)|sdpa",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|matmul",
    "collectives": r"nccl|all-reduce|all-gather|reduce-scatter|all-to-all|collective",
    "copies": r"memcpy|memset|copy|transpose|dynamic-(update-)?slice",
    "fusions and the rest": r"",
}


def top_costs(run: Callable[[], Any], steps: int, hlo: str, count: int = 15) -> dict[str, Any]:
    """Trace `run`, which does `steps` steps and waits for them, and sum up its operations.

    Args:
        run: what to trace; it ran before.
        steps: to divide by.
        hlo: the text of the compiled program, which says what each instruction is of.
        count: how many operations to list.

    Returns:
        `busy_seconds_per_step` (all device threads or streams together), `kinds` (name -> share of that), and `top`:
        the most expensive operations, with seconds a step, share, calls a step, and where they come from.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        traces = sorted(Path(folder).rglob("*.xplane.pb"))
        assert len(traces) == 1, f"{len(traces)} traces were written, not one"
        data = jax.profiler.ProfileData.from_file(str(traces[0]))
        spent = sum_operations(data)
    if not spent:
        raise RuntimeError("the trace has no operation of a device")
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
    """One of KINDS. A fusion that JAX made from a product counts as one."""
    if source.endswith("dot_general"):
        return "matrix products"
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower()))


def sum_operations(data: jax.profiler.ProfileData) -> dict[tuple[str, str], tuple[float, int]]:
    """(kernel, HLO instruction) -> own seconds and calls, over all lines of all devices."""
    planes = list(data.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    spent: dict[tuple[str, str], list] = collections.defaultdict(lambda: [0.0, 0])
    for plane in devices or planes:
        lines = list(plane.lines)
        # A GPU's streams hold kernels; lines such as "XLA Modules" would count them again.
        streams = [line for line in lines if line.name.startswith("Stream")]
        for line in streams or lines:
            for key, seconds in own_times(line.events, kernels=bool(streams)):
                spent[key][0] += seconds
                spent[key][1] += 1
    return {key: (seconds, calls) for key, (seconds, calls) in spent.items()}


def own_times(events: Iterable[Any], kernels: bool) -> Iterable[tuple[tuple[str, str], float]]:
    """Each operation of a line, and its seconds less those of what runs inside it (a loop holds its body's)."""
    found = []
    for event in events:
        stats = {name: value for name, value in event.stats if name in ("hlo_op", "hlo_module")}
        if kernels or "hlo_op" in stats:
            found.append((event.start_ns, -event.duration_ns, event.name, str(stats.get("hlo_op", ""))))
    open_: list[list] = []  # [end, key, own seconds] of what encloses the next event
    for start, minus_duration, kernel, instruction in sorted(found):
        duration = -minus_duration
        while open_ and open_[-1][0] <= start:
            _, key, own = open_.pop()
            yield key, own
        if open_:
            open_[-1][2] -= duration / 1e9
        open_.append([start + duration, (kernel, instruction), duration / 1e9])
    for _, key, own in open_:
        yield key, own
