"""`--hf-repo`: huggingface_hub's real client against a server on loopback; which files are fetched, and every error."""

from __future__ import annotations

import argparse
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hf_checkpoints
import huggingface_hub
import pytest
import tiny_models
from hub_server import TOKEN, HubServer, hub_server
from huggingface_hub import constants

from powerinfer_py import _core, cli, hub
from powerinfer_py.errors import OptionError
from powerinfer_py.format import SIDECAR_SUFFIX, find_sidecar, read_plan
from powerinfer_py.tools.checkpoint import Checkpoint

REPO = "someone/tiny-GGUF"
NAMES = (
    "README.md",
    "tiny-Q4_K_M.gguf",
    "tiny-Q8_0.gguf",
    "tiny-Q8_0.powerinfer.gguf",
    "mmproj-tiny-Q8_0.gguf",
    "imatrix.gguf",
    "BF16/tiny-BF16-00001-of-00002.gguf",
    "BF16/tiny-BF16-00002-of-00002.gguf",
    "BF16/tiny-BF16.powerinfer.gguf",
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub, with this process's client set to it and to an empty cache."""
    with hub_server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "")
        server.repos[REPO] = {name: name.encode() * 1000 for name in NAMES}
        yield server


def resolve(*words: str, checkpoint: bool = False) -> Path:
    """What a command line resolves to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--strict", action="store_true")
    hub.add_hub_arguments(parser, *(["checkpoint"] if checkpoint else []))
    args = parser.parse_args(words)
    return Path(hub.resolve_checkpoint(args) if checkpoint else hub.resolve_model(args))


def run(server: HubServer, cache: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, whose hub is the server."""
    return subprocess.run(
        [sys.executable, "-m", "powerinfer_py.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(cache), **environment},
    )


# ---- Which file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repo", "file", "first", "n_files"),
    [
        (REPO, None, "tiny-Q4_K_M.gguf", 1),
        (f"{REPO}:q8_0", None, "tiny-Q8_0.gguf", 2),  # with its plan
        (f"{REPO}:BF16", None, "BF16/tiny-BF16-00001-of-00002.gguf", 3),  # with its other part and its plan
        (REPO, "BF16/tiny-BF16-00002-of-00002.gguf", "BF16/tiny-BF16-00001-of-00002.gguf", 3),
        (REPO, "mmproj-tiny-Q8_0.gguf", "mmproj-tiny-Q8_0.gguf", 1),
    ],
)
def test_file_is_chosen_and_fetched_with_what_belongs_to_it(
    server: HubServer, repo: str, file: str | None, first: str, n_files: int
) -> None:
    path = resolve("--hf-repo", repo, *(["--hf-file", file] if file else []))
    assert path.as_posix().endswith(f"/{first}")
    assert path.read_bytes() == server.repos[REPO][first]
    assert len(server.downloads()) == n_files
    assert (find_sidecar(path) is not None) == (n_files > 1)
    if "-of-" in first:
        assert path.with_name(path.name.replace("00001-of", "00002-of")).exists()


def test_only_gguf_is_taken_and_several_are_listed(server: HubServer) -> None:
    assert hub.choose_gguf(["a.gguf", "a.powerinfer.gguf"], REPO) == "a.gguf"
    assert hub.choose_gguf(["a.powerinfer.gguf"], REPO) == "a.powerinfer.gguf"
    with pytest.raises(OptionError, match=r"2 GGUFs of which none is Q4_K_M.*from: a-Q2_K.gguf, a-Q3_K.gguf"):
        hub.choose_gguf(["a-Q2_K.gguf", "a-Q3_K.gguf"], REPO)
    with pytest.raises(OptionError, match="0 GGUFs named Q4_K;"):  # not Q4_K_M
        hub.choose_gguf(NAMES, REPO, "Q4_K")
    with pytest.raises(OptionError, match=r"2 GGUFs named Q4_0.*a-Q4_0.gguf, b-Q4_0.gguf\."):
        hub.choose_gguf(["a-Q4_0.gguf", "b-Q4_0.gguf", "a-Q8_0.gguf"], REPO, "Q4_0")
    with pytest.raises(OptionError, match="has no GGUF"):
        hub.choose_gguf(["model.safetensors"], REPO)
    with pytest.raises(OptionError, match=r"did you mean tiny-Q8_0.gguf"):
        resolve("--hf-repo", REPO, "--hf-file", "tinyQ8_0.gguf")


