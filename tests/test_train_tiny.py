"""Training of the small ReLU model: what it learns, what steers it, what it writes, and that it resumes exactly."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from powerinfer_py.errors import OptionError
from powerinfer_py.tools import train_tiny
from powerinfer_py.tools.tiny_llama import TinyLlama, TinyShape
from powerinfer_py.tools.train_tiny import TrainOptions

# Float32 sums in another order, on logits of about 1.
LOGITS_TOLERANCE = 1e-4
WORDS = (
    "the model reads a text and writes what it has seen before because every word follows from those it knows".split()
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 documents of words that follow each other by a rule."""
    rng = random.Random(0)
    documents = []
    for _ in range(300):
        place = rng.randrange(len(WORDS))
        words = []
        for _ in range(rng.randrange(30, 60)):
            words.append(WORDS[place])
            place = (place + rng.choice((1, 1, 1, 5))) % len(WORDS)
        documents.append(" ".join(words) + ".\n")
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\f".join(documents), encoding="utf-8")
    return path


def small(text: Path, out: Path, **changes: object) -> TrainOptions:
    """Options of a run that takes a second."""
    options = TrainOptions(
        text=(text,),
        out=out,
        steps=30,
        vocab=300,
        embd=32,
        layers=2,
        ff=64,
        heads=2,
        heads_kv=1,
        ctx=32,
        batch=4,
        density=1.0,
        gate_rank=0,
        lr=1e-2,
        threads=1,
        log_steps=5,
    )
    return replace(options, **changes)


def nothing(trainer: train_tiny.Trainer, entry: dict | None) -> None:
    """A report that nobody reads."""


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[train_tiny.Trainer, Path]:
    out = tmp_path_factory.mktemp("trained") / "model"
    return train_tiny.train_tiny(small(text, out), nothing), out


def test_loss_falls(trained: tuple[train_tiny.Trainer, Path]) -> None:
    log = trained[0].state.log
    assert [entry["step"] for entry in log] == [5, 10, 15, 20, 25, 30]
    assert log[0]["loss"] == pytest.approx(np.log(300), rel=0.05)
    assert log[-1]["loss"] < log[0]["loss"] - 0.2
    assert log[-1]["held_out_loss"] < log[0]["loss"] - 0.2
    assert log[-1]["tokens"] == 30 * 4 * 32


def test_folder_loads_in_transformers_with_equal_logits(trained: tuple[train_tiny.Trainer, Path]) -> None:
    import transformers

    trainer, out = trained
    model = transformers.LlamaForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    assert model.config.hidden_act == "relu"
    tokens = torch.from_numpy(trainer.check[:2, :-1])
    with torch.no_grad():
        expected = model(tokens).logits
        found = trainer.model(tokens).logits
    assert (found - expected).abs().max() < LOGITS_TOLERANCE
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    line = "It writes  what\n\tit has seen: 42 na\u00efve \u65e5\u672c."
    assert tokenizer.decode(tokenizer(line)["input_ids"]) == line
    assert tokenizer.eos_token_id == 0 and len(tokenizer) == 300


def test_resumed_run_equals_an_uninterrupted_one(text: Path, tmp_path: Path) -> None:
    options = small(text, tmp_path / "whole", density=0.3, gate_rank=8)
    whole = train_tiny.train_tiny(options, nothing)
    options = replace(options, out=tmp_path / "model")

    def interrupt(trainer: train_tiny.Trainer, entry: dict | None) -> None:
        if trainer.state.step == 13:
            signal.raise_signal(signal.SIGINT)

    first = train_tiny.train_tiny(options, interrupt)
    assert first.state.step == 13 and first.progress() < 1.0
    second = train_tiny.train_tiny(replace(options, resume=True), nothing)
    assert second.state.step == 30
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    assert second.state.pressure == whole.state.pressure
    assert second.state.log[-1]["held_out_loss"] == whole.state.log[-1]["held_out_loss"]


def test_pressure_takes_density_to_the_aim_and_kills_no_layer(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_tiny, "_CONTROL_RATE", 0.1)  # a run of 150 steps steers faster than one of thousands
    options = small(text, tmp_path / "model", steps=150, density=0.2, log_steps=50)
    log = train_tiny.train_tiny(options, nothing).state.log
    for density, dead in zip(log[-1]["density"], log[-1]["dead"]):
        assert 0.12 < density < 0.28
        assert dead < 48


def test_pull_concentrates_gates_on_their_leading_directions(text: Path, tmp_path: Path) -> None:
    tails = []
    for pull in (0.0, 20.0):
        options = small(text, tmp_path / f"model-{pull}", gate_rank=8, gate_pull=pull, steps=60)
        tails.append(train_tiny.train_tiny(options, nothing).state.log[-1]["gate_tail"])
    for without, with_pull in zip(*tails):
        assert with_pull < 0.5 * without


def test_gate_pull_is_the_decay_of_what_lies_outside() -> None:
    gate = torch.nn.Parameter(torch.randn(24, 12, generator=torch.Generator().manual_seed(1)))
    before = gate.detach().double()
    pull = train_tiny.GatePull([gate], 5)
    pull.find_bases()
    pull.apply(0.25)
    u, s, v = torch.linalg.svd(before, full_matrices=False)
    s[5:] *= 0.75
    assert torch.allclose(gate.detach().double(), u @ torch.diag(s) @ v, atol=1e-5)


