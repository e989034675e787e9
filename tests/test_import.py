"""Import of the original PowerInfer's files: what the plan decides is what the original decides, and bad files are refused."""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
import original_models
import pytest
import torch

from powerinfer_py import Llama, _core, cli
from powerinfer_py import format as pi_format
from powerinfer_py.errors import FormatError, OptionError, PlanError
from powerinfer_py.format import PlanLayer, Rows
from powerinfer_py.gguf_file import GgufFile
from powerinfer_py.tools import import_powerinfer, powerinfer_files
from powerinfer_py.tools.import_powerinfer import ImportOptions, import_model

# F32 throughout, against double precision: what is left is the order of summation (measured: 3e-6).
TOLERANCE = 1e-4
# Rows of fewer bits: the inputs of their products are rounded too (measured: 1e-4 for F16, 0.06 for the others).
ROUNDED_TOLERANCE = {"F16": 1e-3, "Q8_0": 0.2, "Q4_0": 0.2}
RUN_OPTIONS = {
    "n_ctx": 64, "n_batch": 64, "n_ubatch": 64, "logits_all": True, "type_k": 0, "type_v": 0, "flash_attn": False,
    "n_threads": 2, "n_threads_batch": 2, "verbose": False,
}  # fmt: skip
TOKENS = np.random.default_rng(1).integers(3, original_models.N_VOCAB, 24).tolist()


class Notes(list):
    """Collects notes; `said(words)` counts those that hold all words."""

    def __call__(self, text: str) -> None:
        self.append(text)

    def said(self, *words: str) -> int:
        return sum(all(word in text for word in words) for text in self)


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture(autouse=True)
def few_threads() -> None:
    torch.set_num_threads(2)


def write(folder: Path, architecture: str = "llama", **options: object) -> original_models.Original:
    folder.mkdir(exist_ok=True)
    return original_models.write_original(folder / "m.powerinfer.gguf", architecture, **options)


def imported(
    model: original_models.Original, out: Path, note: Callable[[str], None] = lambda text: None, **options: object
) -> pi_format.Plan:
    """Imports a model and reads the result back."""
    import_model(ImportOptions(model.path, out, threads=2, **options), note)
    return pi_format.read_plan(out)


def run_logits(path: Path, sparsity: str) -> np.ndarray:
    """Our logits of TOKENS as one batch."""
    with Llama(str(path), sparsity=sparsity, **RUN_OPTIONS) as llama:
        llama.eval(TOKENS)
        return llama.scores[: len(TOKENS)].copy()


def all_neurons(model: original_models.Original) -> original_models.Original:
    """The model without predictors."""
    weights = {name: values for name, values in model.weights.items() if ".fc" not in name}
    return dataclasses.replace(model, weights=weights)