def test_missing_part_is_an_error_before_anything_is_fetched(server: HubServer) -> None:
    del server.repos[REPO]["BF16/tiny-BF16-00002-of-00002.gguf"]
    with pytest.raises(OptionError, match=r"00002-of-00002.gguf isn't there"):
        resolve("--hf-repo", f"{REPO}:BF16")
    assert not server.downloads()


def test_exactly_one_of_model_and_repository(server: HubServer) -> None:
    assert resolve("model.gguf") == Path("model.gguf")
    for words, text in (
        ((), "model: none was given"),
        (("model.gguf", "--hf-repo", REPO), "model.gguf was given as model too"),
        (("model.gguf", "--hf-file", "a.gguf"), "--hf-file: was given without --hf-repo"),
        (("model.gguf", "--hf-revision", "main"), "--hf-revision: was given without"),
        (("--hf-repo", f"{REPO}:Q8_0", "--hf-file", "a.gguf"), "names a quantization too"),
    ):
        with pytest.raises(OptionError, match=text):
            resolve(*words)
    assert not server.requests


# ---- Models --------------------------------------------------------------------------------------------------------


def test_plan_in_the_cache_is_found_beside_its_model(
    server: HubServer, tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    """The cache's files are links into another folder, where they have other names."""
    base = tiny_model()
    server.repos[REPO] = {"x.gguf": base.read_bytes(), "x.powerinfer.gguf": tiny_plan(base).read_bytes()}
    path = resolve("--hf-repo", REPO)
    assert path.is_symlink()
    assert _core.inspect_path(path) == ("plain", str(path.with_name("x.powerinfer.gguf")))


def test_named_plan_brings_its_base(
    server: HubServer, tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    base = tiny_model()
    plan = tiny_plan(base)
    name = read_plan(plan).base_file
    server.repos[REPO] = {name: base.read_bytes(), "p.powerinfer.gguf": plan.read_bytes(), "other.gguf": b""}
    path = resolve("--hf-repo", REPO, "--hf-file", "p.powerinfer.gguf")
    assert path.name == "p.powerinfer.gguf" and read_plan(path).open_base().path == path.with_name(name)
    assert server.downloads() == ["p.powerinfer.gguf", name]


def test_commands_run_on_a_fetched_model_and_offline_again(
    server: HubServer,
    tmp_path: Path,
    tiny_model: Callable[..., Path],
    tiny_plan: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = tiny_model()
    plan = tiny_plan(base, activation="relu")
    server.repos[REPO] = {"x-Q4_K_M.gguf": base.read_bytes(), f"x-Q4_K_M{SIDECAR_SUFFIX}": plan.read_bytes()}
    cache = tmp_path / "commands"
    options = ("--hf-repo", REPO, "-p", "The river", "-n", 4, "--temp", 0, "--sparsity", "exact", "--strict")
    online = run(server, cache, "run", *options)
    assert online.returncode == 0 and "exact x 4" in online.stderr, online.stderr
    n_requests = len(server.requests)
    offline = run(server, cache, "run", *options, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0 and offline.stdout == online.stdout, offline.stderr
    assert len(server.requests) == n_requests
    assert len(server.downloads()) == 2
    assert cli.main(["inspect", "--hf-repo", REPO, "--hf-file", f"x-Q4_K_M{SIDECAR_SUFFIX}"]) == 0
    assert "relu" in capsys.readouterr().out


def test_profile_of_a_fetched_model_needs_a_place_for_the_plan(
    server: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("some")
    assert cli.main(["profile", "--hf-repo", REPO, "--text", str(text)]) == 1
    assert capsys.readouterr().err.startswith("powerinfer: out: --hf-repo was given without it")


# ---- Checkpoints ---------------------------------------------------------------------------------------------------

CHECKPOINT = ("config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja")
SAFETENSORS = (
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
)
TORCH_FILES = ("pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json")
OTHER_FILES = ("README.md", "modeling.py", "onnx/model.onnx", "original/consolidated.00.pth", "tf_model.h5")


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        (("model.safetensors", "pytorch_model.bin"), ("model.safetensors",)),
        (
            (*SAFETENSORS, *TORCH_FILES),
            SAFETENSORS,
        ),
        (
            TORCH_FILES,
            TORCH_FILES,
        ),
    ],
)
def test_checkpoint_is_fetched_without_what_the_converter_doesnt_read(
    server: HubServer, weights: tuple[str, ...], wanted: tuple[str, ...]
) -> None:
    server.repos[REPO] = {name: b"{}" + name.encode() for name in (*CHECKPOINT, *OTHER_FILES, *weights)}
    folder = resolve("--hf-repo", REPO, checkpoint=True)
    assert sorted(path.name for path in folder.iterdir()) == sorted((*CHECKPOINT, *wanted))


def make_checkpoint(folder: Path) -> Path:
    """A small checkpoint that can be converted."""
    return hf_checkpoints.FAMILIES["llama-relu"]().save(folder)


def test_repository_without_weights_is_no_checkpoint(server: HubServer) -> None:
    with pytest.raises(OptionError, match=r"neither model.safetensors nor pytorch_model.bin"):
        resolve("--hf-repo", REPO, checkpoint=True)


def test_converted_model_is_named_after_its_repository(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "powerinfer_py.tools.hf_tokenizer", tiny_models.stand_in_tokenizer())
    folder = make_checkpoint(tmp_path / "checkpoint")
    server.repos["someone/tiny-relu"] = {path.name: path.read_bytes() for path in folder.iterdir()}
    out = tmp_path / "x.powerinfer.gguf"
    assert cli.main(["convert", "--hf-repo", "someone/tiny-relu", "-o", str(out)]) == 0
    assert b"tiny-relu" in read_plan(out).open_base().files[0].entry("general.name")


def test_name_of_a_checkpoint_outside_of_the_cache_is_its_folders(tmp_path: Path) -> None:
    assert Checkpoint(make_checkpoint(tmp_path / "some-model")).name == "some-model"


# ---- The hub -------------------------------------------------------------------------------------------------------


def test_broken_connection_is_resumed_where_it_ended(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tiny-Q4_K_M.gguf"
    server.repos[REPO][name] = os.urandom(100_000)
    server.breaks[name] = 65_000
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    assert resolve("--hf-repo", REPO).read_bytes() == server.repos[REPO][name]
    ranges = [line for line in server.requests if "bytes=" in line]
    assert len(ranges) == 1 and ranges[0].endswith(f"{name} bytes=60000-")


def test_second_time_nothing_is_fetched(server: HubServer) -> None:
    first = resolve("--hf-repo", REPO)
    assert resolve("--hf-repo", REPO) == first and len(server.downloads()) == 1
    server.repos[REPO]["tiny-Q4_K_M.gguf"] = b"a newer one"
    assert resolve("--hf-repo", REPO).read_bytes() == b"a newer one"
    assert resolve("--hf-repo", REPO, "--hf-revision", first.parent.name) == first


def test_hub_that_is_away_is_noted_and_the_cache_used(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = resolve("--hf-repo", REPO)
    server.down = True
    assert resolve("--hf-repo", REPO) == path
    assert len(caplog.messages) == 1 and "its files in the cache are used" in caplog.text
    with pytest.raises(OptionError, match="--strict refuses the cache"):
        resolve("--hf-repo", REPO, "--strict")
    with pytest.raises(OptionError, match=r"in the cache \(the hub can't be reached.*0 GGUFs named Q8_0"):
        resolve("--hf-repo", f"{REPO}:Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    caplog.clear()
    assert resolve("--hf-repo", REPO, "--strict") == path and not caplog.messages  # it was asked for
    with pytest.raises(OptionError, match=r"someone/other: HF_HUB_OFFLINE is set, and the cache .* has nothing of it"):
        resolve("--hf-repo", "someone/other")


def test_no_network_and_nothing_in_the_cache(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OptionError, match=r"the hub can't be reached .* has nothing of it at v1"):
        resolve("--hf-repo", REPO, "--hf-revision", "v1")


def test_errors_of_the_hub_are_one_sentence_each(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repos["someone/gated"] = {"x.gguf": b"x"}
    server.gated.add("someone/gated")
    for words, text in (
        (("--hf-repo", "no such name"), "'no such name'; expected OWNER/NAME"),
        (("--hf-repo", "someone/missing"), "someone/missing: .* has no such model, or it is private"),
        (("--hf-repo", REPO, "--hf-revision", "v7"), "has no revision v7"),
        (("--hf-repo", "someone/gated"), "someone/gated: is gated.*accept the terms at .*/someone/gated"),
    ):
        with pytest.raises(OptionError, match=text) as error:
            resolve(*words)
        assert "\n" not in str(error.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert resolve("--hf-repo", "someone/gated").read_bytes() == b"x"


def test_full_disk_is_one_sentence(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(
        OptionError, match=r"no space is left for it in .*cache; expected some; make some, or set HF_HOME"
    ):
        resolve("--hf-repo", REPO)


def test_missing_package_names_the_extra(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(OptionError, match=r"huggingface_hub isn't installed; .*powerinfer_py\[hub\]"):
        resolve("--hf-repo", REPO)
