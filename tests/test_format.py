"""format.py and gguf_file.py: what is written is read, by Python and by C++; what is against the format is one error."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
import tiny_models
from gguf import GGMLQuantizationType, GGUFValueType

from powerinfer_py import _core
from powerinfer_py import format as pi_format
from powerinfer_py.errors import FormatError, PlanError
from powerinfer_py.gguf_file import GgufFile, row_type_name

ROOT = Path(__file__).resolve().parent.parent
MAX_SECONDS = 1.0  # of CPU time; any damaged file must be refused within it (BUG_CASES 32)
VALUE_TYPES = {
    "u8": GGUFValueType.UINT8,
    "u32": GGUFValueType.UINT32,
    "i32": GGUFValueType.INT32,
    "u64": GGUFValueType.UINT64,
    "f32": GGUFValueType.FLOAT32,
    "bool": GGUFValueType.BOOL,
    "str": GGUFValueType.STRING,
}


class Fields:
    """An extended GGUF as dictionaries: key -> (type, value), tensor -> (array, type of byte rows)."""

    def __init__(self, path: Path) -> None:
        file = GgufFile(path)
        self.keys = {
            key: (value.type, file.get(key)) for key, value in file.values.items() if key != "general.architecture"
        }
        self.tensors = {
            name: (np.array(file.array(name)), tensor.type if file.array(name).dtype == np.uint8 else None)
            for name, tensor in file.tensors.items()
        }

    def write(self, path: Path, architecture: str = "powerinfer") -> Path:
        writer = gguf.GGUFWriter(path, architecture)
        writer.data_alignment = self.keys.get("general.alignment", ("u32", 32))[1]
        for key, (kind, value) in self.keys.items():
            if isinstance(value, list):
                writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=VALUE_TYPES[kind])
            else:
                writer.add_key_value(key, value, VALUE_TYPES[kind])
        for name, (array, raw_type) in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=raw_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def error_of(call: Callable[[], object]) -> str:
    """The text of the one error that the call must raise, in time."""
    start = time.process_time()
    with pytest.raises((FormatError, PlanError)) as caught:
        call()
    assert time.process_time() - start < MAX_SECONDS
    text = str(caught.value)
    assert "\n" not in text and ": " in text
    return text


def errors_of(path: Path, base: Path) -> tuple[str, str]:
    """What Python and C++ say about a file that is against the format."""
    return (
        error_of(lambda: pi_format.read_plan(path).open_base(base)),
        error_of(lambda: _core.Plan.open(path, base)),
    )


def saved_placement(plan: pi_format.Plan, **changes: object) -> pi_format.SavedPlacement:
    """A placement of a plan's first 64 neurons per covered layer, for one device with 1 MB for them."""
    fields = {
        "budget": "8GiB",
        "n_ctx": 4096,
        "devices": ("GPU 0",),
        "hot_bytes": (10**6,),
        "n_hot": tuple(min(64, layer.n_ff) for layer in plan.layers),
        "i_device": (0,) * plan.n_layer,
        "token_s": 0.25,
        "gap": 0.125,
        "model_hash": pi_format.model_hash(plan),
        "statistics_hash": pi_format.statistics_hash(plan),
    }
    return pi_format.SavedPlacement(**{**fields, **changes})


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(n_layer=3, n_ff=96)


@pytest.fixture
def plan_path(model: Path, tiny_plan: Callable[..., Path]) -> Path:
    """A plan with everything in it."""
    path = tiny_plan(
        model, order_seed=1, frequency=True, predictor="linear", rank=8, threshold=0.1, loss=0.01, ffn_down_t="F16"
    )
    plan = pi_format.read_plan(path)
    return pi_format.write_plan(dataclasses.replace(plan, placements=(saved_placement(plan),)), path)


# ---- Names and types -----------------------------------------------------------------------------------------------


def test_header_is_generated_from_format() -> None:
    assert (ROOT / "ggml" / "src" / "format-keys.h").read_text(encoding="ascii") == pi_format.header_text()


def test_row_type_names_are_those_of_ggml() -> None:
    base = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so.0"))
    base.ggml_type_name.restype = ctypes.c_char_p
    for row_type in GGMLQuantizationType:
        assert base.ggml_type_name(ctypes.c_int(row_type)).decode() == row_type_name(row_type)


