"""pack and rebind: the packed base is the stock file again, and no half-written file is ever left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
import tiny_models

from powerinfer_py import _core, cli
from powerinfer_py import format as pi_format
from powerinfer_py.errors import FormatError, OptionError, PlanError
from powerinfer_py.tools import pack_plan


def logits(path: Path) -> np.ndarray:
    """(tokens, n_vocab) of stock llama.cpp on one short text."""
    llama = llama_cpp.Llama(str(path), n_ctx=64, verbose=False, logits_all=True)
    tokens = llama.tokenize(b"hot and cold")
    llama.eval(tokens)
    result = np.array(llama.scores[: len(tokens)])
    llama.close()
    return result


def files_in(folder: Path) -> list[str]:
    """All names, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tiny_models.write_tiny_model(tmp_path / "in" / "m.gguf")


@pytest.fixture
def sidecar(model: Path) -> Path:
    return tiny_models.write_tiny_plan(
        model, order_seed=1, frequency=True, predictor="linear", threshold=0.1, loss=0.01
    )


def test_packed_file_is_taken_apart_into_what_it_was_made_of(model: Path, sidecar: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.powerinfer.gguf"
    pack_plan.pack(model, sidecar, packed)
    with _core.Plan.open(packed) as plan:
        assert plan.base_path == packed
        content = packed.read_bytes()[plan.base_offset :]
        assert plan.base_offset % 64 == 0 and content[: model.stat().st_size] == model.read_bytes()
    output = tmp_path / "n.gguf"
    assert pack_plan.extract(packed, output) == tmp_path / "n.powerinfer.gguf"
    assert output.read_bytes() == model.read_bytes()
    assert np.array_equal(logits(output), logits(model))
    before, after = pi_format.read_plan(sidecar), pi_format.read_plan(tmp_path / "n.powerinfer.gguf")
    assert after.base_file == "n.gguf" and after.loss == before.loss
    for layer, other in zip(before.layers, after.layers):
        assert np.array_equal(layer.neuron_order, other.neuron_order)
        assert np.array_equal(layer.fc2.data, other.fc2.data)
    after.open_base()


def test_split_model_is_merged(tmp_path: Path) -> None:
    first = tiny_models.write_tiny_model(tmp_path / "parts.gguf", split_max_tensors=7, row_type="F16")
    whole = tiny_models.write_tiny_model(tmp_path / "whole.gguf", row_type="F16")
    sidecar = tiny_models.write_tiny_plan(first)
    packed = tmp_path / "packed.powerinfer.gguf"
    pack_plan.pack(first, sidecar, packed)
    _core.Plan.open(packed).close()
    merged = tmp_path / "merged.gguf"
    pack_plan.extract(packed, merged)
    assert np.array_equal(logits(merged), logits(whole))
    keys = pi_format.GgufFile(merged).values
    assert not [key for key in keys if key.startswith("split.")]
    assert set(keys) == set(pi_format.GgufFile(whole).values)


def test_what_cannot_be_packed_is_refused(
    model: Path, sidecar: Path, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    packed = tmp_path / "packed.powerinfer.gguf"
    with pytest.raises(PlanError, match="layer 0's FFN has digest"):
        pack_plan.pack(tiny_model(seed=5), sidecar, packed)
    with pytest.raises(FormatError, match="expected 'powerinfer'"):
        pack_plan.pack(model, model, packed)
    with pytest.raises(FormatError, match="isn't a file"):
        pack_plan.pack(tmp_path / "none.gguf", sidecar, packed)
    with pytest.raises(OptionError, match="is an input"):
        pack_plan.pack(model, sidecar, model)
    with pytest.raises(PlanError, match="carries no base model"):
        pack_plan.extract(sidecar, tmp_path / "n.gguf")
    assert files_in(tmp_path) == ["in"]
    pack_plan.pack(model, sidecar, packed)
    with pytest.raises(PlanError, match="carries its base model already"):
        pack_plan.pack(model, packed, tmp_path / "twice.powerinfer.gguf")
    with pytest.raises(OptionError, match=r"ending in \.gguf"):
        pack_plan.extract(packed, tmp_path / "n.powerinfer.gguf")
    assert files_in(tmp_path) == ["in", "packed.powerinfer.gguf"]


def test_interrupted_pack_leaves_nothing(
    model: Path, sidecar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "packed.powerinfer.gguf"
    pack_plan.pack(model, sidecar, packed)
    content = packed.read_bytes()

    def stop(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(pi_format, "copy_bytes", stop)
    with pytest.raises(KeyboardInterrupt):
        pack_plan.pack(model, sidecar, packed)
    with pytest.raises(KeyboardInterrupt):
        pack_plan.extract(packed, tmp_path / "n.gguf")
    assert files_in(tmp_path) == ["in", "packed.powerinfer.gguf"]
    assert packed.read_bytes() == content


def test_plan_is_rebound_to_another_quantization(sidecar: Path, tmp_path: Path) -> None:
    other = tiny_models.write_tiny_model(tmp_path / "q.gguf", row_type="Q8_0")
    with pytest.raises(PlanError, match="digest"):
        _core.Plan.open(sidecar, other)
    output = tmp_path / "q.powerinfer.gguf"
    pack_plan.rebind(sidecar, other, output)
    assert pi_format.find_sidecar(other) == output
    before, after = pi_format.read_plan(sidecar), pi_format.read_plan(output)
    after.open_base()
    _core.Plan.open(output).close()
    for layer, old in zip(after.layers, before.layers):
        assert (layer.threshold, layer.predictor) == (old.threshold, old.predictor)
        assert np.array_equal(layer.neuron_order, old.neuron_order)
        assert layer.digest != old.digest


def test_plan_is_not_rebound_to_other_shapes_or_with_weights_of_its_own(
    model: Path, sidecar: Path, tmp_path: Path
) -> None:
    output = tmp_path / "new.powerinfer.gguf"
    other = tiny_models.write_tiny_model(tmp_path / "other.gguf", n_ff=96)
    with pytest.raises(PlanError, match="layer 0's gate"):
        pack_plan.rebind(sidecar, other, output)
    deeper = tiny_models.write_tiny_model(tmp_path / "deeper.gguf", n_layer=5)
    with pytest.raises(PlanError, match="5 layers"):
        pack_plan.rebind(sidecar, deeper, output)
    with_weights = tiny_models.write_tiny_plan(model, tmp_path / "w.powerinfer.gguf", ffn_down_t="F32")
    with pytest.raises(PlanError, match="layer 0 stores ffn_down_t"):
        pack_plan.rebind(with_weights, model, output)
    assert not output.exists()


def test_packed_plan_is_rebound_to_a_sidecar(model: Path, sidecar: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.powerinfer.gguf"
    pack_plan.pack(model, sidecar, packed)
    plan = pack_plan.rebind(packed, model, tmp_path / "again.powerinfer.gguf")
    assert not plan.is_embedded and plan.base_file == "m.gguf"
    assert not pi_format.read_plan(tmp_path / "again.powerinfer.gguf").is_embedded


def test_command_line(model: Path, sidecar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "packed.powerinfer.gguf"
    assert cli.main(["pack", str(model), str(sidecar), "-o", str(packed)]) == 0
    assert str(packed) in capsys.readouterr().out
    assert cli.main(["pack", "--extract", str(packed), "-o", str(tmp_path / "n.gguf")]) == 0
    assert "n.powerinfer.gguf" in capsys.readouterr().out
    assert cli.main(["rebind", str(sidecar), str(model), "-o", str(tmp_path / "r.powerinfer.gguf")]) == 0
    captured = capsys.readouterr()
    assert (
        "loss (1.00 %) was measured with the old base" in captured.err and "m.gguf is looked for beside" in captured.err
    )
    assert cli.main(["pack", str(model), "-o", str(packed)]) == 1
    assert "1 files; expected 2" in capsys.readouterr().err
    assert cli.main(["rebind", str(model), str(model), "-o", str(tmp_path / "x.gguf")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_options_are_frozen() -> None:
    for options in (pack_plan.PackOptions, pack_plan.RebindOptions):
        assert options.__dataclass_params__.frozen and dataclasses.is_dataclass(options)