def plan_masks(plan: pi_format.Plan, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Active sets that the plan's stored rows give for predictor inputs, in the base's order, double precision.

    Args:
        plan: the plan.
        inputs: per layer (n_tokens, n_embd).

    Returns:
        Per layer (n_tokens, n_ff) bool.
    """
    masks = []
    for layer, x in zip(plan.layers, inputs):
        mask = np.ones((len(x), layer.n_ff), bool)
        if layer.predictor != "none":
            assert layer.predictor == "mlp"
            fc1, fc2 = layer.fc1.to_f32().astype(np.float64), layer.fc2.to_f32().astype(np.float64)
            order = np.arange(layer.n_ff) if layer.neuron_order is None else layer.neuron_order
            mask[:, order] = ~(np.maximum(x @ fc1.T, 0) @ fc2.T < layer.predictor_threshold)
        masks.append(mask)
    return masks


def captured_inputs(path: Path) -> tuple[list[np.ndarray], int]:
    """FFN inputs of each layer as the device sees them in `predicted` mode, and how many neurons its predictors chose."""
    found: dict[int, np.ndarray] = {}
    with Llama(str(path), sparsity="predicted", **RUN_OPTIONS) as llama:
        llama.reset_stats()
        llama._plan.set_capture(lambda i, x: found.__setitem__(i, x))
        llama.eval(TOKENS)
        llama._plan.set_capture(None)
        n_candidates = sum(layer["n_candidates"] for layer in llama._plan.layers())
    return [found[i] for i in range(len(found))], n_candidates


def check_predicted_run(model: original_models.Original, path: Path) -> None:
    """`predicted` mode computes what the original computes; works for any predictor input that the core supports."""
    expected = original_models.evaluate(model, TOKENS)
    assert np.abs(run_logits(path, "predicted") - expected.logits).max() < TOLERANCE


# ---- The same decisions --------------------------------------------------------------------------------------------

SHAPES = [
    {},
    {"threshold": 0.0},
    {"n_ff": 64},  # square: a transposition too many or too few shows
    {"n_embd": 96, "n_ff": 1000, "n_layer": 2},
    {"without_predictor": (1,)},
]


@pytest.mark.parametrize("architecture", ["llama", "bamboo"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_folded_predictor_decides_as_the_original(architecture: str, shape: dict, tmp_path: Path) -> None:
    model = write(tmp_path / "in", architecture, **shape)
    out = tmp_path / "out.powerinfer.gguf"
    plan = imported(model, out)
    assert (plan.base_architecture, plan.predictor_input) == ("llama", "ffn_input")
    assert plan.activation == {"llama": "relu", "bamboo": "drelu"}[architecture] and plan.gated
    expected = original_models.evaluate(model, TOKENS)
    for found, wished in zip(plan_masks(plan, expected.ffn_inputs), expected.masks):
        assert np.array_equal(found, wished)
    density = np.mean([mask.mean() for mask in expected.masks])
    assert 0.2 < density < 0.8
    check_predicted_run(model, out)


def test_device_sees_the_same_inputs_and_chooses_as_many_neurons(tmp_path: Path) -> None:
    model = write(tmp_path / "in")
    out = tmp_path / "out.powerinfer.gguf"
    plan = imported(model, out)
    expected = original_models.evaluate(model, TOKENS)
    inputs, n_candidates = captured_inputs(out)
    for x, wished in zip(inputs, expected.ffn_inputs):
        assert np.abs(x - wished).max() < TOLERANCE
    for found, wished in zip(plan_masks(plan, inputs), expected.masks):
        assert np.array_equal(found, wished)
    assert n_candidates == sum(int(mask.sum()) for mask in expected.masks)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("falcon", {}),
        ("falcon", {"threshold": 0.2}),
        ("opt", {}),
        ("opt", {"threshold": -0.1}),
        ("llama", {"threshold": 0.3}),
        ("bamboo", {"threshold": -0.2}),
        ("llama", {"zero_norm": True}),
    ],
)
def test_predictor_that_needs_the_residual_is_kept_for_it(
    architecture: str, options: dict, tmp_path: Path, notes: Notes
) -> None:
    model = write(tmp_path / "in", architecture, **options)
    out = tmp_path / "out.powerinfer.gguf"
    plan = imported(model, out, notes)
    assert plan.predictor_input == "residual" and notes.said("residual stream") == 1
    assert plan.base_architecture == {"falcon": "falcon", "opt": "gpt2"}.get(architecture, "llama")
    expected = original_models.evaluate(model, TOKENS)
    for i, layer in enumerate(plan.layers):
        assert layer.predictor_threshold == np.float32(model.threshold)
        assert np.array_equal(layer.fc1.to_f32(), model.weights[f"blk.{i}.fc1.weight"].numpy())
    for found, wished in zip(plan_masks(plan, expected.residuals), expected.masks):
        assert np.array_equal(found, wished)
    # Another input gives other sets: the test would see a mix-up.
    assert not np.array_equal(plan_masks(plan, expected.ffn_inputs)[1], expected.masks[1]) or options.get("zero_norm")
    check_predicted_run(model, out)


@pytest.mark.parametrize("architecture", ["llama", "bamboo", "falcon", "opt"])
def test_base_with_all_neurons_computes_what_the_original_computes(architecture: str, tmp_path: Path) -> None:
    """Layout, biases, OPT's positions: without predictors nothing of it is approximate."""
    model = write(tmp_path / "in", architecture)
    out = tmp_path / "out.powerinfer.gguf"
    imported(model, out)
    expected = original_models.evaluate(all_neurons(model), TOKENS).logits
    assert np.abs(run_logits(out, "dense") - expected).max() < TOLERANCE


@pytest.mark.parametrize(
    ("row_type", "predictor_type"), [("F16", "F16"), ("Q4_0", "Q4_0"), ("Q8_0", "Q5_0"), ("Q4_0", "F16")]
)
def test_rounded_rows(row_type: str, predictor_type: str, tmp_path: Path, notes: Notes) -> None:
    model = write(tmp_path / "in", n_embd=128, n_ff=512, row_type=row_type, predictor_type=predictor_type)
    out = tmp_path / "out.powerinfer.gguf"
    plan = imported(model, out, notes, sidecar=True)
    original = GgufFile(model.path, magic=b"PWRI")
    base = pi_format.BaseModel(tmp_path / "out.gguf")
    expected = original_models.evaluate(model, TOKENS)
    for i, layer in enumerate(plan.layers):
        # neither the plan's down rows nor fc2 are rounded anew
        assert layer.ffn_down_t.data.tobytes() == original.raw(f"blk.{i}.ffn_down_t.weight").tobytes()
        assert layer.fc2.data.tobytes() == original.raw(f"blk.{i}.fc2.weight").tobytes()
        assert base.tensor(f"blk.{i}.ffn_down.weight").type.name == row_type
        down, wished = base.rows_f32(f"blk.{i}.ffn_down.weight"), layer.ffn_down_t.to_f32().T
        if row_type == "F16":
            assert np.array_equal(down, wished)
        assert np.abs(down - wished).max() < {"F16": 1e-9, "Q8_0": 0.01, "Q4_0": 0.2}[row_type] * np.abs(wished).max()
        assert base.raw(f"blk.{i}.ffn_up.weight").tobytes() == original.raw(f"blk.{i}.ffn_up.weight").tobytes()
    changed = np.mean([f != w for f, w in zip(plan_masks(plan, expected.ffn_inputs), expected.masks)])
    assert changed < import_powerinfer.MAX_CHANGED_DECISIONS
    assert notes.said("random residuals") == 1
    dense = original_models.evaluate(all_neurons(model), TOKENS).logits
    assert np.abs(run_logits(out, "dense") - dense).max() < ROUNDED_TOLERANCE[row_type]


def test_down_projection_that_blocks_dont_fit_gets_another_type(tmp_path: Path) -> None:
    model = write(tmp_path / "in", n_ff=300, n_layer=2, row_type="Q4_0")
    plan = imported(model, tmp_path / "out.powerinfer.gguf")
    base = plan.open_base()
    assert base.tensor("blk.0.ffn_down.weight").type.name == "F16"
    assert plan.layers[0].ffn_down_t.row_type.name == "Q4_0"


def test_folding_is_exact_for_negative_weights_and_refuses_zeros() -> None:
    rng = np.random.default_rng(0)
    fc1, norm = rng.standard_normal((8, 32), np.float32), rng.standard_normal(32).astype(np.float32)
    r = rng.standard_normal((5, 32), np.float32)
    rms = np.sqrt(np.square(r).mean(1, keepdims=True))
    folded = powerinfer_files.ffn_input_predictor(fc1, norm)
    assert np.allclose((r * norm / rms) @ folded.T * rms, r @ fc1.T, atol=1e-4)
    for bad in (0.0, 1e-45):
        norm[7] = bad
        with pytest.raises(FormatError, match="at 7"):
            powerinfer_files.ffn_input_predictor(fc1, norm)


# ---- The base ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_ff", [160, 64])
@pytest.mark.parametrize("row_type", ["F32", "F16", "BF16"])
def test_float_down_projection_is_transposed_without_loss(row_type: str, n_ff: int, tmp_path: Path) -> None:
    model = write(tmp_path / "in", n_ff=n_ff, row_type=row_type)
    base = imported(model, tmp_path / "out.powerinfer.gguf").open_base()
    for i in range(model.n_layer):
        assert base.tensor(f"blk.{i}.ffn_down.weight").type.name == row_type
        down = base.rows_f32(f"blk.{i}.ffn_down.weight")
        assert np.array_equal(down, model.weights[f"blk.{i}.ffn_down_t.weight"].numpy().T)


@pytest.mark.parametrize("architecture", ["llama", "bamboo", "falcon", "opt"])
def test_base_is_a_stock_model(architecture: str, tmp_path: Path) -> None:
    model = write(tmp_path / "in", architecture, threshold=0.1)
    out = tmp_path / "out.powerinfer.gguf"
    plan = imported(model, out, sidecar=True)
    assert plan.base_file == "out.gguf" and not plan.is_embedded
    base = GgufFile(tmp_path / "out.gguf")
    assert not [name for name in base.tensors if "fc1" in name or "fc2" in name or "down_t" in name]
    assert not [key for key in base.values if key.startswith(("powerinfer.", "bamboo.", "opt."))]
    original = GgufFile(model.path, magic=b"PWRI")
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "general.name"):
        assert base.entry(key) == original.entry(key)
    for name in ("token_embd.weight", "output.weight", "blk.0.attn_output.weight"):
        assert base.raw(name).tobytes() == original.raw(name).tobytes()
    if architecture == "opt":
        assert base.get("gpt2.context_length") == original_models.N_CTX
        assert base.tensors["position_embd.weight"].ne == (64, original_models.N_CTX)
        assert base.get("gpt2.attention.layer_norm_epsilon") == pytest.approx(1e-5)
    llama_cpp.Llama(str(tmp_path / "out.gguf"), **RUN_OPTIONS).close()
    # embedded, it is the same
    packed = imported(model, tmp_path / "packed.powerinfer.gguf")
    assert packed.is_embedded and packed.open_base().files[0].whole().tobytes() == base.whole().tobytes()


