"""The timeline of a token: which blocks it takes from a trace, what ran when, and the picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from powerinfer_py.cli import main
from powerinfer_py.errors import OptionError
from powerinfer_py.tools import plot_timeline

PNG = b"\x89PNG\r\n\x1a\n"


def block(i_layer: int, begin: float, cpu: float, gpu: float = 0.0, n_tokens: int = 1) -> dict[str, Any]:
    """A block whose parts begin with it and take so many seconds; gpu 0: none."""
    return {
        "i_layer": i_layer, "n_tokens": n_tokens, "begin_s": begin, "end_s": begin + max(cpu, gpu),
        "cpu_begin_s": begin, "cpu_end_s": begin + cpu,
        "gpu_begin_s": begin if gpu else 0.0, "gpu_end_s": begin + gpu if gpu else 0.0,
    }  # fmt: skip


def test_the_last_token_computed_alone_is_taken() -> None:
    tokens = [[block(i, 10.0 * t + i, 0.5) for i in range(3)] for t in range(3)]
    prompt = [block(i, -10.0 + i, 0.5, n_tokens=5) for i in range(3)]
    trace = [*prompt, *tokens[0], *tokens[1], *tokens[2]]
    assert plot_timeline.last_token(trace) == tokens[2]
    assert plot_timeline.last_token([*trace, *prompt]) == tokens[2]
    assert plot_timeline.last_token(prompt) == []


def test_spans_say_who_worked_and_who_waited() -> None:
    found = plot_timeline.spans([block(0, 1.0, cpu=0.25, gpu=0.75), block(1, 2.0, cpu=0.5)])
    assert found["CPU"] == [(0.0, 250.0), (1000.0, 500.0)]
    assert found["device"] == [(0.0, 750.0)]
    assert found["CPU waits"] == [(250.0, 500.0)]
    assert found["other work"] == [(750.0, 250.0)]


def test_run_draws_the_timeline(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model()
    picture = tmp_path / "token.png"
    arguments = ["run", str(model), "--plan", str(tiny_plan(model)), "-p", "a", "--timeline", str(picture)]
    assert main([*arguments, "-n", "4", "--temp", "0"]) == 0
    assert picture.read_bytes().startswith(PNG)
    assert str(picture) in capfd.readouterr().err
    with pytest.raises(OptionError, match="at least two tokens"):
        plot_timeline.write_plot(picture, [], "")
