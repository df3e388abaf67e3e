"""Coverage-guided fuzzing of the safetensors reader: any bytes either open, or raise a one-line ValueError.

    pip install atheris
    python experiments/fuzz/safetensors_header.py experiments/fuzz/corpus -max_total_time=3600

Inputs that reach new code are added to the corpus, which the tests replay. On a crash the input is written to the
current directory, and the run ends. The first byte of an input selects its form: 1, a header whose length is prepended;
2, a shard index; any other, a complete safetensors file.
"""

import sys
import tempfile
from pathlib import Path


def open_all(data: bytes, folder: Path) -> str | None:
    """Open one input and read every leaf that it declares; return the error message, or None if it is a checkpoint."""
    # Imported here, after the fuzzer has instrumented it.
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
    """Run libFuzzer."""
    import atheris  # pyrefly: ignore

    with atheris.instrument_imports(include=["pma_jax", "json"]):
        import pma_jax.storage.formats.open  # noqa: F401
    folder = Path(tempfile.mkdtemp())

    def fuzz_one_input(data: bytes) -> None:
        open_all(data, folder)

    atheris.Setup(sys.argv, fuzz_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