def test_old_tokenizer_is_said(tmp_path: Path, notes: Notes) -> None:
    imported(write(tmp_path / "in", tokenizer="gpt2"), tmp_path / "out.powerinfer.gguf", notes)
    assert notes.said("tokenizer.ggml.pre", "'default'") == 1


# ---- Statistics ----------------------------------------------------------------------------------------------------


def hot_counts(n_layer: int, n_ff: int, kind: torch.dtype = torch.int64) -> list[torch.Tensor]:
    """Layer i: neuron i is hottest, all others random."""
    rng = np.random.default_rng(3)
    counts = [torch.from_numpy(rng.integers(0, 50, n_ff)).to(kind) for _ in range(n_layer)]
    for i, layer in enumerate(counts):
        layer[i] = 100
    return counts


def test_layers_are_sorted_as_numbers_and_give_the_order(tmp_path: Path, notes: Notes) -> None:
    """PI #247: statistics of layer 2 must not come from file 10."""
    model = write(tmp_path / "in", n_layer=12, n_ff=96)
    folder = original_models.write_activations(tmp_path / "activation", hot_counts(12, 96))
    out = tmp_path / "out.powerinfer.gguf"
    plan = imported(model, out, notes, activation=folder)
    for i, layer in enumerate(plan.layers):
        assert layer.neuron_order[0] == i and layer.neuron_frequency[0] == 1.0
        assert np.all(np.diff(layer.neuron_frequency) <= 0)
        down = model.weights[f"blk.{i}.ffn_down_t.weight"].numpy()
        assert np.array_equal(layer.ffn_down_t.to_f32(), down[layer.neuron_order])
        assert np.array_equal(layer.fc2.to_f32(), model.weights[f"blk.{i}.fc2.weight"].numpy()[layer.neuron_order])
    assert notes.said("relative to the most active neuron") == 1
    check_predicted_run(model, out)


