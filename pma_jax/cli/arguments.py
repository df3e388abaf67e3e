"""What `pma VERB …` takes on the command line: one parser a verb, and the types of their arguments. Imports no JAX."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from pma_jax.config import SNAPSHOT_KINDS


def parser(functions: Mapping[str, Callable[[argparse.Namespace], None]]) -> argparse.ArgumentParser:
    """The parser of all verbs; `function` of what it returns is the verb's own of `functions`, by name."""
    whole = argparse.ArgumentParser(
        prog="pma",
        description="Train language models by tokens, merge their checkpoints, and see what annealing would give.",
        epilog="Every verb has --help with an example. A mistake is one line and exit status 1 (or 2: called wrongly).",
    )
    verbs = whole.add_subparsers(dest="verb", required=True, metavar="VERB")

    verb = _verb(verbs, functions, "train", "pma train --config demo --workdir runs/demo --config.training.seed=1")
    verb.add_argument("--config", required=True, help="a .py file with get_config(), or a shipped name such as demo")
    verb.add_argument("--workdir", required=True, help="the run's directory; a run that is there is resumed")
    _takes_config(verb)
    _takes_hosts(verb)

    verb = _verb(
        verbs,
        functions,
        "fork",
        "pma fork runs/demo --at-tokens 4.9e6 --workdir runs/annealed "
        "--config.schedule.decay=cosine --config.schedule.decay_start_tokens=4.9e6",
    )
    verb.add_argument("run", help="the run to start from")
    verb.add_argument("--at-tokens", required=True, type=_tokens, help="where RUN saved a full state")
    verb.add_argument("--workdir", required=True, help="the new run's directory; the same fork is resumed")
    verb.add_argument("--weights", metavar="SNAPSHOT", help="begin with these instead, such as a merge (PMA-init)")
    _takes_config(verb)
    _takes_hosts(verb)

    _merge_options(
        _verb(verbs, functions, "merge", "pma merge runs/demo --last 10 --recipe sma --out runs/demo/merged/sma-10")
    )

    verb = _verb(verbs, functions, "sweep", "pma sweep runs/demo --recipes sma,wma --windows 3,6,10,15")
    verb.add_argument("run", help="the run whose newest snapshots are merged; RUN/sweep.json is written")
    verb.add_argument("--recipes", default="sma,ema:alpha=0.1,ema:alpha=0.2,wma", type=_texts, metavar="R,R")
    verb.add_argument("--windows", default="3,6,10,15", type=_windows, metavar="N,N")
    verb.add_argument("--intervals", default="1", type=_windows, metavar="I,I", help="every I-th snapshot (default 1)")
    verb.add_argument("--kind", choices=SNAPSHOT_KINDS, default="point", help="of snapshots (default point)")
    _takes_json(verb)
    _takes_hosts(verb)

    verb = _verb(verbs, functions, "watch", "pma watch runs/demo --recipe wma --windows 6,10")
    verb.add_argument("run", help="a run that is being trained, or was; previews are added to RUN/watch.jsonl")
    verb.add_argument("--recipe", help="such as wma (default: the run's preview.recipe)")
    verb.add_argument("--windows", type=_windows, metavar="N,N", help="default: the run's preview.windows")
    verb.add_argument(
        "--kind", choices=SNAPSHOT_KINDS, help="of snapshots (default: the first kind that the run saves)"
    )
    verb.add_argument("--poll-seconds", default=5.0, type=_seconds, help="between looks at the run (default 5)")
    verb.add_argument("--once", action="store_true", help="preview what is there, and end")
    _takes_hosts(verb)

    verb = _verb(
        verbs, functions, "evaluate", "pma evaluate runs/demo runs/demo/merged/sma-10 --config.evaluation.tokens=131072"
    )
    verb.add_argument("target", nargs="+", help="a run (its newest snapshot) or a snapshot")
    _takes_config(verb)
    _takes_json(verb)
    _takes_hosts(verb)

    verb = _verb(verbs, functions, "inspect", "pma inspect runs/demo")
    verb.add_argument("target", help="a run, a snapshot, or a checkpoint in any format that `pma merge` reads")
    verb.add_argument("--subtree", help="where an Orbax tree holds the parameters")
    verb.add_argument("--verify", action="store_true", help="read everything again, and compare it with its digests")
    verb.add_argument("--with-sources", action="store_true", help="the same, of what a merge was made from too")
    _takes_json(verb)

    verb = _verb(
        verbs, functions, "plan", "pma plan --config demo --topology v5e:2x2 --config.training.batch_size_sequences=64"
    )
    verb.add_argument("--config", required=True, help="a .py file with get_config(), or a shipped name such as demo")
    verb.add_argument(
        "--topology", required=True, metavar="CHIP:SHAPE", help="TPUs, such as v5p:4x4x8; 2*v5e:4x4 is two slices"
    )
    verb.add_argument("--out", metavar="FILE", help="write the plan there, as JSON")
    verb.add_argument(
        "--storage-bandwidth",
        default="1GB/s",
        type=_rate,
        metavar="SIZE/s",
        help="of the storage of checkpoints, all devices together (default 1GB/s)",
    )
    verb.add_argument(
        "--annealing-share",
        default=0.2,
        type=_share,
        metavar="SHARE",
        help="of the tokens, of the annealing that merging replaces (default 0.2)",
    )
    _takes_config(verb)
    _takes_json(verb)

    verb = _verb(verbs, functions, "import", "pma import models/Qwen3-0.6B --out imported/qwen3")
    verb.add_argument("model", help="a Hugging Face model's directory, or hf://org/repo@revision")
    verb.add_argument("--out", required=True, help="the snapshot to write; must not exist")
    _takes_json(verb)

    verb = _verb(verbs, functions, "export", "pma export runs/demo/merged/sma-10 --out models/demo")
    verb.add_argument("snapshot", help="a snapshot of any kind, a merge, an imported model, or a run (its newest)")
    verb.add_argument("--out", required=True, help="the directory to write; must not exist")
    verb.add_argument("--dtype", default="keep", choices=("keep", "float32", "bfloat16"), help="of what is written")
    verb.add_argument("--shard-size", default="5GB", type=_size, metavar="SIZE", help="of a safetensors file (5GB)")
    verb.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json, instead of the one that the run has")
    _takes_json(verb)

    verb = _verb(verbs, functions, "report", "pma report runs/demo runs/demo-annealed")
    verb.add_argument("run", nargs="+", help="the run, then the runs forked from it")
    verb.add_argument("--out", help="the directory to write to (default: the first run's)")
    _takes_json(verb)
    return whole


