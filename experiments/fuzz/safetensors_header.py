"""Coverage-guided fuzzing of what reads a stranger's files: any bytes open, or are refused in one line.

    pip install atheris
    python experiments/fuzz/safetensors_header.py CORPUS -max_total_time=3600

CORPUS is a directory: inputs that reach new code are kept there. A crash writes the input beside it and ends the run.
The first byte of an input chooses what it is: a safetensors file, a header that is given its length, or a shard index.
"""

import sys
import tempfile
from pathlib import Path

import atheris  # pyrefly: ignore

with atheris.instrument_imports(include=["pma_jax", "json"]):
    from pma_jax.merging.sources import open_source, read_leaf

_FOLDER = Path(tempfile.mkdtemp())
_SEEDS = {
    "file": b"\x00" + (2).to_bytes(8, "little") + b"{}",
    "header": b"\x01" + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}\n0000',
    "index": b"\x02" + b'{"weight_map":{"a":"x.safetensors"}}',
}


def one_input(data: bytes) -> None:
    """Opens one input and reads every leaf it claims to have."""
    kind, body = data[:1], data[1:]
    path, index = _FOLDER / "x.safetensors", _FOLDER / "model.safetensors.index.json"
    index.unlink(missing_ok=True)
    if kind == b"\x02":
        header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        index.write_bytes(body)
    elif kind == b"\x01":
        header, _, rest = body.partition(b"\n")
        path.write_bytes(len(header).to_bytes(8, "little") + header + rest)
    else:
        path.write_bytes(body)
    try:
        source = open_source(_FOLDER)
        for name, leaf in source.leaves.items():
            assert read_leaf(source, name).nbytes == leaf.nbytes
    except ValueError as error:
        assert "\n" not in str(error), str(error)


def main() -> None:
    """Seeds the corpus and hands over to libFuzzer."""
    corpus = next((Path(word) for word in sys.argv[1:] if not word.startswith("-")), None)
    if corpus is not None:
        corpus.mkdir(parents=True, exist_ok=True)
        for name, seed in _SEEDS.items():
            (corpus / name).write_bytes(seed)
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