def test_extra_files_are_ignored_with_a_note(tmp_path: Path, notes: Notes) -> None:
    """PI #131, #134."""
    counts = hot_counts(12, 40)
    clean = original_models.write_activations(tmp_path / "clean", counts)
    folder = original_models.write_activations(tmp_path / "messy", counts)
    (folder / ".DS_Store").write_bytes(b"\0\1")
    (folder / "activation_3.pt.bak").write_bytes(b"")
    (folder / "activation_3 (1).pt").write_bytes(b"")
    (folder / "activation_12.pt").mkdir()
    expected = powerinfer_files.read_activations(clean, [40] * 12, notes)
    assert not notes
    found = powerinfer_files.read_activations(folder, [40] * 12, notes)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected))
    assert len(notes) == 1 and notes.said(".DS_Store", "activation_3.pt.bak", "activation_3 (1).pt", "activation_12.pt")


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.float32, torch.float64])
def test_counts_of_any_number_type(kind: torch.dtype, tmp_path: Path, notes: Notes) -> None:
    counts = hot_counts(2, 30, kind)
    counts.append(torch.zeros(30, dtype=kind))
    folder = original_models.write_activations(tmp_path / "a", counts)
    found = powerinfer_files.read_activations(folder, [30, 30, 30], notes)
    assert all(array.dtype == np.float64 for array in found) and found[1].max() == 100 and found[2].max() == 0


def test_equal_and_zero_counts_keep_the_order() -> None:
    layer = PlanLayer(n_ff=4, fc2=Rows.of(np.arange(8, dtype=np.float32).reshape(4, 2)))
    for counts in (np.zeros(4), np.full(4, 7.0)):
        assert powerinfer_files.ordered_layer(layer, counts).neuron_order.tolist() == [0, 1, 2, 3]
    once = powerinfer_files.ordered_layer(layer, np.array([1, 3, 3, 9]))
    assert once.neuron_order.tolist() == [3, 1, 2, 0] and once.fc2.data[:, 0].tolist() == [6, 2, 4, 0]
    twice = powerinfer_files.ordered_layer(once, np.array([0, 0, 5, 0]))
    assert twice.neuron_order.tolist() == [2, 3, 1, 0] and twice.fc2.data[:, 0].tolist() == [4, 6, 2, 0]
    assert powerinfer_files.ordered_layer(layer, None) is layer