@pytest.mark.parametrize(
    ("wished", "n", "expected"),
    [
        ("Q4_K", 512, "Q4_K"),
        ("Q4_K", 576, "Q5_0"),
        ("Q5_K", 576, "Q5_1"),
        ("Q6_K", 576, "Q8_0"),
        ("Q4_0", 576, "Q4_0"),
        ("Q4_0", 68, "F16"),
        ("Q4_K", 100, "F16"),
        ("Q2_K", 576, "Q5_0"),
        ("F32", 68, "F32"),
    ],
)
def test_row_type_follows_the_row_length(wished: str, n: int, expected: str) -> None:
    assert pi_format.derived_row_type(GGMLQuantizationType[wished], n).name == expected


@pytest.mark.parametrize("row_type", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_rows_keep_their_values(row_type: str) -> None:
    values = np.random.default_rng(0).standard_normal((7, 64), np.float32)
    rows = pi_format.Rows.of(values, GGMLQuantizationType[row_type])
    back = rows.to_f32()
    assert rows.n_rows == 7 and back.shape == values.shape
    assert np.sum(back * values) / np.linalg.norm(back) / np.linalg.norm(values) > 0.99


def test_rows_of_other_types_are_refused() -> None:
    with pytest.raises(FormatError, match="float64"):
        pi_format.Rows.of(np.zeros((2, 32)))
    with pytest.raises(FormatError, match="q4_K"):
        pi_format.Rows.of(np.zeros((2, 256), np.float32), GGMLQuantizationType.Q4_K)


# ---- Round trips ---------------------------------------------------------------------------------------------------


def test_plan_is_read_as_written(model: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    bare = pi_format.bare_plan(model)
    first = dataclasses.replace(
        bare.layers[0],
        activation_param=0.25,
        threshold=0.5,
        product_threshold=0.75,
        predictor="mlp",
        predictor_threshold=-1.5,
        predictor_recall=0.875,
        predictor_candidate_density=0.125,
        profile_tokens=1 << 40,
        profile_density=0.0625,
        neuron_order=rng.permutation(96),
        neuron_frequency=np.linspace(1, 0, 96, dtype=np.float32),
        ffn_down_t=pi_format.Rows.of(rng.standard_normal((96, 64), np.float32), GGMLQuantizationType.Q4_0),
        fc1=pi_format.Rows.of(rng.standard_normal((8, 64)).astype(np.float16)),
        fc2=pi_format.Rows.of(rng.standard_normal((96, 8), np.float32)),
    )
    layers = (first, pi_format.PlanLayer(), bare.layers[2])
    plan = dataclasses.replace(
        bare, layers=layers, loss=0.015625, corpus="caf\u00e9", predictor_input="residual", activation="relu_sqr"
    )
    devices = {"devices": ("one", "two"), "hot_bytes": (1 << 40, 0), "i_device": (0, 0, 1), "budget": "75%"}
    placements = (saved_placement(plan), saved_placement(plan, version=7, **devices))
    plan = dataclasses.replace(plan, placements=placements)
    path = pi_format.write_plan(plan, tmp_path / "all.powerinfer.gguf")
    read = pi_format.read_plan(path)
    assert read.path == path and not read.is_embedded
    for field in dataclasses.fields(pi_format.Plan):
        if field.name not in ("layers", "path"):
            assert getattr(read, field.name) == getattr(plan, field.name), field.name
    for i, layer in enumerate(layers):
        for field in dataclasses.fields(layer):
            written, found = getattr(layer, field.name), getattr(read.layers[i], field.name)
            if isinstance(written, pi_format.Rows):
                assert (found.row_type, found.n) == (written.row_type, written.n)
                written, found = written.data, found.data
            assert np.array_equal(written, found), field.name
    assert [layer["n_ff"] for layer in _core.Plan.open(path, model).layers()] == [96, 0, 96]


def test_saved_placement_is_used_again_only_for_the_same_model_statistics_budget_and_version(
    model: Path, plan_path: Path
) -> None:
    """BUG_CASES 12, in Python and in the core alike."""
    plan = pi_format.read_plan(plan_path)
    layer = plan.layers[1]
    small = saved_placement(plan, hot_bytes=(10**5,))
    two = saved_placement(plan, devices=("a", "b"), hot_bytes=(10**6, 500))
    placements = (small, *plan.placements, saved_placement(plan, version=2, hot_bytes=(10**7,)), two)
    changed = {
        "as it was": {},
        "frequency": {"neuron_frequency": layer.neuron_frequency * np.float32(0.5)},
        "order": {"neuron_order": layer.neuron_order[::-1]},
        "no order": {"neuron_order": None},
        "down_t": {"ffn_down_t": None},
        "predictor": {"predictor": "none", "fc1": None, "fc2": None},
    }
    wished = {(10**5,): 0, (10**6,): 1, (10**6 + 99_999,): 1, (10**6 - 1,): None, (10**6 + 120_000,): None}
    wished.update({(10**7,): None, (10**6, 500): 3, (10**6, 499): None, (0,): None, (): None})
    for name, fields in changed.items():
        layers = (plan.layers[0], dataclasses.replace(layer, **fields), plan.layers[2])
        other = dataclasses.replace(plan, layers=layers)
        stale = name not in ("as it was", "predictor")
        for hot_bytes, index in wished.items():
            found = pi_format.find_placement(dataclasses.replace(other, placements=placements), hot_bytes)
            assert found is (None if stale or index is None else placements[index]), (name, hot_bytes)
        # the writer leaves stale ones out, so the core is asked for each state of the file
        path = pi_format.write_plan(dataclasses.replace(other, placements=placements), plan_path)
        assert len(pi_format.read_plan(path).placements) == (0 if stale else 4)
        for hot_bytes, index in wished.items():
            assert _core.find_placement(path, model, list(hot_bytes)) == (None if stale else index), (name, hot_bytes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"order_seed": 3, "frequency": True},
        {"predictor": "linear", "rank": 64, "predictor_row_type": "Q8_0"},
        {"predictor": "mlp", "predictor_layers": [1], "ffn_down_t": "Q4_1", "activation": "relu"},
        {"activation": "drelu", "threshold": 0.5, "product_threshold": 0.25, "activation_param": 0.01},
        {"embedded": True, "order_seed": 4, "ffn_down_t": "BF16"},
    ],
)
@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_core_reads_what_python_wrote(
    arch: str, options: dict, tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    if arch != "llama" and options.get("activation") == "drelu":
        pytest.skip("drelu is gated")
    model = tiny_model(arch)
    path = tiny_plan(model, **options)
    embedded = options.get("embedded", False)
    assert _core.inspect_path(path)[0] == "extended" and pi_format.is_extended(path)
    with _core.Plan.open(path, None if embedded else model) as plan:
        read = pi_format.read_plan(path)
        assert (plan.n_layer, plan.n_embd) == (read.n_layer, read.n_embd) == (4, 64)
        assert plan.base_offset == read.base_offset and (read.base_offset > 0) == embedded
        assert [layer["n_ff"] for layer in plan.layers()] == [layer.n_ff for layer in read.layers] == [256] * 4
        assert read.base_offset % 64 == 0
    assert read.open_base(None if embedded else model).architecture == arch


def test_gguf_package_lists_a_plan(plan_path: Path) -> None:
    reader = gguf.GGUFReader(plan_path)
    assert reader.fields["powerinfer.format_version"].contents() == 1
    assert reader.fields["general.alignment"].contents() == 64
    assert "blk.0.neuron_order" in {tensor.name for tensor in reader.tensors}


def test_stock_llama_refuses_a_plan(plan_path: Path) -> None:
    with pytest.raises(ValueError, match="Failed to load model"):
        llama_cpp.Llama(str(plan_path), verbose=False)


def test_digest_is_as_specified(model: Path) -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(model).tensors}
    for i, digest in enumerate(pi_format.layer_digests(model)):
        expected = hashlib.sha256()
        for part in ("gate", "up", "down"):
            tensor = tensors[f"blk.{i}.ffn_{part}.weight"]
            expected.update(f"{tensor.name}\nf32\n{tensor.shape[0]},{tensor.shape[1]}\n".encode())
            expected.update(tensor.data.tobytes()[:4096])
        assert digest == expected.hexdigest()


