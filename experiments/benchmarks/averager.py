"""Speed of the averager relative to memory bandwidth: `python experiments/benchmarks/averager.py`.

One run starts two child processes (1 device, 8 simulated CPU devices). Each averages K = 10 inputs of one flat leaf,
sharded over the devices, in bfloat16 and float32, at two sizes: `cache` (64Ki elements per input) and `memory` (16Mi):
  fused            fused_sum of the simple mean into a donated float32 result
  fused, rounded   the same for weights whose products are rounded before they are added, as those of EMA
  fused, fresh     the same into newly allocated memory
  one at a time    add_weighted, K times
  16 recipes       weighted_sums_of_stream over loaded inputs, R = 16; as a multiple of `fused`
The reference, STREAM add, is float32 c = a + b into existing memory over arrays of the same total bytes, 12 bytes per
element: the faster of jax.jit over the same devices and np.add on two threads. A rate counts every byte that the
algorithm must read or write (inputs once, result once), as STREAM's does; `input` counts inputs only. `net` is the
ratio when the time of a call on 64 elements per device is subtracted from each time: starting a program of eleven
arrays takes longer than one of three, which counts at the size `cache`. All figures are medians of 5 rounds in which
the programs alternate, so that other load on the machine affects all of them; a ratio is followed by its lowest and its
highest in one round.
Bar: fused >= 80% of STREAM add; target 95%.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

K, R = 10, 16
SIZES = {"cache": 1 << 16, "memory": 1 << 24}  # elements per input


def main():
    """Run both device counts and print a table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of a table")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which the programs alternate")
    parser.add_argument("--devices", type=int, help="measure in this process, on this number of devices")
    args = parser.parse_args()
    if args.devices:
        measure_all(args.devices, args.rounds)
        return
    if not args.json:
        print(f"{'devices':>7} {'size':>7} {'dtype':>9}  {'what':<16} {'GB/s':>6} {'input':>6} {'net':>5}  ratio")
    for devices in (1, 8):
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        child = subprocess.run(
            [sys.executable, __file__, "--devices", str(devices), "--rounds", str(args.rounds)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        for line in child.stdout.splitlines():
            print(line if args.json else format_row(json.loads(line)), flush=True)


def format_row(row):
    """Format one line of the table."""
    return (
        f"{row['devices']:>7} {row['size']:>7} {row['dtype']:>9}  {row['what']:<16} {row['gb_per_second']:6.1f} "
        f"{row['input_gb_per_second']:6.1f} {row['net_ratio']:5.0%}  {row['ratio']}"
    )


def measure_all(devices, rounds):
    """Print one JSON line per measurement on this process's devices."""
    import jax
    import jax.numpy as jnp

    mesh = jax.make_mesh((devices,), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    for size, n in SIZES.items():
        for dtype in (jnp.bfloat16, jnp.float32):
            item = jnp.dtype(dtype).itemsize
            programs = make_programs(n, dtype, sharding)
            timings = time_in_turn(programs, rounds, repeats=max(1, 2**22 // n))
            seconds = medians(timings)
            calls = medians(time_in_turn(make_programs(64 * devices, dtype, sharding), rounds, repeats=64))
            net_seconds = {what: max(seconds[what] - calls[what], 1e-9) for what in seconds}
            stream_bytes = 12 * stream_elements(n, item)
            stream, net_stream = (
                stream_bytes / min(times["STREAM jit"], times["STREAM numpy"]) / 1e9 for times in (seconds, net_seconds)
            )
            for what, call_seconds in seconds.items():
                results = R if what.startswith("16") else 1
                inputs = 0 if what.startswith("STREAM") else K * item * n
                total_bytes = stream_bytes if what.startswith("STREAM") else inputs + 4 * n * results
                if what == "one at a time":
                    total_bytes = inputs + 8 * n * K
                rate = total_bytes / call_seconds / 1e9
                reference = "fused" if results == R else min(("STREAM jit", "STREAM numpy"), key=seconds.__getitem__)
                per_round = [of / by for of, by in zip(timings[what], timings[reference], strict=True)]
                low, high = min(per_round), max(per_round)
                ratio = f"{call_seconds / seconds['fused']:.2f}x fused ({low:.2f} to {high:.2f})"
                if results != R:
                    low, high = (total_bytes / stream_bytes / ratio_of_times for ratio_of_times in (high, low))
                    ratio = f"{rate / stream:.0%} of STREAM ({low:.0%} to {high:.0%})"
                row = {"devices": devices, "size": size, "dtype": jnp.dtype(dtype).name, "what": what, "ratio": ratio}
                row |= {"gb_per_second": rate, "input_gb_per_second": inputs / call_seconds / 1e9}
                print(json.dumps(row | {"net_ratio": total_bytes / net_seconds[what] / 1e9 / net_stream}), flush=True)


def stream_elements(n, item):
    """Return the elements per STREAM array that give the bytes of K inputs and a result; a multiple of 64."""
    return n * (K * item + 4) // 12 // 64 * 64


def make_programs(n, dtype, sharding):
    """Return the measured programs: name -> function without arguments that returns arrays to wait for."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pma_jax.merging.averager import (
        LeafArithmetic,
        add_weighted,
        fused_sum,
        fused_sum_16bit,
        weighted_sums_of_stream,
    )

    def filled(value, size=n, dtype=jnp.float32):
        return jax.block_until_ready(jnp.full(size, value, dtype, device=sharding))

    inputs_K = [filled(k, dtype=dtype) for k in range(K)]
    ones_K, C = np.ones(K, np.float32), np.random.default_rng(0).random((R, K), np.float32)
    fused = fused_sum if jnp.dtype(dtype).itemsize == 4 else fused_sum_16bit  # as `weighted_sum` chooses
    # As `weighted_sum` does for the simple mean; `is_exact=False` for recipes such as EMA.
    divisor = np.float32(K)
    exact, rounded = (
        (LeafArithmetic("float32", is_compared=jnp.dtype(dtype).itemsize == 4, is_exact=is_exact),)
        for is_exact in (True, False)
    )
    m = stream_elements(n, jnp.dtype(dtype).itemsize)
    a, b = filled(1, m), filled(2, m)
    stream_add = jax.jit(lambda c, a, b: a + b, donate_argnums=0, keep_unused=True)
    host = [np.ones(m, np.float32) for _ in range(3)]
    halves = [[x[part] for x in host] for part in (slice(0, m // 2), slice(m // 2, m))]
    threads = ThreadPoolExecutor(2)

    def reusing(run, out):
        result = [out]
        del out

        def run_again():
            result.append(run(result.pop()))
            return result[0]

        return run_again

    def one_at_a_time(total):
        for x in inputs_K:
            total = add_weighted(total, [x], ones_K[:1])
        return total

    return {
        "STREAM jit": reusing(lambda c: stream_add(c, a, b), filled(0, m)),
        "STREAM numpy": lambda: list(threads.map(lambda part: np.add(part[0], part[1], out=part[2]), halves)),
        "fused": reusing(lambda out: fused(out, inputs_K, ones_K, divisor, exact), filled(0)),
        "fused, rounded": reusing(lambda out: fused(out, inputs_K, ones_K, divisor, rounded), filled(0)),
        "fused, fresh": lambda: fused(None, inputs_K, ones_K, divisor, exact),
        "one at a time": reusing(one_at_a_time, filled(0)),
        "16 recipes": lambda: weighted_sums_of_stream(inputs_K, C),
    }


def time_in_turn(programs, rounds, repeats):
    """Return the seconds per call of each program in each of `rounds` rounds in which they alternate.

    A timing is the mean of `repeats` calls.
    """
    import jax

    timings = {name: [] for name in programs}
    for round_ in range(rounds + 1):
        for name, run in programs.items():
            start = time.perf_counter()
            for _ in range(repeats - 1):
                run()
            result = run()
            jax.block_until_ready(result)
            if round_:
                timings[name].append((time.perf_counter() - start) / repeats)
    return timings


def medians(timings):
    """Return the median of the times of each program."""
    return {name: statistics.median(values) for name, values in timings.items()}


if __name__ == "__main__":
    main()
