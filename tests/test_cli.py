"""The console command: verbs, one-line errors, exit codes; text from `powerinfer run`."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from powerinfer_py import cli


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "powerinfer_py.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )


def assert_one_line_error(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if not line.startswith("powerinfer: note:")]
    assert len(errors) == 1 and errors[0].startswith("powerinfer: "), done.stderr
    for word in words:
        assert word in errors[0]


@pytest.fixture
def planned(tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]) -> tuple[Path, Path]:
    path = tiny_model()
    return path, tiny_plan(path, activation="relu", order_seed=1)


def test_help_lists_every_verb() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(f"  {verb}" in done.stdout for verb in cli.VERBS)
    assert run().stdout == done.stdout


def test_version_names_package_core_and_llama_cpp() -> None:
    done = run("--version")
    assert done.returncode == 0 and done.stdout.startswith("powerinfer 0.") and "llama_cpp 0.3.36" in done.stdout


@pytest.mark.parametrize("verb", cli.VERBS)
def test_verb_has_help(verb: str) -> None:
    module = importlib.import_module(cli.VERBS[verb].module)
    assert callable(getattr(module, cli.VERBS[verb].add_arguments))
    assert callable(getattr(module, cli.VERBS[verb].run))
    done = run(verb, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: powerinfer {verb}"), done.stderr


def test_unknown_verb_is_one_line_with_a_hint() -> None:
    assert_one_line_error(run("benhc"), "benhc", "did you mean bench?")


def test_unknown_flag_is_one_line_with_a_hint() -> None:
    assert_one_line_error(run("run", "model.gguf", "-p", "a", "--sparcity", "exact"), "--sparcity", "run --help")


def test_missing_model_is_one_line() -> None:
    assert_one_line_error(run("run", "missing.gguf", "-p", "a"), "missing.gguf")


def test_debug_variable_shows_the_traceback() -> None:
    done = run("run", "missing.gguf", "-p", "a", POWERINFER_DEBUG="1")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_run_prints_text_and_speed(planned: tuple[Path, Path]) -> None:
    model, plan = planned
    done = run("run", model, "--plan", plan, "-p", "The river", "-n", 8, "--temp", 0, "--sparsity", "exact")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "tokens/s" in done.stderr and "density 0." in done.stderr and "exact x 4" in done.stderr
    again = run("run", model, "--plan", plan, "-p", "The river", "-n", 8, "--temp", 0, "--sparsity", "exact")
    assert again.stdout == done.stdout


def test_run_with_seed_repeats_itself(planned: tuple[Path, Path]) -> None:
    model, plan = planned
    texts = [run("run", model, "--plan", plan, "-p", "a", "-n", 16, "-s", seed).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_run_chat_uses_the_template(planned: tuple[Path, Path]) -> None:
    model, plan = planned
    plain = run("run", model, "--plan", plan, "-p", "hello", "-n", 8, "--temp", 0)
    chat = run("run", model, "--plan", plan, "-p", "hello", "-n", 8, "--temp", 0, "--chat")
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout != plain.stdout


def test_run_compares_with_stock(planned: tuple[Path, Path]) -> None:
    model, plan = planned
    done = run("run", model, "--plan", plan, "-p", "The river came down", "-n", 16, "--temp", 0, "--compare")
    assert done.returncode == 0, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("sparse ") and "stock " in line and "ratio " in line


def test_run_compares_with_another_model_of_the_same_vocabulary(
    planned: tuple[Path, Path], tiny_model: Callable[..., Path], smollm2: Path
) -> None:
    model, plan = planned
    run_it = ("run", model, "--plan", plan, "-p", "a", "-n", 4, "--compare-with")
    done = run(*run_it, tiny_model(n_layer=1))
    assert done.returncode == 0, done.stderr
    assert re.match(r"sparse [\d.]+ tokens/s, stock [\d.]+ tokens/s, ratio ", done.stderr.splitlines()[-1])
    done = run(*run_it, smollm2)
    assert done.returncode == 1
    assert re.search(r"powerinfer: compare-with: .* has 49152 tokens; expected \d+, the model's", done.stderr)


def test_run_says_that_a_model_has_no_plan(tiny_model: Callable[..., Path]) -> None:
    done = run("run", tiny_model(), "-p", "a", "-n", 2)
    assert done.returncode == 0
    assert "powerinfer: note:" in done.stderr and "no plan" in done.stderr
    assert_one_line_error(run("run", tiny_model(), "-p", "a", "--strict"), "no plan")


def test_prompt_that_doesnt_fit_is_one_line(planned: tuple[Path, Path]) -> None:
    model, plan = planned
    assert_one_line_error(run("run", model, "--plan", plan, "-p", "a" * 600, "-c", 512), "prompt", "512")


def test_output_to_a_closed_pipe_is_quiet(smollm2: Path) -> None:
    options = ["-p", "Once upon a time", "-n", "100", "--sparsity", "dense"]
    command = [sys.executable, "-m", "powerinfer_py.cli", "run", smollm2, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == 1
    assert "Traceback" not in errors and "Exception" not in errors, errors


def test_ctrl_c_ends_with_130_and_no_traceback(smollm2: Path) -> None:
    options = ["-p", "Once upon a time", "-n", "1000", "--sparsity", "dense"]
    command = [sys.executable, "-m", "powerinfer_py.cli", "run", smollm2, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors, errors
