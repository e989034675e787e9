"""A model with some keys and tensors changed: everything else stays as it was, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_models
from gguf import GGMLQuantizationType, GGUFValueType
from test_convert import stock_logits

from powerinfer_py.format import BaseModel
from powerinfer_py.gguf_file import GgufFile
from powerinfer_py.tools.rewrite_gguf import TensorSource, string_entry, u32_array_entry, u32_entry, write_changed

UP = "blk.1.ffn_up.weight"


def quiet(n_done: int, n_all: int) -> None:
    """A progress that nobody sees."""


def halved(base: BaseModel, name: str, row_type: GGMLQuantizationType) -> TensorSource:
    """A matrix of half the values, in another type."""
    n_rows, n_values = base.tensor(name).rows_shape

    def data() -> np.ndarray:
        return tiny_models.quantize_rows(base.rows_f32(name) / 2, row_type).view(np.uint8).reshape(-1)

    return TensorSource.matrix(name, row_type, n_rows, n_values, data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with keys of every type, and an alignment of its own."""
    source = gguf.GGUFReader(tiny_models.write_tiny_model(tmp_path / "plain.gguf", n_layer=2, row_type="Q4_0"))
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_custom_alignment(128)
    for key, field in source.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    numbers = {
        "uint8": 200,
        "int8": -3,
        "uint16": 60000,
        "int16": -4,
        "int32": -5,
        "uint64": 1 << 40,
        "int64": -(1 << 40),
    }
    for kind, number in numbers.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", number)
    writer.add_float64("x.f64", 0.1)
    writer.add_bool("x.bool", True)
    writer.add_string("x.text", "na\u00efve \u65e5\u672c")
    writer.add_array("x.texts", ["", "a", "\u00e9"])
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def test_without_changes_it_is_the_same_file(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_changed(BaseModel(model), tmp_path / "out.gguf", {}, [], lambda *n: seen.append(n))
    assert (tmp_path / "out.gguf").read_bytes() == model.read_bytes()
    assert [n for n, _ in seen] == sorted(n for n, _ in seen) and len({n for _, n in seen}) == 1
    assert 0.99 < seen[-1][0] / seen[-1][1] <= 1.0


def test_only_what_is_named_changes(model: Path, tmp_path: Path) -> None:
    base, out = BaseModel(model), tmp_path / "out.gguf"
    keys = {"general.name": string_entry("general.name", "new"), "x.new": u32_entry("x.new", 7)}
    keys["x.list"] = u32_array_entry("x.list", [3, 1 << 31])
    write_changed(base, out, keys, [halved(base, UP, GGMLQuantizationType.Q8_0)], quiet)
    before, after = GgufFile(model), GgufFile(out)
    assert list(after.values) == [*before.values, "x.new", "x.list"]
    assert (after.get("general.name"), after.get("x.new"), after.get("x.list")) == ("new", 7, [3, 1 << 31])
    for key in before.values:
        assert key == "general.name" or after.entry(key) == before.entry(key), key
    assert list(after.tensors) == list(before.tensors)
    for name, tensor in before.tensors.items():
        found = after.tensors[name]
        assert found.ne == tensor.ne and found.offset % 128 == 0
        if name != UP:
            assert found.type == tensor.type and np.array_equal(after.raw(name), before.raw(name)), name
    assert after.tensors[UP].type == GGMLQuantizationType.Q8_0
    assert np.allclose(after.rows_f32(UP), before.rows_f32(UP) / 2, atol=0.02)
    assert np.abs(stock_logits(out) - stock_logits(model)).max() > 1e-3  # it loads, and something changed
    assert gguf.GGUFReader(out).fields["x.text"].contents() == "na\u00efve \u65e5\u672c"


def test_parts_of_a_split_model_are_joined(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    base = BaseModel(tiny_model(n_layer=2, split_max_tensors=5))
    assert len(base.files) > 2
    out = tmp_path / "out.gguf"
    write_changed(base, out, {}, [halved(base, UP, GGMLQuantizationType.F32)], quiet)
    joined = GgufFile(out)
    assert not any(key.startswith("split.") for key in joined.values)
    assert set(joined.values) == {key for key in base.files[0].values if not key.startswith("split.")}
    for name in base.tensors:
        assert name == UP or np.array_equal(joined.raw(name), base.raw(name))
    assert np.array_equal(joined.rows_f32(UP), base.rows_f32(UP) / 2)
    assert len(BaseModel(out).files) == 1 and np.isfinite(stock_logits(out)).all()
