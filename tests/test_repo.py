"""The repository itself: what the documents say exists, and the tests run against the installed package."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree
from pathlib import Path

import pytest

import powerinfer_py
from powerinfer_py import _core, cli

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
    "models/README.md",
    "models/tiny-relu/README.md",
)
SCRIPTS = Path(sysconfig.get_path("scripts"))


def blocks(language: str) -> list[str]:
    """Code blocks of a language in all documents."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS]
    return [
        block for text in texts for block in re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]


def commands(*starts: str) -> list[str]:
    """Shell commands in the documents that begin with one of the words; also those inside a sentence."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS]
    lines = [line for block in blocks("sh") for line in re.split(r"\n|&&", block.replace("\\\n", " "))]
    lines += [code for text in texts for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)]
    found = {line.partition("   #")[0].strip() for line in lines}
    return sorted(line for line in found if line.split(" ")[0] in starts and " " in line)


def is_editable() -> bool:
    text = importlib.metadata.distribution("powerinfer_py").read_text("direct_url.json")
    return bool(text and json.loads(text).get("dir_info", {}).get("editable"))


def test_tests_run_against_the_installed_package() -> None:
    if is_editable():
        pytest.skip("editable install: the source tree is the package")
    assert ROOT / "powerinfer_py" not in Path(powerinfer_py.__file__).parents
    # And so do the commands that tests start.
    code = "import powerinfer_py; print(powerinfer_py.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == powerinfer_py.__file__


def test_installed_package_has_what_it_needs_and_no_sources() -> None:
    listed = importlib.metadata.files("powerinfer_py") or []
    names = {str(path) for path in listed}
    if not is_editable():
        needed = ("py.typed", "serving/page/page.js", "tools/inspect_model.py", "tools/machines/rtx4090.json")
        assert {f"powerinfer_py/{name}" for name in needed} <= names
    assert {
        "powerinfer_py/_core.pyi",
        "powerinfer_py/include/ggml-powerinfer.h",
        "powerinfer_py/lib/libggml-powerinfer.so",
        "powerinfer_py/lib/libpowerinfer-preload.so",
    } <= names
    assert any(name.endswith("bin/powerinfer-main") for name in names)
    assert not [name for name in names if re.search(r"\.(cpp|sh|inl)$|CMakeLists|bump_llama|tools/(main|.*\.h$)", name)]


def test_installed_libraries_are_found_relative_to_their_files() -> None:
    """In an environment without LD_LIBRARY_PATH, and no path of the building machine in the search path."""
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    package = Path(_core.__file__).parent
    for path in (*package.glob("_core*.so"), *package.glob("lib/*.so"), SCRIPTS / "powerinfer-main"):
        text = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
        run_path = re.search(r"Library r(?:un)?path: \[(.*)\]", text)[1].split(":")
        assert all(part.startswith("$ORIGIN") for part in run_path), f"{path}: {run_path}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LD_")}
        linked = subprocess.run(["ldd", path], capture_output=True, text=True, check=True, env=environment).stdout
        assert "not found" not in linked, linked


@functools.cache
def help_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("command", commands("powerinfer"))
def test_powerinfer_command_in_the_documents_exists(command: str) -> None:
    words = shlex.split(command)
    if words[1].isupper() or words[1] == "--version":
        return
    assert words[1] in cli.VERBS
    text = help_of(sys.executable, "-m", "powerinfer_py.cli", words[1], "--help")
    for flag in (word for word in words[2:] if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", text), f"{flag} isn't a flag of powerinfer {words[1]}"


@pytest.mark.parametrize("command", commands("powerinfer-main"))
def test_powerinfer_main_command_in_the_documents_exists(command: str) -> None:
    text = help_of(SCRIPTS / "powerinfer-main", "-h")
    for flag in (word for word in shlex.split(command)[1:] if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", text), f"{flag} isn't a flag of powerinfer-main"


@pytest.mark.parametrize("command", commands("make"))
def test_make_target_in_the_documents_exists(command: str) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(VENV)", ".venv")
    for target in (word for word in shlex.split(command)[1:] if "=" not in word):
        assert re.search(rf"^{re.escape(target)}:", text, re.MULTILINE), f"make {target}"


def test_cmake_option_in_the_documents_exists() -> None:
    options = set(re.findall(r"-D(POWERINFER_\w+)", "".join(blocks("sh"))))
    assert options and options <= set(
        re.findall(r"^option\((\w+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)
    )


@pytest.mark.parametrize("block", blocks("python"))
def test_python_in_the_documents_uses_what_exists(block: str) -> None:
    compile(block, "README.md", "exec")
    for name in re.findall(r"from powerinfer_py import (\w+)", block):
        assert hasattr(powerinfer_py, name)
    if "import Llama\n" in block:
        for method in re.findall(r"llm\.(\w+)", block):
            assert hasattr(powerinfer_py.Llama, method)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_link_in_the_documents_leads_somewhere(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("https://") or (ROOT / name).parent.joinpath(target).exists(), f"{name}: {target}"


def test_version_and_llama_cpp_are_the_same_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "([\d.]+)"', project, re.MULTILINE)[1]
    assert f"project(powerinfer VERSION {version} " in (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    pins = set()
    for name in ("pyproject.toml", "CMakeLists.txt", *DOCUMENTS):
        text = (ROOT / name).read_text(encoding="utf-8")
        pins |= set(re.findall(r"llama-cpp-python(?:==| )(\d+\.\d+\.\d+)", text))
    assert len(pins) == 1


def test_picture_is_well_formed_and_has_a_dark_variant() -> None:
    text = (ROOT / "docs" / "pictures" / "how-it-works.svg").read_text(encoding="utf-8")
    xml.etree.ElementTree.fromstring(text)
    assert "prefers-color-scheme: dark" in text


def test_promises_name_tests_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    names = re.findall(r"`(test[\w-]+(?:\.py)?)(?:::(\w+))?`", text)
    assert len(names) > 10
    for file, function in names:
        path = ROOT / "tests" / (file if file.endswith(".py") else f"{file}.cpp")
        assert path.exists(), path
        assert not function or f"def {function}(" in path.read_text(encoding="utf-8"), function


def test_ci_runs_the_test_command_of_the_readme() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert 'make "$@"' in text and "set -euo pipefail" in text
    assert re.findall(r"^run (\w+)$", text, re.MULTILINE)[-1] == "test"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