def test_shares_stay_shares(notes: Notes) -> None:
    found = powerinfer_files.relative_frequencies([np.array([0.5, 0.25]), np.zeros(0)], notes)
    assert found[0].tolist() == [0.5, 0.25] and not notes


def damaged(counts: list[torch.Tensor], i: int, value: object) -> list:
    return [*counts[:i], value, *counts[i + 1 :]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: damaged(c, 2, torch.full((40,), torch.nan)), "activation_2.pt: layer 2's counts holds NaN"),
        (lambda c: damaged(c, 2, torch.full((40,), torch.inf)), "infinite"),
        (lambda c: damaged(c, 2, torch.tensor([1.0] * 39 + [-2.0])), "neuron 39 is -2"),
        (lambda c: damaged(c, 2, torch.ones(41)), "shape [41]; expected [40]"),
        (lambda c: damaged(c, 2, torch.ones(1, 40)), "shape [1, 40]"),
        (lambda c: damaged(c, 2, {"counts": torch.ones(40)}), "is dict"),
        (lambda c: damaged(c, 2, torch.ones(40, dtype=torch.complex64)), "dense tensor of numbers"),
        (lambda c: c[:11], "activation_11.pt is missing"),
        (lambda c: [*c, c[0]], "has activation_12.pt"),
    ],
)
def test_wrong_counts_are_refused(change: Callable, words: str, tmp_path: Path, notes: Notes) -> None:
    folder = original_models.write_activations(tmp_path / "a", change(hot_counts(12, 40)))
    with pytest.raises(FormatError) as caught:
        powerinfer_files.read_activations(folder, [40] * 12, notes)
    assert words in str(caught.value)


def test_gap_and_missing_folder_are_named(tmp_path: Path, notes: Notes) -> None:
    folder = original_models.write_activations(tmp_path / "a", hot_counts(12, 40))
    (folder / "activation_7.pt").unlink()
    with pytest.raises(FormatError, match=r"activation_7\.pt is missing"):
        powerinfer_files.read_activations(folder, [40] * 12, notes)
    # a layer that isn't covered needs none
    found = powerinfer_files.read_activations(folder, [40] * 7 + [0] + [40] * 4, notes)
    assert found[7].size == 0 and found[8].size == 40
    with pytest.raises(FormatError, match="isn't a folder"):
        powerinfer_files.read_activations(tmp_path / "none", [40], notes)


def test_pickled_code_isnt_run(tmp_path: Path, notes: Notes) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "made"),)

    folder = original_models.write_activations(tmp_path / "a", [Evil()])
    with pytest.raises(FormatError, match="plain tensors"):
        powerinfer_files.read_activations(folder, [40], notes)
    assert not (tmp_path / "made").exists()


# ---- Predictor folders ---------------------------------------------------------------------------------------------


def test_predictor_folder_replaces_the_files(tmp_path: Path, notes: Notes) -> None:
    """PI #8, #76: extras ignored, default threshold stated."""
    other = write(tmp_path / "other", seed=9)
    model = write(tmp_path / "in", threshold=0.5)
    folder = original_models.write_predictors(tmp_path / "p", other)
    (folder / "optimizer.pt").write_bytes(b"")
    (folder / "config.json").write_text('{"hidden_act": "relu"}')
    plan = imported(model, tmp_path / "out.powerinfer.gguf", notes, predictor=folder)
    assert notes.said("optimizer.pt") == 1 and notes.said("sparse_threshold", "threshold is 0") == 1
    assert plan.predictor_input == "ffn_input" and plan.layers[0].predictor_threshold == 0
    for i in range(model.n_layer):
        for name in ("fc1", "fc2"):
            model.weights[f"blk.{i}.{name}.weight"] = other.weights[f"blk.{i}.{name}.weight"]
    expected = original_models.evaluate(dataclasses.replace(model, threshold=0.0), TOKENS)
    changed = np.mean([f != w for f, w in zip(plan_masks(plan, expected.ffn_inputs), expected.masks)])
    assert changed < import_powerinfer.MAX_CHANGED_DECISIONS


def test_threshold_of_the_folder_is_used(tmp_path: Path, notes: Notes) -> None:
    model = write(tmp_path / "in")
    folder = original_models.write_predictors(tmp_path / "p", model)
    (folder / "config.json").write_text('{"sparse_threshold": 0.25}')
    found = powerinfer_files.read_predictors(folder, 64, [160] * 3, notes)
    assert found.threshold == 0.25 and not notes
    assert len(found.fc1) == 3 and found.fc2[2].shape == (160, 32) and found.fc1[-1].dtype == np.float32