def test_density_counts_neurons_and_pressure_measures_them() -> None:
    model = TinyLlama(TinyShape(n_vocab=64, n_embd=32, n_layer=1, n_ff=64, n_head=2, n_head_kv=1, n_ctx=16))
    seen = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    output = model(torch.arange(16)[None])
    a = seen[0].relu().double()
    assert float(output.density[0]) == pytest.approx(float((a > 0).double().mean()))
    assert output.pressure[0].item() == pytest.approx(float(a.mean() ** 2 / a.square().mean()), rel=1e-5)
    assert torch.equal(output.active[0], (a > 0).flatten(0, 1).any(dim=0))


def test_batches_cover_the_text_once_an_epoch() -> None:
    options = small(Path("text"), Path("out"), batch=3, ctx=8)
    tokens = np.arange(8 * 10 + 1)
    n_windows = 9  # one is lost to the shifting offset
    firsts = [row[0] for step in range(3) for row in train_tiny.batch_tokens(tokens, step, options)]
    assert len(set(firsts)) == n_windows and len({first % 8 for first in firsts}) == 1
    again = [row[0] for step in range(3, 6) for row in train_tiny.batch_tokens(tokens, step, options)]
    assert firsts != again and len(set(again)) == n_windows
    for row in train_tiny.batch_tokens(tokens, 7, options):
        assert np.array_equal(row, np.arange(row[0], row[0] + 9))


def test_no_document_is_trained_on_and_held_out(text: Path) -> None:
    train, held_out = train_tiny.read_documents((text, text))
    assert held_out and not set(train) & set(held_out)


def test_log_and_curve_are_written(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    assert train_tiny.run(small(text, out, steps=5)) == 0
    log = json.loads((out / "training" / "log.json").read_text(encoding="utf-8"))
    assert log["progress"] == 1.0 and log["options"]["seed"] == 1 and log["options"]["text"] == ["words.txt"]
    assert (out / "training" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "held-out.txt").read_text(encoding="utf-8")
    assert "held out" in capsys.readouterr().out
    assert not list(out.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": (Path("missing.txt"),)}, r"text: missing\.txt doesn't exist; expected"),
        ({"density": 0.0}, "density: 0.0; expected"),
        ({"heads": 3}, "heads: 3 with 1"),
        ({"steps": 0}, "length: 0 steps"),
        ({"batch": 0}, "batch: 0; expected"),
        ({"vocab": 70000}, "vocab: 70000; expected at most 65536"),
        ({"vocab": 5000}, "expected 5000; give more text"),
        ({"ctx": 100000}, "give more text or a smaller --ctx"),
        ({"resume": True}, "checkpoint.pt doesn't exist; expected a checkpoint"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_cannot_be_trained_is_one_clear_error(text: Path, tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        train_tiny.train_tiny(replace(small(text, tmp_path / "model"), **changes), nothing)


def test_text_without_documents_to_hold_out_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("one document", encoding="utf-8")
    with pytest.raises(OptionError, match="give more documents, with form feeds between them"):
        train_tiny.read_documents((path,))
    path.write_bytes(b"\xf6")
    with pytest.raises(OptionError, match="expected a UTF-8 text file"):
        train_tiny.read_documents((path,))


def test_resume_with_other_options_is_refused(text: Path, tmp_path: Path) -> None:
    options = small(text, tmp_path / "model", steps=2)
    train_tiny.train_tiny(options, nothing)
    with pytest.raises(OptionError, match=r"seed is 1; this run has 2; give the same options"):
        train_tiny.train_tiny(replace(options, resume=True, seed=2), nothing)


def test_missing_package_is_named(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_tiny, "_PACKAGES", ("json", "no_such_package"))
    with pytest.raises(OptionError, match=r"no_such_package isn't installed; .*powerinfer_py\[train\]"):
        train_tiny.train_tiny(small(text, tmp_path / "model"), nothing)
    assert not (tmp_path / "model").exists()


def test_command_line_gives_the_options_and_their_defaults() -> None:
    args = vars(train_tiny.build_parser().parse_args(["--text", "a", "b", "--out", "c", "--density", "0.3"]))
    options = TrainOptions(**{**args, "text": tuple(args["text"])})
    assert options == TrainOptions(text=(Path("a"), Path("b")), out=Path("c"), density=0.3)


def test_pages_become_text_with_their_lines_kept_where_they_matter(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<html><head><title>T</title></head><body><nav>menu</nav><h1>One &amp; two</h1><p>Some\n  words<br>here</p>"
        "<pre>def f():\n    return 1</pre><ul><li>a<li>b</ul><script>x</script></body></html>",
        encoding="utf-8",
    )
    script = Path(__file__).resolve().parent.parent / "models" / "tiny-relu" / "html_text.py"
    done = subprocess.run([sys.executable, script, page, page], capture_output=True, text=True, check=True)
    text = "One & two\n\nSome words\nhere\n\ndef f():\n    return 1\n\na\nb\n"
    assert done.stdout == (text + "\f") * 2
