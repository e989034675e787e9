"""`powerinfer convert` against transformers: logits of every family, every checkpoint format, and every way to be wrong."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import hf_checkpoints as hf
import llama_cpp
import numpy as np
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

import powerinfer_py
from powerinfer_py import cli
from powerinfer_py import format as pi_format
from powerinfer_py.tools import convert_hf_to_powerinfer_gguf as convert_tool
from powerinfer_py.tools import pack_plan

ROOT = Path(__file__).resolve().parent.parent

# F32 throughout: what is left is the order of summation.
TOLERANCE = 1e-3
# ggml's GELU is the tanh form, rounded to F16 and looked up; transformers' gelu is the exact one.
GELU_TOLERANCE = 3e-3
MAX_KL = 0.02  # of a quantized model against the checkpoint
N_TOKENS = 40
TOKENS = np.random.default_rng(0).integers(3, 380, N_TOKENS).tolist()
EXACT_OPTIONS = {
    "n_ctx": 128, "n_batch": 128, "logits_all": True, "type_k": 0, "type_v": 0, "flash_attn": False,
    "n_threads": 2, "n_threads_batch": 2, "verbose": False,
}  # fmt: skip
# Activation of upstream's graph, where stock llama.cpp computes what the model means.
STOCK_RIGHT = {
    "llama-silu", "mistral-silu", "qwen2", "qwen3", "falcon-gelu", "nemotron", "nemotron-biases", "arcee", "gemma",
}  # fmt: skip


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "powerinfer_py.tools.hf_tokenizer", tiny_models.stand_in_tokenizer())


@pytest.fixture
def notes(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What convert said, as it goes."""
    logger = logging.getLogger("powerinfer_py")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def convert(folder: Path, *arguments: object, outtype: str = "f32", out: Path | None = None) -> Path:
    """The file that the command makes of a checkpoint."""
    out = out or folder.parent / "out.powerinfer.gguf"
    command = ["convert", str(folder), "--outfile", str(out), "--outtype", outtype, "-t", "2", *map(str, arguments)]
    assert cli.main(command) == 0
    return out


def logits(path: Path, sparsity: str = "exact") -> np.ndarray:
    with powerinfer_py.Llama(str(path), sparsity=sparsity, **EXACT_OPTIONS) as model:
        model.eval(TOKENS)
        return model.scores[:N_TOKENS].copy()


def stock_logits(path: Path) -> np.ndarray:
    model = llama_cpp.Llama(str(path), **EXACT_OPTIONS)
    try:
        model.eval(TOKENS)
        return model.scores[:N_TOKENS].copy()
    finally:
        model.close()


def calm(oracle: hf.Oracle) -> None:
    """Makes logits as flat as those of a model that knows little: random weights don't forgive rounding otherwise."""
    with torch.no_grad():
        oracle.model.get_output_embeddings().weight *= 0.5


def kl(found: np.ndarray, expected: np.ndarray) -> float:
    """Mean KL divergence of found from expected, nats per token."""
    p, q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (expected, found))
    return float((p.exp() * (p - q)).sum(-1).mean())