def test_written_file_is_whole_or_absent(model: Path, plan_path: Path) -> None:
    good = plan_path.read_bytes()
    plan = pi_format.read_plan(plan_path)
    layer = dataclasses.replace(plan.layers[1], neuron_order=np.zeros(96, np.int32))
    bad = dataclasses.replace(plan, layers=(plan.layers[0], layer, plan.layers[2]))
    with pytest.raises(FormatError, match=r"plan-1\.powerinfer\.gguf: layer 1's neuron_order has 0 at position 1"):
        pi_format.write_plan(bad, plan_path)
    assert plan_path.read_bytes() == good
    with pytest.raises(FormatError):
        pi_format.write_plan(bad, plan_path.with_name("new.powerinfer.gguf"))

    def stop(n_done: int, n_total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pi_format.write_plan(plan, plan_path, progress=stop)
    assert [path.name for path in plan_path.parent.iterdir()] == [plan_path.name]
    assert plan_path.read_bytes() == good


# ---- Base models ---------------------------------------------------------------------------------------------------


def test_bare_plan_covers_every_dense_layer(tiny_model: Callable[..., Path]) -> None:
    for arch, activation, gated in (
        ("llama", "silu", True),
        ("gpt2", "gelu", False),
        ("falcon", "gelu", False),
        ("mpt", "gelu", False),
    ):
        plan = pi_format.bare_plan(tiny_model(arch))
        assert (plan.activation, plan.gated, plan.base_architecture) == (activation, gated, arch)
        assert [layer.n_ff for layer in plan.layers] == [256] * 4


def test_unknown_activation_must_be_named(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    fields = Fields(model)
    fields.keys = {key.replace("llama.", "newarch."): value for key, value in fields.keys.items()}
    fields.write(other, "newarch")
    assert "architecture 'newarch' isn't known" in error_of(lambda: pi_format.bare_plan(other))
    assert pi_format.bare_plan(other, "relu").activation == "relu"
    assert "'swish'" in error_of(lambda: pi_format.bare_plan(other, "swish"))


def test_layers_without_a_plain_ffn_have_a_reason(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    moe = pi_format.BaseModel(tiny_model(n_expert=4, n_ff=96))
    assert "experts" in moe.why_not_covered(0)
    assert [layer.n_ff for layer in pi_format.bare_plan(moe.path).layers] == [0] * 4
    model = tiny_model(n_layer=3, n_ff=96)
    vector = (np.zeros(96, np.float32), None)
    cases = {
        "blk.0.ffn_gate_inp.weight": "experts",
        "blk.0.ffn_gate.0.weight": "experts",
        "blk.0.ffn_sub_norm.weight": "not a plain FFN",
        "blk.0.nextn.enorm.weight": "MTP",
        "blk.0.ffn.act.scales": "not a plain FFN",
    }
    for name, reason in cases.items():
        fields = Fields(model)
        fields.tensors[name] = vector
        base = fields.write(tmp_path / "base.gguf", "llama")
        assert reason in pi_format.BaseModel(base).why_not_covered(0)
        assert [layer.n_ff for layer in pi_format.bare_plan(base).layers] == [0, 96, 96]
        with _core.Plan.open_bare(base) as plan:
            assert [layer["n_ff"] for layer in plan.layers()] == [0, 96, 96]
    fields = Fields(model)
    del fields.tensors["blk.1.ffn_gate.weight"]
    fields.tensors["blk.1.ffn_up.weight"] = (np.zeros((192, 64), np.float32), None)
    del fields.tensors["blk.2.ffn_up.weight"]
    base = pi_format.BaseModel(fields.write(tmp_path / "base.gguf", "llama"))
    assert "fused" in base.why_not_covered(1) and "no blk.2.ffn_up.weight" in base.why_not_covered(2)


def test_split_base_is_read_from_all_parts(tmp_path: Path, tiny_plan: Callable[..., Path]) -> None:
    whole = tiny_models.write_tiny_model(tmp_path / "whole.gguf")
    first = tiny_models.write_tiny_model(tmp_path / "parts.gguf", split_max_tensors=10)
    assert first.name == "parts-00001-of-00004.gguf"
    assert pi_format.layer_digests(first) == pi_format.layer_digests(whole)
    _core.Plan.open(tiny_plan(first), first)
    _core.Plan.open(tiny_plan(whole), first)
    second = tmp_path / "parts-00002-of-00004.gguf"
    assert "expected the first part" in error_of(lambda: pi_format.BaseModel(second))
    second.unlink()
    assert "parts-00002-of-00004.gguf" in error_of(lambda: pi_format.BaseModel(first))


def test_sidecar_is_found_beside_the_model(tmp_path: Path) -> None:
    for name in ("a.powerinfer.gguf", "b-00001-of-00002.powerinfer.gguf", "c.powerinfer.gguf"):
        (tmp_path / name).touch()
    for name, expected in {
        "a.gguf": "a.powerinfer.gguf",
        "b-00001-of-00002.gguf": "b-00001-of-00002.powerinfer.gguf",
        "c-00001-of-00002.gguf": "c.powerinfer.gguf",
        "c-00002-of-00002.gguf": None,
        "d.gguf": None,
        "a.powerinfer.gguf": None,
        "a": None,
    }.items():
        assert pi_format.find_sidecar(tmp_path / name) == (expected and tmp_path / expected)


def test_other_weights_of_the_same_shape_are_refused_with_the_layer(
    model: Path, plan_path: Path, tmp_path: Path
) -> None:
    content = bytearray(model.read_bytes())
    down = GgufFile(model).tensors["blk.2.ffn_down.weight"]
    content[down.offset + 100] ^= 1
    tuned = tmp_path / "tuned.gguf"
    tuned.write_bytes(content)
    for text in errors_of(plan_path, tuned):
        assert "layer 2's FFN has digest" in text and "tuned.gguf; the plan was made for" in text


def test_other_models_are_refused(plan_path: Path, tiny_model: Callable[..., Path]) -> None:
    for other, part in (
        (tiny_model("gpt2", n_layer=3, n_ff=96), "'gpt2'"),
        (tiny_model(n_layer=2, n_ff=96), "2 layers"),
        (tiny_model(n_layer=3, n_ff=96, n_embd=68), "width 68"),
        (tiny_model(n_layer=3, n_ff=100), "layer 0's gate"),
        (tiny_model(n_layer=3, n_ff=96, row_type="F16"), "layer 0's FFN has digest"),
        (plan_path, "is an extended GGUF"),
    ):
        for text in errors_of(plan_path, other):
            assert part in text


def test_base_is_looked_for_beside_the_plan(plan_path: Path, model: Path) -> None:
    plan = pi_format.read_plan(plan_path)
    assert plan.base_file == model.name
    for text in (error_of(plan.open_base), error_of(lambda: _core.Plan.open(plan_path))):
        assert f"powerinfer.base.file is '{model.name}'" in text and str(plan_path.parent / model.name) in text
    (plan_path.parent / model.name).symlink_to(model)
    assert plan.open_base().path == plan_path.parent / model.name
    _core.Plan.open(plan_path)


# ---- Against the format --------------------------------------------------------------------------------------------


def set_key(key: str, value: object, kind: str | None = None) -> Callable[[Fields], None]:
    def change(fields: Fields) -> None:
        name = pi_format.KEYS[key]
        fields.keys[name] = (kind or fields.keys[name][0], value)

    return change


def set_placement(key: str, value: object, kind: str | None = None) -> Callable[[Fields], None]:
    def change(fields: Fields) -> None:
        name = pi_format.KEYS[f"placement_{key}"] % 0
        fields.keys[name] = (kind or fields.keys[name][0], value)

    return change


def set_tensor(name: str, array: np.ndarray, raw_type: GGMLQuantizationType | None = None) -> Callable[[Fields], None]:
    return lambda fields: fields.tensors.update({name: (array, raw_type)})


def drop_tensor(name: str) -> Callable[[Fields], None]:
    return lambda fields: fields.tensors.pop(name)


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


DAMAGES = {
    "version 3": (set_key("format_version", 3), "format_version is 3; this build reads up to 1. Convert the model again."),
    "version 0": (set_key("format_version", 0), "format_version is 0"),
    "version as i32": (set_key("format_version", 1, "i32"), "i32; expected u32"),
    "alignment 128": (set_key("alignment", 128), "is 128; expected 64"),
    "no layers": (set_key("block_count", 0), "block_count is 0"),
    "more layers": (set_key("block_count", 4), "has 3 values; expected 4"),
    "2^32-1 layers": (set_key("block_count", 2**32 - 1), "block_count is 4294967295"),
    "width 0": (set_key("embedding_length", 0), "embedding_length is 0"),
    "huge n_ff": (set_key("feed_forward_length", [96, 2**32 - 1, 96]), "of layer 1 is 4294967295"),
    "other n_ff": (set_key("feed_forward_length", [96, 96, 95]), "layer 2's"),
    "short array": (set_key("feed_forward_length", [96, 96]), "has 2 values; expected 3"),
    "activation": (set_key("ffn_activation", "swish"), "'swish'; expected one of relu, relu_sqr, drelu, silu, gelu"),
    "threshold nan": (set_key("ffn_threshold", [0.0, float("nan"), 0.0]), "of layer 1 is nan; expected a finite number from 0 up"),
    "threshold inf": (set_key("ffn_threshold", [0.0, float("inf"), 0.0]), "of layer 1 is inf"),
    "threshold negative": (set_key("ffn_threshold", [0.0, 0.0, -1.5]), "of layer 2 is -1.5"),
    "threshold scalar": (set_key("ffn_threshold", 0.5), "expected an array of f32"),
    "predictor threshold": (set_key("predictor_threshold", [0.0, float("-inf"), 0.0]), "is -inf; expected a finite number;"),
    "recall": (set_key("predictor_recall", [0.0, 1.5, 0.0], "f32"), "of layer 1 is 1.5; expected a finite number from 0 to 1"),
    "loss": (set_key("ffn_loss", float("nan")), "powerinfer.ffn.loss is nan"),
    "tokens as u32": (set_key("profile_tokens", [1, 1, 1], "u32"), "an array of u32; expected an array of u64"),
    "kind": (set_key("predictor_kind", ["linear", "tree", "linear"]), "of layer 1 is 'tree'"),
    "kind without tensors": (drop_tensor("blk.1.predictor.fc1.weight"), "is linear but blk.1.predictor.fc1.weight is missing"),
    "tensors without kind": (set_key("predictor_kind", ["linear", "none", "linear"]), "layer 1 has predictor tensors"),
    "input": (set_key("predictor_input", "attention"), "'attention'"),
    "digest": (set_key("base_ffn_digest", ["a" * 64, "xyz", "a" * 64]), "of layer 1 is 'xyz'; expected 64 hexadecimal digits"),
    "order twice": (set_tensor("blk.1.neuron_order", np.zeros(96, np.int32)), "layer 1's neuron_order has 0 at position 1"),
    "order out of range": (set_tensor("blk.1.neuron_order", np.arange(1, 97, dtype=np.int32)), "has 96 at position 95; expected each of"),
    "order of floats": (set_tensor("blk.1.neuron_order", floats(96)), "is f32 [96]; expected i32 [96]"),
    "frequency 2": (set_tensor("blk.1.neuron_frequency", floats(96) + 2), "neuron_frequency is 2"),
    "frequency nan": (set_tensor("blk.1.neuron_frequency", floats(96) + np.float32("nan")), "neuron_frequency is nan"),
    "frequency short": (set_tensor("blk.1.neuron_frequency", floats(95)), "is f32 [95]; expected f32 [96]"),
    "predictor short": (set_tensor("blk.1.predictor.fc2.weight", floats(95, 8)), "has shape [8, 95]; expected [8, 96]"),
    "rank above n_embd": (set_tensor("blk.1.predictor.fc1.weight", floats(65, 64)), "predictor has rank 65; expected 1 .. 64"),
    "down_t transposed": (set_tensor("blk.0.ffn_down_t.weight", floats(64, 96)), "[96, 64]; expected [64, 96]"),
    "down_t of integers": (set_tensor("blk.0.ffn_down_t.weight", np.zeros((96, 64), np.int32)), "is of type i32"),
    "layer out of range": (set_tensor("blk.3.neuron_order", np.zeros(96, np.int32)), "belongs to layer 3; expected layers 0 .. 2"),
    "odd layer number": (set_tensor("blk.01.neuron_order", np.zeros(96, np.int32)), "isn't part of format version 1"),
    "unknown tensor": (set_tensor("blk.1.attn_q.weight", floats(96, 64)), "isn't part of format version 1"),
    "base not a GGUF": (set_tensor("base", np.zeros(100, np.int8)), "the base model in it"),
    "base of floats": (set_tensor("base", floats(100)), "tensor base is f32 [100]"),
    "second placement": (set_key("placement_count", 2), "powerinfer.placement.1.version is missing"),
    "many placements": (set_key("placement_count", 65), "powerinfer.placement.count is 65; expected at most 64"),
    "n_hot": (set_placement("n_hot", [96, 97, 0]), "placement.0.n_hot of layer 1 is 97; expected at most 96 (n_ff)"),
    "n_hot negative": (set_placement("n_hot", [-1, 0, 0], "i32"), "is an array of i32; expected an array of u32"),
    "n_hot short": (set_placement("n_hot", [0, 0]), "has 2 values; expected 3, one per layer"),
    "n_hot scalar": (set_placement("n_hot", 3), "of type u32; expected an array of u32"),
    "devices": (set_placement("device", ["x"] * 17), "placement.0.device has 17 values; expected 1 .. 16"),
    "device scalar": (set_placement("device", "x"), "of type str; expected an array of str"),
    "hot bytes": (set_placement("hot_bytes", [1, 2]), "has 2 values; expected 1, one per device"),
    "device index": (set_placement("i_device", [0, 0, 1]), "i_device of layer 2 is 1; expected 0 .. 0"),
    "token_s": (set_placement("token_s", float("inf")), "placement.0.token_s is inf; expected a finite number from 0 up"),
    "placement gap": (set_placement("gap", -1.0), "placement.0.gap is -1"),
    "model hash": (set_placement("model_hash", "A" * 64), "expected 64 hexadecimal digits"),
    "ungated": (set_key("ffn_gated", False), "layer 0's FFN in the base model"),
    "ungated drelu": (lambda f: (set_key("ffn_gated", False)(f), set_key("ffn_activation", "drelu")(f)), "expected a gated FFN"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_file_against_the_format_is_refused(name: str, plan_path: Path, model: Path, tmp_path: Path) -> None:
    change, part = DAMAGES[name]
    fields = Fields(plan_path)
    change(fields)
    path = fields.write(tmp_path / "bad.powerinfer.gguf")
    for text in errors_of(path, None if "base" in fields.tensors else model):
        assert str(path) in text and part in text


@pytest.mark.parametrize(
    "key",
    "format_version base_architecture block_count embedding_length feed_forward_length ffn_activation ffn_gated "
    "base_ffn_digest".split(),
)
def test_missing_key_is_named(key: str, plan_path: Path, model: Path, tmp_path: Path) -> None:
    fields = Fields(plan_path)
    del fields.keys[pi_format.KEYS[key]]
    for text in errors_of(fields.write(tmp_path / "bad.powerinfer.gguf"), model):
        assert f"{pi_format.KEYS[key]} is missing" in text


@pytest.mark.parametrize("name", ["../base.gguf", "/etc/passwd", "a\\b.gguf", "..", "a\0b"])
def test_base_file_with_folders_is_refused(name: str, plan_path: Path, tmp_path: Path) -> None:
    fields = Fields(plan_path)
    set_key("base_file", name)(fields)
    for text in errors_of(fields.write(tmp_path / "bad.powerinfer.gguf"), None):
        assert "expected a file name without folders" in text


def test_base_file_that_isnt_a_text_is_refused_whichever_base_is_named(
    plan_path: Path, model: Path, tmp_path: Path
) -> None:
    fields = Fields(plan_path)
    set_key("base_file", ["base.gguf"])(fields)
    for text in errors_of(fields.write(tmp_path / "bad.powerinfer.gguf"), model):
        assert "base.file is an array of str; expected str" in text


def test_base_file_with_too_long_a_name_isnt_there(plan_path: Path, tmp_path: Path) -> None:
    fields = Fields(plan_path)
    set_key("base_file", "x" * 300)(fields)
    for text in errors_of(fields.write(tmp_path / "bad.powerinfer.gguf"), None):
        assert "isn't a file" in text


def header(n_tensors: int, n_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)


def tensor_info(name: bytes, ne: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)


HUGE = 2**64 - 1
KEY_A = struct.pack("<Q", 1) + b"a"
ALIGNMENT = struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<I", 4)
HOSTILE = {
    "empty": (b"", "0 bytes"),
    "zeros": (bytes(4096), "expected 'GGUF'"),
    "text": (b"This is a text file, not a model.\n" * 10, "starts with 'This'"),
    "original PowerInfer": (b"PWRI" + bytes(100), "original PowerInfer"),
    "version 1": (header(0, 0, 1), "GGUF version is 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "huge counts": (header(HUGE, HUGE), "announces"),
    "key count": (header(0, 60000), "inside key 0"),
    "string length 2^64-1": (header(0, 1) + struct.pack("<Q", HUGE) + bytes(100), "inside key 0"),
    "value length 2^64-1": (header(0, 1) + KEY_A + struct.pack("<IQ", 8, HUGE) + bytes(100), "inside key 0"),
    "array count 2^64-1": (header(0, 1) + KEY_A + struct.pack("<IIQ", 9, 4, HUGE) + bytes(100), "inside key 0"),
    "array count 2^62": (header(0, 1) + KEY_A + struct.pack("<IIQ", 9, 4, 2**62) + bytes(100), "inside key 0"),
    "string array 2^40": (header(0, 1) + KEY_A + struct.pack("<IIQ", 9, 8, 2**40) + bytes(4000), "inside key 0"),
    "array of arrays": (header(0, 1) + KEY_A + struct.pack("<IIQ", 9, 9, 1) + bytes(100), "value type 9"),
    "value type 77": (header(0, 1) + KEY_A + struct.pack("<I", 77), "value type 77"),
    "key twice": (header(0, 2) + 2 * (KEY_A + struct.pack("<II", 4, 1)), "there twice"),
    "alignment 0": (header(0, 1) + ALIGNMENT + struct.pack("<I", 0), "general.alignment is 0"),
    "alignment 48": (header(0, 1) + ALIGNMENT + struct.pack("<I", 48), "general.alignment is 48"),
    "9 dimensions": (header(1, 0) + tensor_info(b"t", [1] * 9) + bytes(100), "9 dimensions"),
    "2^31 dimensions": (header(1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", 2**31) + bytes(100), "dimensions"),
    "64 byte name": (header(1, 0) + tensor_info(b"x" * 64, [1]) + bytes(100), "64 bytes"),
    "tensor twice": (header(2, 0) + 2 * tensor_info(b"t", [1]) + bytes(100), "there twice"),
    "negative dimension": (header(1, 0) + tensor_info(b"t", [HUGE]) + bytes(100), "impossible shape"),
    "empty, but too large for numpy": (header(1, 0) + tensor_info(b"t", [0, 2**40, 2**40]) + bytes(100), "impossible shape"),
    "overflowing shape": (header(1, 0) + tensor_info(b"t", [2**32, 2**32, 4]) + bytes(100), "impossible shape"),
    "offset past end": (header(1, 0) + tensor_info(b"t", [1], offset=2**62) + bytes(100), "ends past the end"),
    "size past end": (header(1, 0) + tensor_info(b"t", [2**40]) + bytes(100), "ends past the end"),
    "type 9999": (header(1, 0) + tensor_info(b"t", [1], kind=9999) + bytes(100), "type number 9999"),
    "removed type": (header(1, 0) + tensor_info(b"t", [32], kind=4) + bytes(100), "type number 4"),
    "half a block": (header(1, 0) + tensor_info(b"t", [40], kind=2) + bytes(100), "multiple of 32"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header_is_refused(name: str, tmp_path: Path) -> None:
    content, part = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    for call in (
        lambda: pi_format.read_plan(path),
        lambda: pi_format.BaseModel(path),
        lambda: _core.Plan.open(path),
        lambda: _core.Plan.open_bare(path),
        lambda: _core.inspect_path(path),
    ):
        text = error_of(call)
        assert str(path) in text and part in text


def test_no_file_is_refused(tmp_path: Path) -> None:
    assert "isn't a file" in error_of(lambda: pi_format.read_plan(tmp_path))
    assert "isn't a file" in error_of(lambda: pi_format.read_plan(tmp_path / "none.gguf"))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_truncated_files_are_refused(share: float, plan_path: Path, model: Path, tmp_path: Path) -> None:
    for source in (plan_path, model):
        content = source.read_bytes()
        path = tmp_path / "cut.gguf"
        path.write_bytes(content[: int(share * len(content))])
        assert str(path) in error_of(lambda path=path: GgufFile(path))
        assert str(path) in error_of(lambda path=path: _core.inspect_path(path))


def test_python_and_core_agree_on_damaged_bytes(plan_path: Path, model: Path, tmp_path: Path) -> None:
    content = plan_path.read_bytes()
    path = tmp_path / "flip.powerinfer.gguf"
    n_refused = 0
    for i in range(0, 4096, 3):
        flipped = bytearray(content)
        flipped[i] ^= 0x81
        path.write_bytes(flipped)
        try:
            pi_format.read_plan(path).open_base(model)
            in_python = ""
        except (FormatError, PlanError) as error:
            in_python = str(error)
        try:
            _core.Plan.open(path, model).close()
            in_core = ""
        except PlanError as error:
            in_core = str(error)
        n_refused += bool(in_core)
        # C++ takes names and text as bytes
        assert bool(in_python) == bool(in_core) or "UTF-8" in in_python, (i, in_python, in_core)
    assert n_refused > 500
