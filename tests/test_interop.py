"""LangChain, LlamaIndex and the openai client work with `powerinfer serve`, and LangChain's llama.cpp integration with `Llama`.

What runs is the code of docs/interoperability.md, block by block; nothing of it reaches beyond this machine.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import powerinfer_py

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "interoperability.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8080"


def blocks(heading: str) -> list[str]:
    """The Python blocks below a heading of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where smol.gguf is, with its plan."""
    path = tmp_path_factory.mktemp("interop")
    (path / "smol.gguf").symlink_to(smollm2)
    plan = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.powerinfer.gguf"
    (path / "smol.powerinfer.gguf").symlink_to(plan)
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """The page's server, on a free port."""
    command = re.search(r"^powerinfer serve (.*)$", PAGE, re.MULTILINE).group(1).split()
    server = subprocess.Popen(
        [sys.executable, "-m", "powerinfer_py.cli", "serve", *command, "--port", "0"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = server.stdout.readline()
        assert line.startswith("listening on "), line
        yield line.split()[-1]
    finally:
        server.terminate()
        assert server.wait(30) == 0
        server.stdout.close()


@pytest.fixture(autouse=True)
def only_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that isn't this machine's can't be looked up."""
    look_up = socket.getaddrinfo

    def look_up_local(host: Any, *args: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        assert name in ("127.0.0.1", "localhost", None), f"{name} was asked for"
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_local)


def run_block(block: str, url: str = ADDRESS) -> dict[str, Any]:
    """Runs a block.

    Returns:
        What it defined.
    """
    assert url == ADDRESS or ADDRESS in block
    # tool() and pydantic look at the module of what is defined.
    names: dict[str, Any] = {"__name__": "block"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # langchain_community says that it is no longer developed
        exec(compile(block.replace(ADDRESS, url), "interoperability.md", "exec", dont_inherit=True), names)
    return names


def test_openai_client(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("The openai client")
    names = run_block(block, url)
    assert names["answer"].choices[0].message.content
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_langchain_chats(url: str) -> None:
    names = run_block(blocks("LangChain")[0], url)
    answer = names["answer"]
    # Not the same texts: what is in the cache and in the batch moves the logits of a quantized model.
    assert answer.content and "".join(names["parts"]) and names["answers"][0].content
    assert answer.usage_metadata["input_tokens"] > 0 and 0 < answer.usage_metadata["output_tokens"] <= 16
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert len(names["parts"]) > 1 and names["answers"][1].content


def test_langchain_structured_output(url: str) -> None:
    names = run_block(blocks("LangChain")[1], url)
    for trip in (names["trip"], names["same"]):
        assert isinstance(trip, names["Trip"]) and trip.town in ("Paris", "Rome", "Oslo")


def test_langchain_tools(url: str) -> None:
    names = run_block(blocks("LangChain")[2], url)
    called = names["called"]
    assert called["name"] == "add" and set(called["args"]) == {"a", "b"}
    assert names["add"].invoke(called["args"]) == called["args"]["a"] + called["args"]["b"]
    streamed = names["chat"].bind_tools([names["add"]], tool_choice="add").stream("What is 2 + 3?")
    whole = next(streamed)
    for part in streamed:
        whole += part
    assert whole.tool_calls[0]["name"] == "add" and set(whole.tool_calls[0]["args"]) == {"a", "b"}


def test_langchain_completions_and_embeddings(url: str) -> None:
    names = run_block(blocks("LangChain")[3], url)
    assert names["text"] and "".join(names["parts"]) and len(names["parts"]) > 1
    rows = np.array([*names["rows"], names["query"]])
    assert rows.shape == (3, 576) and np.linalg.norm(rows, axis=1) == pytest.approx(1, abs=1e-5)
    assert rows[0] @ rows[2] == pytest.approx(1, abs=1e-3) and rows[0] @ rows[1] < 0.999


def test_langchain_runs_on_llama_after_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (block,) = blocks("LangChain without a server")
    with contextlib.ExitStack() as stack:
        stack.callback(powerinfer_py.uninstall)
        names = run_block(block)
        for wrapper in (names["llm"], names["chat"]):
            llama = wrapper.client
            stack.callback(llama.close)
            assert type(llama) is powerinfer_py.Llama and llama.sparsity == "dense"
            assert llama.stats().computed_by == "powerinfer" and llama.stats().n_tokens > 0
        assert names["text"] and "".join(names["parts"]) and len(names["parts"]) > 1
        assert names["answer"].content and len(names["query"]) == 576


def test_llama_index(url: str) -> None:
    (block,) = blocks("LlamaIndex")
    names = run_block(block, url)
    assert names["answer"].message.content and "".join(names["parts"]) and len(names["parts"]) > 1
    assert names["text"].text and "".join(names["pieces"]) and len(names["pieces"]) > 1
    assert names["llm"].metadata.context_window == 2048
