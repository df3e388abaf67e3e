"""Coverage-guided fuzzing of what reads a stranger's files: any bytes open, or are refused in one line.

    pip install atheris
    python experiments/fuzz/safetensors_header.py experiments/fuzz/corpus -max_total_time=3600

Inputs that reach new code are kept in the corpus, which the tests replay. A crash writes the input beside it and ends
the run. The first byte of an input chooses what it is: a safetensors file, a header that is given its length, or a
shard index.
"""

import sys
import tempfile
from pathlib import Path


def open_all(data: bytes, folder: Path) -> str | None:
    """Opens one input and reads every leaf it claims to have; the refusal, None if it was a checkpoint."""
    # Imported here, so that the fuzzer can instrument it before.
    from pma_jax.storage.formats.open import open_source, read_leaf

    kind, body = data[:1], data[1:]
    path, index = folder / "x.safetensors", folder / "model.safetensors.index.json"
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
        source = open_source(folder)
        for name, leaf in source.leaves.items():
            assert read_leaf(source, name).nbytes == leaf.nbytes
    except ValueError as error:
        assert "\n" not in str(error), str(error)
        return str(error)
    return None


def main() -> None:
    """Hands over to libFuzzer."""
    import atheris  # pyrefly: ignore

    with atheris.instrument_imports(include=["pma_jax", "json"]):
        import pma_jax.storage.formats.open  # noqa: F401
    folder = Path(tempfile.mkdtemp())

    def one_input(data: bytes) -> None:
        open_all(data, folder)

    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