@pytest.mark.parametrize(
    "text", ['{"sparse_threshold": "0.5"}', '{"sparse_threshold": NaN}', '{"sparse_threshold": true}', "{", "[]"]
)
def test_threshold_that_is_no_number_is_refused(text: str, tmp_path: Path, notes: Notes) -> None:
    folder = original_models.write_predictors(tmp_path / "p", write(tmp_path / "in"))
    (folder / "config.json").write_text(text)
    with pytest.raises(FormatError, match=r"config\.json"):
        powerinfer_files.read_predictors(folder, 64, [160] * 3, notes)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"fc1.weight": (32, 64), "fc2.weight": (159, 32)}, "layer 1's predictor has fc1 [32, 64] and fc2 [159, 32]"),
        ({"fc1.weight": (32, 64), "fc2.weight": (160, 31)}, "expected [r, 64] and [160, r]"),
        ({"fc1.weight": (65, 64), "fc2.weight": (160, 65)}, "r from 1 to 64"),
        ({"fc1.weight": (32, 128), "fc2.weight": (160, 32)}, "[32, 128]"),
        ({"fc1.weight": (32, 64), "fc1.bias": (32,), "fc2.weight": (160, 32)}, "fc1.bias"),
        ({"fc1.weight": (32, 64)}, "expected fc1.weight and fc2.weight"),
        (None, "holds Tensor"),
    ],
)
def test_predictor_of_another_shape_is_refused(content: dict | None, words: str, tmp_path: Path, notes: Notes) -> None:
    folder = original_models.write_predictors(tmp_path / "p", write(tmp_path / "in"))
    value = torch.ones(3) if content is None else {name: torch.zeros(shape) for name, shape in content.items()}
    torch.save(value, folder / "model_1.pt")
    with pytest.raises(FormatError) as caught:
        powerinfer_files.read_predictors(folder, 64, [160] * 3, notes)
    assert "model_1.pt" in str(caught.value) and words in str(caught.value)


def test_gap_in_the_predictor_folder_is_named(tmp_path: Path, notes: Notes) -> None:
    folder = original_models.write_predictors(tmp_path / "p", write(tmp_path / "in"), layers=[0, 2])
    with pytest.raises(FormatError, match=r"model_1\.pt is missing"):
        powerinfer_files.read_predictors(folder, 64, [160] * 3, notes)


