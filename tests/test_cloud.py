"""The files of docs/cloud: an image, an installation and a SkyPilot job."""

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pma_jax import config as configuration
from pma_jax.cli.arguments import parser
from pma_jax.cli.command import CONFIG_PREFIX

ROOT = Path(__file__).parent.parent
CLOUD = ROOT / "docs" / "cloud"
PAGES = [ROOT / "docs" / "tpu_vms.md", CLOUD / "skypilot.yaml"]


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile and their arguments, with lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(words[0], words[2]) for words in (line.partition(" ") for line in joined)]


def test_image_installs_pinned_extras_of_what_it_copies(tmp_path):
    steps = instructions((CLOUD / "Dockerfile").read_text())
    assert steps[0] == ("FROM", "python:3.11-slim")
    copied = [word for name, words in steps if name == "COPY" for word in words.split()[:-1]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml", "constraints.txt"}
    needed |= {*project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"], "pma_jax"}
    assert set(copied) == needed and all((ROOT / name).exists() for name in copied)
    arguments = dict(words.split("=", 1) for name, words in steps if name == "ARG")
    ((_, run),) = [step for step in steps if step[0] == "RUN"]
    assert run.endswith('--constraint constraints.txt ".[${EXTRAS}]" ${PACKAGES}')
    assert ("ENTRYPOINT", '["pma"]') in steps and "pma" in project["project"]["scripts"]
    build_arguments = re.findall(r"EXTRAS=(\S+)", (CLOUD / "Dockerfile").read_text())
    assert arguments["EXTRAS"] in build_arguments and len(build_arguments) == 2
    for extras in build_arguments:
        check_pinned(project["project"], extras)
    # The plugin for GPUs must have the version of the jaxlib that is installed beside it.
    (plugin,) = re.findall(r"jax-cuda12-plugin\[with-cuda\]==([\d.]+)", (CLOUD / "Dockerfile").read_text())
    assert plugin == pins()["jaxlib"]


def pins() -> dict[str, str]:
    """Return the versions of constraints.txt."""
    lines = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def check_pinned(project: dict, extras: str) -> None:
    """Assert that constraints.txt pins what some extras and the package itself require, to versions that they allow."""
    required = [*project["dependencies"], *(r for e in extras.split(",") for r in project["optional-dependencies"][e])]
    for requirement in map(Requirement, required):
        version = pins()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} and {version}"


def test_installation_is_of_existing_extras_and_the_python_of_the_pins():
    text, project = (CLOUD / "install.sh").read_text(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    subprocess.run(["bash", "-n", CLOUD / "install.sh"], check=True)
    assert "--python 3.11" in text and "--constraint constraints.txt" in text
    (default,) = re.findall(r"\$\{1:-(\S+)\}\]", text)
    (job,) = re.findall(r"install.sh (\S+)", (CLOUD / "skypilot.yaml").read_text())[:1]
    for extras in (default, job):
        check_pinned(project, extras)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_those_of_pma(page):
    text = page.read_text().replace("\\\n", " ")
    found = re.findall(r"(?<![\w./-])(?:~/pma/bin/)?pma ((?:train|watch|merge|report|sweep|evaluate) [^\n`]*)", text)
    assert found
    for command in found:
        words = shlex.split(command.partition(" > ")[0], comments=True)
        options = parser().parse_args([word for word in words if not word.startswith(CONFIG_PREFIX)])
        if options.verb in ("train", "fork"):
            overrides = [w.removeprefix(CONFIG_PREFIX) for w in words if w.startswith(CONFIG_PREFIX)]
            configuration.resolve(configuration.load(options.config), overrides)


def test_sky_job_starts_again_after_statuses_that_may_pass():
    job = yaml.safe_load((CLOUD / "skypilot.yaml").read_text())
    assert job["resources"]["job_recovery"]["recover_on_exit_codes"] == [75, 130, 143]
    assert "--distributed" in job["run"] and "num_nodes" not in job
    for script in (job["setup"], job["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_repeat_runs_a_command_again_after_a_lost_peer_only(tmp_path):
    command = "echo >> runs; case $(wc -l < runs) in 1) exit 75 ;; 2) exit 137 ;; *) exit 143 ;; esac"
    repeat = ["bash", CLOUD / "repeat.sh", "bash", "-c", command]
    assert subprocess.run(repeat, cwd=tmp_path, env=os.environ | {"WAIT_SECONDS": "0"}).returncode == 143
    assert (tmp_path / "runs").read_text() == "\n" * 3
