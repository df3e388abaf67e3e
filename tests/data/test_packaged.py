"""Packaged text: named corpora of sources that every installation has."""

import sys
import sysconfig
from pathlib import Path

import pytest

from pma_jax import config
from pma_jax.data import corpus, packaged


@pytest.mark.parametrize("name", [packaged.STUDIES, packaged.LIBRARIES])
def test_named_corpora_leave_tests_out_and_are_in_the_order_of_names(name):
    files = packaged.list_files(name)
    assert list(files) == sorted(files) and all(path.suffix == ".py" for path in files.values())
    folders = {part for document in files for part in Path(document).parts[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"}


def test_text_of_studies_is_the_standard_library_that_all_builds_of_a_version_share():
    files, everything = packaged.list_files(packaged.STUDIES), packaged.list_files("")
    assert files.items() < everything.items(), "the names are those of the whole library"
    tops = {name.partition("/")[0].removesuffix(".py") for name in files}
    assert tops <= sys.stdlib_module_names and "ast" in tops
    assert not [name for name in files if "_sysconfigdata" in name or name.startswith("config-")]
    sizes = [sum(path.stat().st_size for path in each.values()) for each in (files, everything)]
    assert sizes[0] > 8e6 and sizes[0] < 0.6 * sizes[1], "more than half of the library is its tests"


def test_text_of_libraries_is_larger_and_names_each_package():
    files = packaged.list_files(packaged.LIBRARIES)
    assert sum(path.stat().st_size for path in files.values()) > 30e6
    assert {"jax", "numpy", "scipy"} <= {name.partition("/")[0] for name in files}
    assert files["optax/__init__.py"] == Path(sysconfig.get_path("purelib"), "optax", "__init__.py")


def test_a_corpus_is_read_by_its_name():
    opened = corpus.open_corpus(config.DataConfig(package=packaged.STUDIES))
    first = next(opened.read())
    assert first.name == "__future__.py" and first.text == packaged.list_files("")["__future__.py"].read_text()
    assert opened.digest != corpus.open_corpus(config.DataConfig()).digest


def test_an_unknown_package_is_refused_with_the_names_of_corpora():
    with pytest.raises(ValueError, match=f"no package 'no_such' is installed.*{packaged.STUDIES}"):
        packaged.list_files("no_such")