# ---- Families ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    oracle = hf.FAMILIES[family]()
    out = convert(oracle.save(tmp_path / "hf"))
    expected = oracle.logits(TOKENS)
    assert expected.std() > 0.2
    tolerance = GELU_TOLERANCE if oracle.activation == "gelu" else TOLERANCE
    for sparsity in ("dense", "exact"):
        assert np.abs(logits(out, sparsity) - expected).max() < tolerance, sparsity
    plan = pi_format.read_plan(out)
    assert plan.activation == oracle.activation
    assert all(layer.ffn_down_t.row_type == gguf.GGMLQuantizationType.F32 for layer in plan.layers)
    # the base in the file is a stock GGUF in its own order
    base = tmp_path / "base.gguf"
    pack_plan.extract(out, base)
    found = stock_logits(base)
    if family in STOCK_RIGHT:
        assert np.abs(found - expected).max() < tolerance
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "base.gguf", "base.powerinfer.gguf", "hf", "out.powerinfer.gguf",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "family, config",
    [
        ("llama-relu", {"intermediate_size": 64}),
        ("bamboo", {"intermediate_size": 64, "num_key_value_heads": 4}),
        ("qwen2", {"intermediate_size": 64, "num_key_value_heads": 4}),
        ("falcon-new", {"ffn_hidden_size": 64}),
        ("opt", {"ffn_dim": 64}),
        ("nemotron", {"intermediate_size": 64}),
    ],
)
def test_square_matrices_are_transposed_once(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    oracle = hf.FAMILIES[family](**config)
    out = convert(oracle.save(tmp_path / "hf"))
    expected = oracle.logits(TOKENS)
    for sparsity in ("dense", "exact"):
        assert np.abs(logits(out, sparsity) - expected).max() < TOLERANCE, sparsity


@pytest.mark.parametrize("n_kv", [8, 4, 2, 1])
@pytest.mark.parametrize("family", ["llama-relu", "nemotron", "qwen3"])
def test_grouped_queries(tmp_path: Path, family: str, n_kv: int) -> None:
    oracle = hf.FAMILIES[family](num_attention_heads=8, num_key_value_heads=n_kv)
    out = convert(oracle.save(tmp_path / "hf"))
    assert np.abs(logits(out) - oracle.logits(TOKENS)).max() < TOLERANCE


@pytest.mark.parametrize("family", ["llama-relu", "qwen2", "nemotron", "falcon-relu"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings(tmp_path: Path, family: str, tied: bool) -> None:
    oracle = hf.FAMILIES[family](tie_word_embeddings=tied)
    out = convert(oracle.save(tmp_path / "hf"))
    assert np.abs(logits(out) - oracle.logits(TOKENS)).max() < TOLERANCE
    base = pi_format.read_plan(out).open_base()
    assert ("output.weight" in base.tensors) == (not tied or family == "nemotron")


def test_embeddings_are_the_head_where_nobody_says_so_and_there_is_no_other(tmp_path: Path) -> None:
    oracle = hf.FAMILIES["llama-relu"](tie_word_embeddings=True)
    oracle.config["tie_word_embeddings"] = ...
    out = convert(oracle.save(tmp_path / "hf"))
    assert np.abs(logits(out) - oracle.logits(TOKENS)).max() < TOLERANCE


def test_a_head_stored_beside_gemmas_embeddings_is_those(tmp_path: Path) -> None:
    oracle = hf.gemma()
    oracle.config["tie_word_embeddings"] = ...
    folder = oracle.save(tmp_path / "hf")
    as_single(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    out = convert(folder)
    assert np.abs(logits(out) - oracle.logits(TOKENS)).max() < GELU_TOLERANCE
    assert "output.weight" not in pi_format.read_plan(out).open_base().tensors


@pytest.mark.parametrize(
    "family, rope",
    [
        ("llama-relu", {"rope_type": "linear", "factor": 4.0}),
        ("qwen2", {"rope_type": "linear", "factor": 2.0}),
        ("llama-relu", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
        ("qwen3", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0}),
        (
            "llama-relu",
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        ("llama-relu", {"rope_type": "default", "rope_theta": 500.0}),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_rope_scaling(tmp_path: Path, family: str, rope: dict[str, Any], old: bool) -> None:
    oracle = hf.FAMILIES[family](rope_parameters={"rope_theta": 10000.0, **rope})
    plain = hf.FAMILIES[family]()
    folder = oracle.save(tmp_path / "hf")
    if old:  # as transformers 4 wrote it
        scaling = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
        scaling = {"type": rope["rope_type"], **scaling} if scaling else None
        hf.change_config(folder, rope_parameters=..., rope_theta=rope.get("rope_theta", 10000.0), rope_scaling=scaling)
    out = convert(folder)
    expected = oracle.logits(TOKENS)
    assert np.abs(expected - plain.logits(TOKENS)).max() > 10 * TOLERANCE
    assert np.abs(logits(out) - expected).max() < TOLERANCE


# ---- Checkpoint formats and types ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safetensors", "single", "bin", "bin-shards"])
def test_every_checkpoint_format_gives_the_same_file(tmp_path: Path, kind: str) -> None:
    oracle = hf.FAMILIES["qwen2"](tie_word_embeddings=True)
    out = convert(oracle.save(tmp_path / "hf", kind=kind))
    assert np.abs(logits(out) - oracle.logits(TOKENS)).max() < TOLERANCE
    if kind == "safetensors":
        assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1


def test_names_without_the_root_are_found_as_in_opt(tmp_path: Path) -> None:
    oracle = hf.opt()
    folder = oracle.save(tmp_path / "hf", kind="bin")
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save({name.removeprefix("model."): t for name, t in tensors.items()}, folder / "pytorch_model.bin")
    assert np.abs(logits(convert(folder)) - oracle.logits(TOKENS)).max() < TOLERANCE


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_auto_keeps_the_checkpoints_own_type_bit_for_bit(tmp_path: Path, name: str) -> None:
    oracle = hf.FAMILIES["mistral-relu"]()
    oracle.model.to({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[name])
    out = convert(oracle.save(tmp_path / "hf"), outtype="auto")
    base = pi_format.read_plan(out).open_base()
    up = oracle.model.state_dict()["model.layers.1.mlp.up_proj.weight"]
    assert base.tensor("blk.1.ffn_up.weight").type_name == name
    assert bytes(base.raw("blk.1.ffn_up.weight")) == up.contiguous().view(torch.uint8).numpy().tobytes()
    down = oracle.model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    assert np.array_equal(pi_format.read_plan(out).layers[1].ffn_down_t.to_f32(), down.float().T.numpy())
    assert base.tensor("blk.1.ffn_norm.weight").type_name == "f32"


@pytest.mark.parametrize("outtype", ["q8_0", "q4_0"])
@pytest.mark.parametrize("family", ["llama-relu", "prosparse", "bamboo", "minicpm-relu", "qwen2", "falcon-new", "opt", "nemotron", "arcee"])  # fmt: skip
def test_quantized_models_stay_near(tmp_path: Path, family: str, outtype: str) -> None:
    # as long rows as real ones have: the error of a sum of few products is that of few weights
    n_ff = {"falcon-new": "ffn_hidden_size", "opt": "ffn_dim"}.get(family, "intermediate_size")
    oracle = hf.FAMILIES[family](**{n_ff: 512})
    calm(oracle)
    out = convert(oracle.save(tmp_path / "hf"), outtype=outtype)
    assert kl(logits(out), oracle.logits(TOKENS)) < MAX_KL
    plan = pi_format.read_plan(out)
    assert {layer.ffn_down_t.row_type.name.lower() for layer in plan.layers} == {outtype}


@pytest.mark.parametrize(
    "n_embd, n_ff, outtype, down, down_t",
    [
        (256, 512, "q4_k", "q6_k", "q6_k"),  # the medium mix: the last layer's down has more bits
        (256, 512, "q5_k_s", "q5_k", "q5_k"),
        (64, 1000, "q4_k_m", "f16", "f16"),
        (64, 256, "q6_k", "q6_k", "q8_0"),
        (64, 300, "q4_0", "f16", "f16"),
        (64, 31, "q8_0", "f16", "f16"),
        (96, 1856, "bf16", "bf16", "bf16"),
    ],
)
def test_down_rows_get_the_type_that_libllama_chose_or_the_next_that_fits(
    tmp_path: Path, n_embd: int, n_ff: int, outtype: str, down: str, down_t: str
) -> None:
    oracle = hf.FAMILIES["llama-relu"](hidden_size=n_embd, intermediate_size=n_ff)
    calm(oracle)
    out = convert(oracle.save(tmp_path / "hf"), outtype=outtype)
    plan = pi_format.read_plan(out)
    assert plan.open_base().tensor("blk.1.ffn_down.weight").type_name.lower() == down
    assert plan.layers[1].ffn_down_t.row_type.name.lower() == down_t
    assert kl(logits(out), oracle.logits(TOKENS)) < MAX_KL


def test_down_rows_come_from_the_original_weights(tmp_path: Path) -> None:
    oracle = hf.FAMILIES["llama-relu"](intermediate_size=256)
    out = convert(oracle.save(tmp_path / "hf"), outtype="q4_0")
    down = oracle.model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    expected = tiny_models.quantize_rows(down.T.numpy(), gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(pi_format.read_plan(out).layers[1].ffn_down_t.data, expected)


def test_sidecar_leaves_the_base_beside_it(tmp_path: Path) -> None:
    oracle = hf.FAMILIES["llama-silu"]()
    convert(oracle.save(tmp_path / "hf"), "--sidecar", out=tmp_path / "x.powerinfer.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "x.gguf", "x.powerinfer.gguf"]
    assert np.abs(logits(tmp_path / "x.gguf") - oracle.logits(TOKENS)).max() < TOLERANCE
    assert np.abs(stock_logits(tmp_path / "x.gguf") - oracle.logits(TOKENS)).max() < TOLERANCE


# ---- Statistics, predictors, importance ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama-relu", "bamboo", "opt", "nemotron"])
def test_any_neuron_order_gives_the_same_logits(tmp_path: Path, family: str) -> None:
    oracle = hf.FAMILIES[family]()
    folder = oracle.save(tmp_path / "hf")
    (tmp_path / "activation").mkdir()
    counts = [torch.randint(0, 1000, (100,), generator=torch.Generator().manual_seed(i)) for i in range(hf.N_LAYER)]
    for i, values in enumerate(counts):
        torch.save(values, tmp_path / "activation" / f"activation_{i}.pt")
    out = convert(folder, "--activation", tmp_path / "activation")
    for layer, values in zip(pi_format.read_plan(out).layers, counts):
        assert np.array_equal(layer.neuron_order, np.argsort(-values.numpy(), kind="stable"))
        assert np.all(np.diff(layer.neuron_frequency) <= 0)
    for sparsity in ("dense", "exact"):
        assert np.abs(logits(out, sparsity) - oracle.logits(TOKENS)).max() < TOLERANCE


def test_predictors_in_the_checkpoint_skip_what_the_original_skips(tmp_path: Path) -> None:
    folder = hf.turbosparse().save(tmp_path / "hf")
    masked = hf.turbosparse(masked=True)
    (tmp_path / "activation").mkdir()
    for i in range(hf.N_LAYER):
        torch.save(torch.randperm(100), tmp_path / "activation" / f"activation_{i}.pt")
    out = convert(folder, "--activation", tmp_path / "activation")
    plan = pi_format.read_plan(out)
    assert plan.predictor_input == "ffn_input" and {layer.predictor for layer in plan.layers} == {"mlp"}
    expected = masked.logits(TOKENS)
    assert np.abs(expected - hf.turbosparse().logits(TOKENS)).max() > 10 * TOLERANCE
    assert np.abs(logits(out, "predicted") - expected).max() < TOLERANCE


@pytest.mark.parametrize(
    "family, threshold, wished",
    [("llama-relu", 0.0, "ffn_input"), ("llama-relu", 0.5, "residual"), ("opt", 0.0, "residual"), ("falcon-new", 0.0, "residual")],
)  # fmt: skip
def test_predictor_folder_reads_the_ffn_input_where_that_is_the_same(
    tmp_path: Path, family: str, threshold: float, wished: str
) -> None:
    oracle = hf.FAMILIES[family]()
    (tmp_path / "predictor").mkdir()
    (tmp_path / "predictor" / "config.json").write_text(json.dumps({"sparse_threshold": threshold}))
    for i in range(hf.N_LAYER):
        tensors = {"fc1.weight": torch.randn(8, hf.N_EMBD), "fc2.weight": torch.randn(100, 8)}
        torch.save(tensors, tmp_path / "predictor" / f"model_{i}.pt")
    out = convert(oracle.save(tmp_path / "hf"), "--predictor", tmp_path / "predictor", outtype="q8_0")
    plan = pi_format.read_plan(out)
    assert plan.predictor_input == wished
    last = plan.layers[-1]
    assert last.predictor == "mlp" and last.predictor_threshold == threshold
    fc1 = tensors["fc1.weight"].numpy()
    if wished == "ffn_input":
        fc1 = fc1 / oracle.model.model.layers[-1].post_attention_layernorm.weight.detach().numpy()
    assert np.abs(last.fc1.to_f32() - fc1).max() < 0.01 * np.abs(fc1).max()


@pytest.mark.parametrize("family", ["llama-relu", "llama-silu"])
def test_text_gives_order_and_thresholds(tmp_path: Path, family: str, notes: list[str]) -> None:
    oracle = hf.FAMILIES[family]()
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{word} the an {word * 7}" for word in range(120)))
    out = convert(oracle.save(tmp_path / "hf"), "--text", text)
    plan = pi_format.read_plan(out)
    layer = plan.layers[0]
    assert layer.profile_tokens > 0 and np.all(np.diff(layer.neuron_frequency) <= 0) and "text.txt" in plan.corpus
    assert np.abs(logits(out, "dense") - oracle.logits(TOKENS)).max() < TOLERANCE
    assert (plan.loss is not None) == (family == "llama-silu")
    down = oracle.model.state_dict()["model.layers.0.mlp.down_proj.weight"].numpy()
    assert np.array_equal(layer.ffn_down_t.to_f32(), down.T[layer.neuron_order])


def test_nothing_is_said_of_the_plan_that_is_only_profiled(tmp_path: Path, notes: list[str]) -> None:
    oracle = hf.FAMILIES["llama-silu"]()
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{word} the an {word * 7}" for word in range(120)))
    convert(oracle.save(tmp_path / "hf"), "--text", text, outtype="q8_0")
    assert not [said for said in notes if ".tmp" in said or "neuron-major" in said]


def write_imatrix(folder: Path, names: dict[str, int]) -> tuple[Path, Path]:
    """The same importance in both formats."""
    rng = np.random.default_rng(1)
    values = {name: rng.random(n, np.float32) ** 4 + np.float32(1e-4) for name, n in names.items()}
    writer = gguf.GGUFWriter(folder / "imatrix.gguf", "")
    writer.add_string("general.type", "imatrix")
    for name, importance in values.items():
        writer.add_tensor(f"{name}.in_sum2", importance * np.float32(4))
        writer.add_tensor(f"{name}.counts", np.array([4], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = np.int32(len(values)).tobytes()
    for name, importance in values.items():
        data += np.int32(len(name)).tobytes() + name.encode() + np.array([2, len(importance)], np.int32).tobytes()
        data += (importance * np.float32(2)).tobytes()
    (folder / "imatrix.dat").write_bytes(data)
    return folder / "imatrix.gguf", folder / "imatrix.dat"


def test_imatrix_of_both_formats_steers_the_quantization(tmp_path: Path) -> None:
    oracle = hf.FAMILIES["llama-relu"](intermediate_size=256)
    folder = oracle.save(tmp_path / "hf")
    shapes = pi_format.read_plan(convert(folder)).open_base()
    names = {
        n: shapes.tensor(n).ne[0] for n in shapes.tensors if n.startswith("blk.") and len(shapes.tensor(n).ne) == 2
    }
    results = {}
    for path in (None, *write_imatrix(tmp_path, names)):
        base = pi_format.read_plan(
            convert(folder, *([] if path is None else ["--imatrix", path]), outtype="q4_0")
        ).open_base()
        results[path and path.suffix] = {name: bytes(base.raw(name)) for name in names}
    assert results[".gguf"] == results[".dat"]
    assert all(results[".gguf"][name] != results[None][name] for name in names)


# ---- What is said, and what is refused -----------------------------------------------------------------------------


def test_notes_say_once_where_stock_llama_cpp_is_wrong(tmp_path: Path, notes: list[str]) -> None:
    convert(hf.bamboo().save(tmp_path / "hf"))
    assert [note for note in notes if "stock llama.cpp computes silu" in note and "drelu" in note] == notes
    notes.clear()
    convert(hf.FAMILIES["llama-silu"]().save(tmp_path / "hf2"))
    assert not notes


def test_strict_refuses_a_sliding_window_that_would_be_ignored(
    tmp_path: Path, notes: list[str], capsys: pytest.CaptureFixture
) -> None:
    folder = hf.FAMILIES["mistral-silu"](sliding_window=64).save(tmp_path / "hf")
    out = convert(folder)
    assert any("sliding_window is 64" in note for note in notes)
    out.unlink()
    assert cli.main(["convert", str(folder), "-o", str(out), "--strict"]) == 1
    assert "sliding_window is 64" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [folder]


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def missing_shard(folder: Path) -> None:
    first_shard(folder).unlink()


def shard_without_tensor(folder: Path) -> None:
    tensors = load_file(first_shard(folder))
    tensors.pop(min(tensors))
    save_file(tensors, first_shard(folder))


def truncated(share: float) -> Any:
    def cut(folder: Path) -> None:
        data = first_shard(folder).read_bytes()
        first_shard(folder).write_bytes(data[: int(share * len(data))])

    return cut


def as_single(folder: Path, change: Any) -> None:
    """All tensors in one file, changed."""
    tensors = {name: t for shard in folder.glob("*.safetensors") for name, t in load_file(shard).items()}
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def tensors_with(**changes: Any) -> Any:
    """Tensors of layer 1 replaced by what a function makes of them; None: taken away."""

    def change(folder: Path) -> None:
        def replace_tensors(tensors: dict[str, torch.Tensor]) -> None:
            for stem, function in changes.items():
                name = f"model.layers.1.mlp.{stem}.weight"
                old = tensors.pop(name, None)
                if function is not None:
                    tensors[name] = function(old)

        as_single(folder, replace_tensors)

    return change


def config_with(**values: Any) -> Any:
    return lambda folder: hf.change_config(folder, **values)


def torch_garbage(folder: Path) -> None:
    as_single(folder, lambda tensors: None)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_weights(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink(missing_ok=True)


WRONG = {
    "missing shard": (missing_shard, ["isn't there", "download the missing shard"]),
    "shard lacks a tensor": (shard_without_tensor, ["has no tensor", "the index says so"]),
    "truncated at 10 %": (truncated(0.1), ["truncated or damaged"]),
    "truncated at 50 %": (truncated(0.5), ["truncated or damaged"]),
    "truncated at 99 %": (truncated(0.99), ["truncated or damaged"]),
    "empty file": (truncated(0.0), ["truncated or damaged"]),
    "no weights": (no_weights, ["has neither model.safetensors nor pytorch_model.bin"]),
    "not a torch file": (torch_garbage, ["torch can't read it as plain tensors"]),
    "int8": (tensors_with(up_proj=lambda t: t.to(torch.int8)), ["up_proj.weight is I8", "expected float32"]),
    "missing tensor": (tensors_with(up_proj=None), ["has no tensor model.layers.1.mlp.up_proj.weight"]),
    "strange tensor": (tensors_with(other=lambda _: torch.ones(2)), ["model.layers.1.mlp.other.weight", "no place"]),
    "transposed": (tensors_with(down_proj=lambda t: t.T.contiguous()), ["shape [100, 64]", "expected [64, 100]"]),
    "other width": (config_with(hidden_size=128), ["expected [384, 128]"]),
    "more layers": (config_with(num_hidden_layers=3), ["has no tensor model.layers.2."]),
    "fewer layers": (config_with(num_hidden_layers=1), ["model.layers.1.", "no place"]),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), ["config.json", "check the folder"]),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), ["config.json", "expected JSON"]),
    "unknown architecture": (config_with(architectures=["XForCausalLM"]), ["architectures", "XForCausalLM", "LlamaForCausalLM, "]),
    "unknown activation": (config_with(hidden_act="xielu"), ["hidden_act is 'xielu'", "relu, fatrelu, relu2"]),
    "no activation": (config_with(hidden_act=...), ["hidden_act is missing", "relu, fatrelu, relu2"]),
    "fatrelu without cut": (config_with(hidden_act="fatrelu"), ["hidden_act_param is missing"]),
    "experts": (config_with(num_local_experts=8), ["num_local_experts is '8'"]),
    "quantized": (config_with(quantization_config={"bits": 4}), ["quantization_config"]),
    "dynamic rope": (config_with(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), ["rope_parameters", "default, linear, yarn, llama3"]),
    "partial rope": (config_with(rope_parameters={"partial_rotary_factor": 0.5}), ["rope_parameters", "all of a head"]),
    "rope without factor": (config_with(rope_parameters={"rope_type": "linear"}), ["factor"]),
    "heads": (config_with(num_attention_heads=3), ["num_attention_heads is '3'"]),
    "words for numbers": (config_with(vocab_size="many"), ["vocab_size is 'many'"]),
    "f16 too small": (tensors_with(up_proj=lambda t: t * 1e6), ["aren't finite as f16", "bf16"]),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_checkpoint_is_one_clear_error_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture, what: str
) -> None:
    folder = hf.FAMILIES["llama-relu"]().save(tmp_path / "hf")
    change, words = WRONG[what]
    change(folder)
    outfile = tmp_path / "out.powerinfer.gguf"
    assert cli.main(["convert", str(folder), "-o", str(outfile), "--outtype", "f16"]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("powerinfer: ") and "\n" not in error
    for word in words:
        assert word in error
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    "oracle, config, words",
    [
        (hf.opt, {"do_layer_norm_before": False}, ["do_layer_norm_before is 'False'; expected true"]),
        (hf.opt, {"word_embed_proj_dim": 32}, ["word_embed_proj_dim is '32'; expected 64"]),
        (hf.opt, {"activation_function": "tanh"}, ["activation_function is 'tanh'"]),
        (hf.falcon, {"alibi": True}, ["alibi is 'True'; expected false"]),
        (hf.falcon, {"parallel_attn": False}, ["parallel_attn is 'False'; expected true"]),
        (hf.falcon, {"hidden_act": "gelu"}, ["hidden_act is 'gelu'; expected activation's value, 'relu'"]),
        (hf.bamboo, {"hidden_act": "silu"}, ["hidden_act is 'silu'; expected one of relu, drelu"]),
        (hf.minicpm, {"scale_emb": ...}, ["scale_emb is missing"]),
        (hf.nemotron, {"head_dim": 32}, ["head_dim is '32'; expected 64 / 4"]),
        (hf.arcee, {"mlp_bias": True}, ["mlp_bias is 'True'; expected false"]),
        (hf.arcee, {"architectures": [["ArceeForCausalLM"]]}, ["architectures is", "expected one of"]),
        (hf.arcee, {"hidden_act": ["relu2"]}, ["hidden_act is", "expected one of"]),
        (hf.falcon, {"activation": ["relu"], "hidden_act": ["gelu"]}, ["expected activation's value"]),
        (hf.minicpm, {"scale_emb": 10**400}, ["scale_emb is", "expected a number above 0"]),
        (hf.gemma, {"tie_word_embeddings": False}, ["tie_word_embeddings is 'False'; expected true"]),
        (hf.gemma, {"hidden_activation": "relu"}, ["hidden_act is", "expected hidden_activation's value, 'relu'"]),
        (hf.arcee, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16}}, ["without beta_fast"]),
        (hf.arcee, {"rope_parameters": {"rope_type": ["yarn"]}}, ["rope_parameters is", "a text as its rope_type"]),
    ],
)
def test_what_an_architecture_cant_compute_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture, oracle: Any, config: dict[str, Any], words: list[str]
) -> None:
    folder = oracle().save(tmp_path / "hf")
    hf.change_config(folder, **config)
    assert cli.main(["convert", str(folder), "-o", str(tmp_path / "out.powerinfer.gguf")]) == 1
    error = capsys.readouterr().err.strip()
    for word in words:
        assert word in error
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["-o", "{}/x.gguf"], ["outfile", ".powerinfer.gguf"]),
        (["-o", "{}/none/x.powerinfer.gguf"], ["outfile", "isn't a folder"]),
        (["-o", "{}/x.powerinfer.gguf", "--outtype", "q9"], ["outtype"]),
        (["-o", "{}/x.powerinfer.gguf", "--imatrix", "{}/none"], ["imatrix", "leave it out"]),
        (["-o", "{}/x.powerinfer.gguf", "--outtype", "q4_0", "--imatrix", "{}/none"], ["none", "check the path"]),
        (["-o", "{}/x.powerinfer.gguf", "--outtype", "q4_0", "--imatrix", "{}/hf/config.json"], ["neither GGUF nor"]),
        (["-o", "{}/x.powerinfer.gguf", "--text", "a", "--activation", "b"], ["leave one out"]),
        (["-o", "{}/x.powerinfer.gguf", "-t", "0"], ["threads"]),
    ],
)
def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture, arguments: list[str], words: list[str]) -> None:
    folder = hf.FAMILIES["llama-relu"]().save(tmp_path / "hf")
    assert cli.main(["convert", str(folder), *(argument.format(tmp_path) for argument in arguments)]) == 1
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    for word in words:
        assert word in error
    assert list(tmp_path.iterdir()) == [folder]


def test_imatrix_of_another_model_is_refused_in_libllamas_words(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = hf.FAMILIES["llama-relu"]().save(tmp_path / "hf")
    path, legacy = write_imatrix(tmp_path, {"blk.0.attn_q.weight": 32, "blk.0.ffn_up.weight": 32})
    legacy.unlink()
    outfile = tmp_path / "out.powerinfer.gguf"
    command = ["convert", str(folder), "-o", str(outfile), "--outtype", "q4_0", "--imatrix", str(path)]
    assert cli.main(command) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "imatrix size 32 is different from tensor size 64" in error
    assert sorted(tmp_path.iterdir()) == [folder, path]


@pytest.mark.parametrize("where", ["write_base", "with_rows"])
def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    folder = hf.FAMILIES["llama-relu"]().save(tmp_path / "hf")
    real = getattr(convert_tool, where)

    def interrupted(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_tool, where, interrupted)
    assert cli.main(["convert", str(folder), "-o", str(tmp_path / "x.powerinfer.gguf"), "--outtype", "q8_0"]) == 130
    assert list(tmp_path.iterdir()) == [folder]


MEASURE = """
import sys, threading, time
sys.path.insert(0, {tests!r})
import tiny_models
sys.modules["powerinfer_py.tools.hf_tokenizer"] = tiny_models.stand_in_tokenizer()
from powerinfer_py import cli

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024

cli.main(["convert", {small!r}, "-o", {out!r}, "--outtype", {outtype!r}, "-t", "2"])  # what stays is counted before
before = peak = anonymous()
running = True

def watch():
    global peak
    while running:
        peak = max(peak, anonymous())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
code = cli.main(["convert", {model!r}, "-o", {out!r}, "--outtype", {outtype!r}, "-t", "2"])
running = False
thread.join()
print(code, peak - before)
"""


@pytest.mark.parametrize("outtype", ["f16", "q8_0"])
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_memory_is_that_of_a_few_tensors(tmp_path: Path, outtype: str) -> None:
    n_layer, n_embd, n_ff = 24, 128, 1024
    config = {"hidden_size": n_embd, "intermediate_size": n_ff, "num_hidden_layers": n_layer}
    model = hf.FAMILIES["llama-relu"](**config).save(tmp_path / "hf", kind="bin" if outtype == "f16" else "safetensors", shard="20MB")  # fmt: skip
    small = hf.FAMILIES["llama-relu"]().save(tmp_path / "small")
    n_bytes = sum(path.stat().st_size for path in model.iterdir())
    assert n_bytes > 40e6
    code = MEASURE.format(
        tests=str(ROOT / "tests"),
        small=str(small),
        model=str(model),
        out=str(tmp_path / "x.powerinfer.gguf"),
        outtype=outtype,
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    exit_code, peak = map(int, done.stdout.split()[-2:])
    assert exit_code == 0
    # a tensor has 1 MB; libllama's buffers and what malloc keeps come on top
    assert peak < 0.25 * n_bytes, f"{peak / 1e6:.0f} MB for a model of {n_bytes / 1e6:.0f} MB"


@pytest.mark.parametrize(
    "command",
    [
        [str(ROOT / "tools" / "convert_hf_to_powerinfer_gguf.py")],
        ["-m", "powerinfer_py.tools.convert_hf_to_powerinfer_gguf"],
    ],
)
def test_runs_as_a_script(tmp_path: Path, command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--outfile" in done.stdout and not done.stderr
    done = subprocess.run([sys.executable, *command, str(tmp_path), "-o", str(tmp_path / "x.powerinfer.gguf")], capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 1 and done.stderr.startswith("powerinfer: ") and done.stderr.count("\n") == 1
