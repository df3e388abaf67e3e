"""README.md's commands, in the order of the page, on a small model: the flags, marks and paths are the page's own."""

import re
import shlex
from pathlib import Path

import pytest
import tiny
import tokenizers

from pma_jax import config as configuration
from pma_jax.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """The words of each command line of a program; comments and continuations are the shell's."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line[:1] == [program]]


def write_small_demo(folder: Path) -> str:
    """The shipped demo with every token mark as it is, a step as long as a snapshot's interval, and 16 words."""
    words = [f"w{i}" for i in range(14)]
    vocabulary = {word: i for i, word in enumerate(["<eos>", "?", *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    tiny.write_corpus(folder / "texts")
    demo = configuration.load("demo")
    length = 64
    batch, rest = divmod(demo.checkpoint.interval_tokens, length)
    assert rest == 0 and batch % 8 == 0
    (folder / "small.py").write_text(f"""
from pma_jax import config

def get_config():
    c = config.load("demo")
    c.data.update(source="files", files=({str(folder / "texts" / "*.txt")!r},), held_out_percent=20.0)
    c.data.update(tokenizer={str(folder / "tokenizer.json")!r}, cache_dir={str(folder / "cache")!r})
    c.model.update(vocabulary_size=16, width=8, layers=1, heads=1, kv_heads=1, head_dim=8, hidden=8)
    c.training.update(sequence_length_tokens={length}, batch_size_sequences={batch})
    c.evaluation.update(tokens=1000, batch_size_sequences=8)
    return c
""")
    return str(folder / "small.py")


def test_the_page_has_commands():
    assert commands("pma") and commands("make") and blocks("python")


def test_make_commands_are_targets():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands("make"):
        assert words and set(words) <= set(targets)


def test_every_other_command_is_known():
    programs = {shlex.split(line, comments=True)[0] for block in blocks("bash") for line in block.splitlines() if line}
    assert programs <= {"pma", "make", "git", "cd", "pip"}


@pytest.mark.slow
def test_the_commands_do_what_the_page_says(tmp_path, monkeypatch, capfd):
    small = write_small_demo(tmp_path)
    monkeypatch.chdir(tmp_path)
    for words in commands("pma"):
        small_words = [
            small if before == "--config" else word for before, word in zip(["", *words], words, strict=False)
        ]
        assert main(small_words) == 0, f"pma {shlex.join(words)}\n{capfd.readouterr().err}"
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