def test_layer_without_predictor_is_said_once(tmp_path: Path, notes: Notes) -> None:
    model = write(tmp_path / "in", n_layer=4, without_predictor=(1, 3))
    plan = imported(model, tmp_path / "out.powerinfer.gguf", notes)
    assert [layer.predictor for layer in plan.layers] == ["mlp", "none", "mlp", "none"]
    assert notes.said("layers 1, 3") == 1
    with pytest.raises(PlanError, match="strict"):
        imported(model, tmp_path / "strict.powerinfer.gguf", notes, strict=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.powerinfer.gguf"]


def test_predictor_in_the_file_of_another_shape_names_layer_and_shapes(tmp_path: Path) -> None:
    model = write(tmp_path / "in", rank=65)
    with pytest.raises(FormatError, match=r"layer 0's predictor has fc1 \[65, 64\] and fc2 \[160, 65\]"):
        imported(model, tmp_path / "out.powerinfer.gguf")


# ---- GPU splits ----------------------------------------------------------------------------------------------------


def split_masks(n_layer: int, n_ff: int) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    return [np.zeros(n_ff, np.int32), *((rng.random(n_ff) < 0.3).astype(np.int32) for _ in range(n_layer - 1))]


def test_split_puts_gpu_neurons_first(tmp_path: Path, notes: Notes) -> None:
    model = write(tmp_path / "in")
    masks = split_masks(3, 160)
    split = original_models.write_split(tmp_path / "s.gpuidx", masks)
    out = tmp_path / "out.powerinfer.gguf"
    plan = imported(model, out, notes, split=split)
    for layer, mask in zip(plan.layers, masks):
        wished = np.concatenate([np.flatnonzero(mask), np.flatnonzero(mask == 0)])
        assert np.array_equal(layer.neuron_order, wished) and layer.neuron_frequency is None
    assert notes.said("aren't stored") == 1
    check_predicted_run(model, out)


def test_statistics_win_over_the_split(tmp_path: Path, notes: Notes) -> None:
    model = write(tmp_path / "in")
    split = original_models.write_split(tmp_path / "s.gpuidx", split_masks(3, 160))
    folder = original_models.write_activations(tmp_path / "a", hot_counts(3, 160))
    plan = imported(model, tmp_path / "out.powerinfer.gguf", notes, split=split, activation=folder)
    assert [layer.neuron_order[0] for layer in plan.layers] == [0, 1, 2] and notes.said("the split adds nothing") == 1


def test_split_without_buckets_is_read(tmp_path: Path) -> None:
    masks = split_masks(3, 40)
    path = original_models.write_split(tmp_path / "s", masks, buckets=[np.zeros(0)] * 3, capacity=123)
    found = powerinfer_files.read_split(path, [40] * 3)
    assert found.vram_bytes == 123 and all(np.array_equal(a, b == 1) for a, b in zip(found.on_gpu, masks))


def wrong_split(folder: Path, **options: object) -> Path:
    masks = [np.array([0, 1, 0, 1, 1, 0])] * 2
    return original_models.write_split(folder / "s.gpuidx", options.pop("masks", masks), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"masks": [np.array([0, 1, 0, 2, 1, 0])] * 2}, "each 0 or 1"),
        ({"masks": [np.array([0, 1, 0, 1, 1])] * 2}, "5 values"),
        ({"masks": [np.array([0, 1, 0, 1, 1, 0])] * 3}, "gpu_idx of 3 layers"),
        ({"buckets": [np.array([1, 3, 4]), np.array([3, 1, 4])]}, "blk.1.gpu_bucket isn't the rising list"),
        ({"buckets": [np.array([1, 3, 4]), np.array([1, 3])]}, "blk.1.gpu_bucket isn't"),
        ({"buckets": [np.array([1, 3, 9])] * 2}, "blk.0.gpu_bucket isn't"),
        ({"capacity": None}, "split.vram_capacity is missing"),
        ({"kind": np.float32}, "expected a row of i32"),
    ],
)
def test_wrong_split_is_refused(options: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        powerinfer_files.read_split(wrong_split(tmp_path, **options), [6, 6])
    assert words in str(caught.value)


# ---- Files that can't be imported ----------------------------------------------------------------------------------


def test_ordinary_gguf_is_sent_away(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    """PI #100, #209."""
    out = tmp_path / "out.powerinfer.gguf"
    with pytest.raises(FormatError, match=r"ordinary GGUF.*use it directly.*powerinfer profile"):
        import_model(ImportOptions(tiny_model(), out), print)
    with pytest.raises(FormatError, match="extended GGUF already"):
        import_model(ImportOptions(tiny_plan(tiny_model()), out), print)
    assert not out.exists()


def test_original_file_elsewhere_is_sent_here(tmp_path: Path) -> None:
    model = write(tmp_path / "in")
    with pytest.raises(FormatError, match="powerinfer import"):
        GgufFile(model.path)
    with pytest.raises(FormatError, match="expected 'PWRI'"):
        powerinfer_files.read_split(Path(__file__), [6])


@pytest.mark.parametrize("share", [0, 10, 50, 99])
def test_truncated_files_are_one_clear_error(share: int, tmp_path: Path, notes: Notes) -> None:
    """llama.cpp #6774, PI #256, #257; the side files too."""
    model = write(tmp_path / "in")
    split = original_models.write_split(tmp_path / "in" / "s.gpuidx", split_masks(3, 160))
    activation = original_models.write_activations(tmp_path / "in" / "activation", hot_counts(3, 160))
    predictor = original_models.write_predictors(tmp_path / "in" / "predictor", model)
    out = tmp_path / "out.powerinfer.gguf"
    options = {"activation": activation, "predictor": predictor, "split": split}
    for path in (model.path, split, activation / "activation_1.pt", predictor / "model_2.pt"):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) * share // 100])
        with pytest.raises(FormatError) as caught:
            imported(model, out, notes, **options)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
        path.write_bytes(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    imported(model, out, notes, **options)


def header(n_tensors: int, n_keys: int, rest: bytes) -> bytes:
    return b"PWRI" + struct.pack("<IQQ", 3, n_tensors, n_keys) + rest + bytes(64)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a text\n" * 50,
        b"PWRI" + bytes(100),
        b"PWRI" + np.random.default_rng(0).bytes(500),
        header(0, 0, b""),
        header(0, 1, struct.pack("<Q", 2**64 - 1)),
        header(2**63, 0, b""),
        header(1, 0, struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)),
        header(1, 0, struct.pack("<Q", 1) + b"a" + struct.pack("<IQIQ", 1, 2**40, 0, 0)),
        header(1, 0, struct.pack("<Q", 80) + b"a" * 80 + struct.pack("<IQIQ", 1, 1, 0, 0)),
    ],
)
def test_garbage_is_one_clear_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.powerinfer.gguf"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        import_model(ImportOptions(path, tmp_path / "out.powerinfer.gguf"), print)
    assert str(path) in str(caught.value)
    with pytest.raises(FormatError):
        powerinfer_files.read_split(path, [6])
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("architecture", "options", "words"),
    [
        ("gptneox", {}, "expected one of llama, bamboo, falcon, opt"),
        ("llama", {"leave_out": ["llama.block_count"]}, "llama.block_count is missing"),
        ("llama", {"leave_out": ["blk.1.ffn_gate.weight"]}, "its FFNs are"),
        ("llama", {"leave_out": ["blk.1.ffn_up.weight"]}, "its FFNs are"),
        ("llama", {"leave_out": [f"blk.{i}.ffn_down_t.weight" for i in range(3)]}, "no layer has ffn_down_t"),
        ("llama", {"threshold": float("nan")}, "sparse_threshold is nan"),
        ("opt", {"leave_out": ["position_embd.weight"]}, "position_embd.weight is missing"),
        ("opt", {"leave_out": ["blk.2.attn_k.weight"]}, "blk.2.attn_k.weight"),
    ],
)
def test_model_that_lacks_something_is_refused(architecture: str, options: dict, words: str, tmp_path: Path) -> None:
    model = write(tmp_path / "in", architecture, **options)
    with pytest.raises(FormatError) as caught:
        imported(model, tmp_path / "out.powerinfer.gguf")
    assert words in str(caught.value) and str(model.path) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_empty_tensor_is_refused(tmp_path: Path, notes: Notes) -> None:
    """Found by fuzzing: with `original/found-empty-tensor`, rows were divided by their number."""
    found = Path(__file__).parent / "fuzz" / "corpus" / "original" / "found-empty-tensor"
    path = tmp_path / "in.powerinfer.gguf"
    path.write_bytes(found.read_bytes())
    with pytest.raises(FormatError, match="is empty"):
        import_model(ImportOptions(path, tmp_path / "out.powerinfer.gguf"), notes)