def _merge_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "source",
        nargs="+",
        help="a run, a checkpoint (Orbax or safetensors), a directory of checkpoints, hf://org/repo@revision, "
        "or a pattern of revisions such as hf://org/repo@step-{1000..9000..1000}; ordered by tokens or steps",
    )
    verb.add_argument("--out", required=True, help="the directory to write; must not exist")
    verb.add_argument(
        "--recipe", action="append", help="such as sma (default), ema:alpha=0.2, wma, lagfree:lag=0.5; may be repeated"
    )
    verb.add_argument("--last", type=_positive, metavar="N", help="only the newest N")
    verb.add_argument("--tokens", type=_token_range, metavar="A:B", help="only from A to B tokens, both included")
    verb.add_argument("--every", type=_tokens, metavar="V", help="only every V tokens, back from the newest")
    verb.add_argument("--tolerance", type=_tokens, metavar="T", help="how far from its mark --every takes one (V/10)")
    verb.add_argument("--across-stages", action="store_true", help="let one merge span several runs or stages")
    verb.add_argument("--tokens-per-step", type=_tokens, metavar="T", help="where a name tells only the step")
    verb.add_argument("--kind", choices=SNAPSHOT_KINDS, help="which snapshots of a run")
    verb.add_argument("--subtree", help="where an Orbax tree holds the parameters, such as params or target/model")
    verb.add_argument("--dtype", default="keep", choices=("keep", "float32", "bfloat16"), help="of what is written")
    verb.add_argument("--format", default="keep", choices=("keep", "orbax", "safetensors"), help="of what is written")
    verb.add_argument("--memory-limit", default="1GiB", type=_size, metavar="SIZE", help="resident memory (1GiB)")
    verb.add_argument("--shard-size", default="5GB", type=_size, metavar="SIZE", help="of a safetensors file (5GB)")
    verb.add_argument(
        "--dry-run", action="store_true", help="print what would be read, summed and written; write nothing"
    )
    _takes_json(verb)
    _takes_hosts(verb)


def _verb(
    verbs: Any, functions: Mapping[str, Callable[[argparse.Namespace], None]], name: str, example: str
) -> argparse.ArgumentParser:
    text = functions[name].__doc__
    verb = verbs.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.set_defaults(function=functions[name], takes_config=False)
    return verb


def _takes_config(verb: argparse.ArgumentParser) -> None:
    verb.set_defaults(takes_config=True)
    verb.add_argument("--config.SECTION.KEY=VALUE", action="append", help="change any key of the configuration")


def _takes_json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="print JSON for machines instead of a table")


def _takes_hosts(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--distributed", action="store_true", help="one of several processes of the same command (docs/hosts.md)"
    )
    verb.add_argument(
        "--heartbeat-seconds",
        type=_positive,
        default=100,
        metavar="S",
        help="stop when another process was not heard of for so long (100)",
    )


def _tokens(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 4.9e6") from None
    if not 0 <= value < float("inf") or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of tokens")
    return int(value)


def _token_range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of tokens, such as 2e6:6e6")
    return _tokens(first), _tokens(last)


def _size(text: str) -> int:
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ").strip()
    unit = text[len(number) :].strip().upper()
    try:
        count = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 2GiB or 500MB") from None
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 bytes")
    return count


def _rate(text: str) -> int:
    if not text.endswith("/s"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 500MB/s or 2GiB/s")
    return _size(text.removesuffix("/s"))


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and up to 1, such as 0.2")
    return value


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _windows(text: str) -> list[int]:
    return [_positive(item) for item in text.split(",")]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _texts(text: str) -> list[str]:
    # A comma also stands inside a recipe (lagfree:lag=0.5,order=1): a new one begins with a letter, without "=".
    parts: list[str] = []
    for item in text.split(","):
        begins = item[:1].isalpha() and "=" not in item.split(":")[0]
        if parts and not begins:
            parts[-1] += f",{item}"
        else:
            parts.append(item)
    return parts