def test_split_given_as_model_is_told_apart(tmp_path: Path) -> None:
    split = original_models.write_split(tmp_path / "s.gpuidx", split_masks(3, 160))
    with pytest.raises(FormatError, match="--split"):
        import_model(ImportOptions(split, tmp_path / "out.powerinfer.gguf"), print)


# ---- Command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sidecar", [False, True])
@pytest.mark.parametrize("step", ["quantize_rows", "bare_plan", "write_plan"])
def test_interrupt_leaves_nothing(
    step: str, sidecar: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: Notes
) -> None:
    model = write(tmp_path / "in", row_type="Q4_0")

    def stop(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_powerinfer if step == "quantize_rows" else pi_format, step, stop)
    with pytest.raises(KeyboardInterrupt):
        imported(model, tmp_path / "out.powerinfer.gguf", notes, sidecar=sidecar)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("name", "words"), [("out.gguf", "ends in"), (".powerinfer.gguf", "ends in"), ("m.powerinfer.gguf", "is an input")]
)
def test_output_is_checked_before_work(name: str, words: str, tmp_path: Path, notes: Notes) -> None:
    model = write(tmp_path)
    before = model.path.read_bytes()
    with pytest.raises(OptionError, match=words):
        imported(model, tmp_path / name, notes)
    assert model.path.read_bytes() == before


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path / "in")
    (tmp_path / "in" / "activation").mkdir()
    out = tmp_path / "out.powerinfer.gguf"
    assert cli.main(["import", str(model.path), "-o", str(out), "--threads", "2"]) == 0
    shown = capsys.readouterr()
    assert "llama with relu, 3 layers, 3 predictors that read the FFN input" in shown.out
    assert "pass --activation" in shown.err
    with _core.Plan.open(out, sparsity="predicted", strict=True) as plan:
        assert plan.n_layer == 3
    assert cli.main(["import", str(out), "-o", str(tmp_path / "again.powerinfer.gguf")]) == 1
    assert "extended GGUF already" in capsys.readouterr().err
    assert cli.main(["import", str(model.path), "-o", str(out), "--threads", "0"]) == 1


def test_import_without_statistics_needs_no_torch(tmp_path: Path) -> None:
    model = write(tmp_path / "in")
    folder = original_models.write_activations(tmp_path / "in" / "activation", hot_counts(3, 160))
    code = "import sys; sys.modules['torch'] = None; from powerinfer_py import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "import", str(model.path), "-o", str(tmp_path / "o.powerinfer.gguf")]
    assert subprocess.run(command, capture_output=True).returncode == 0
    done = subprocess.run([*command, "--activation", str(folder)], capture_output=True, text=True)
    assert done.returncode == 1 and "pip install 'powerinfer_py[convert]'" in done.stderr
