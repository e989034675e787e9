"""`powerinfer_py.Llama` against `llama_cpp.Llama`: same logits, same API, nothing left behind.

Exactness needs F32 weights, F32 KV cache and no flash attention: the default F16 KV cache alone moves logits by 9e-4.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import pickle
import pydoc_data.topics
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
import tiny_models
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

import powerinfer_py
from powerinfer_py import Llama, _core
from powerinfer_py.errors import ClosedError, FormatError, OptionError, PlanError, PowerInferError
from powerinfer_py.gguf_file import GgufFile

STOCK = llama_cpp.Llama

# F32 throughout: what is left is the order of summation (measured: 3e-6).
TOLERANCE = 1e-4
# ggml's GELU rounds its input to F16 and looks the result up. Sums that differ in the last bit land on neighbouring
# entries now and then: stock differs from itself by 9e-4, on 7 % of 512 tokens, when its neurons are permuted.
GELU_TOLERANCE = 3e-3
# silu(k z) / k and gelu(k z) / k differ from relu(z) by less than 0.28 / k per neuron.
RELU_SCALE = 2.0**14
RELU_TOLERANCE = 5e-4

BATCHES = (1, 2, 3, 17, 512)
EXACT_OPTIONS = {
    "n_ctx": 640, "n_batch": 512, "n_ubatch": 512, "logits_all": True, "type_k": 0, "type_v": 0, "flash_attn": False,
    "n_threads": 2, "n_threads_batch": 2, "verbose": False,
}  # fmt: skip
ACTIVATIONS = {"llama": "silu", "gpt2": "gelu", "falcon": "gelu", "mpt": "gelu"}
SHAPES = [
    ("llama", {}),
    ("llama", {"n_embd": 68, "n_ff": 96}),
    ("llama", {"n_embd": 100, "n_ff": 1000}),
    ("llama", {"n_embd": 576, "n_ff": 768, "n_head": 9, "n_kv": 3, "n_layer": 2}),
    ("llama", {"n_head": 8, "n_kv": 4}),
    ("llama", {"n_head": 8, "n_kv": 1}),
    ("llama", {"n_head": 3, "head_dim": 32, "n_kv": 1}),
    ("llama", {"bias": True}),
    ("llama", {"tied": True}),
    ("gpt2", {}),
    ("gpt2", {"n_embd": 68, "n_ff": 768}),
    ("gpt2", {"n_embd": 100, "n_ff": 96, "up_bias": 1.0}),
    ("falcon", {}),
    ("falcon", {"n_embd": 68, "n_ff": 1000}),
    ("mpt", {}),
    ("mpt", {"n_embd": 100, "n_ff": 768}),
]


def logits_of(model: STOCK, n_tokens: int) -> np.ndarray:
    """Logits (n_tokens, n_vocab) of random tokens, evaluated as one batch from an empty context."""
    model.reset()
    model._ctx.kv_cache_clear()
    model.eval(np.random.default_rng(n_tokens).integers(3, 380, n_tokens).tolist())
    return model.scores[:n_tokens].copy()


@contextlib.contextmanager
def stock(path: Path, **options: Any) -> Iterator[STOCK]:
    """A stock model, closed at the end."""
    model = STOCK(str(path), **{**EXACT_OPTIONS, **options})
    try:
        yield model
    finally:
        model.close()


def stock_logits(path: Path, batches: tuple[int, ...] = BATCHES, **options: Any) -> list[np.ndarray]:
    with stock(path, **options) as model:
        return [logits_of(model, n) for n in batches]


def assert_close(found: np.ndarray, expected: np.ndarray, activation: str, what: str) -> None:
    difference = np.abs(found - expected)
    if activation == "gelu":
        assert difference.max() < GELU_TOLERANCE, what
        assert np.median(difference) < TOLERANCE, what
    else:
        assert difference.max() < TOLERANCE, what


def relu_twin(path: Path, out: Path, n_layer: int = 4) -> Path:
    """A copy whose SiLU or GELU, at its scale, is a ReLU: stock llama.cpp then computes what a `relu` plan means."""
    shutil.copy(path, out)
    file = GgufFile(out)
    data = np.memmap(out, np.uint8, "r+")
    first = "gate" if "blk.0.ffn_gate.weight" in file.tensors else "up"
    for i in range(n_layer):
        for name, scale in (
            (f"{first}.weight", RELU_SCALE),
            (f"{first}.bias", RELU_SCALE),
            ("down.weight", 1 / RELU_SCALE),
        ):
            tensor = file.tensors.get(f"blk.{i}.ffn_{name}")
            if tensor is not None:
                data[tensor.offset : tensor.offset + tensor.n_bytes].view(np.float32)[:] *= np.float32(scale)
    data.flush()
    return out


def write_lora(path: Path, model: Path, names: tuple[str, ...], n_layer: int, rank: int = 4, seed: int = 0) -> Path:
    """A LoRA with random matrices, strong enough to matter, for FFN tensors of all layers."""
    file = GgufFile(model)
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, file.get("general.architecture"))
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for i in range(n_layer):
        for name in names:
            n_in, n_out = file.tensors[f"blk.{i}.ffn_{name}.weight"].ne
            a = rng.standard_normal((rank, n_in), np.float32) / np.sqrt(n_in)
            b = rng.standard_normal((n_out, rank), np.float32) / np.sqrt(rank) * 0.5
            writer.add_tensor(f"blk.{i}.ffn_{name}.weight.lora_a", a.astype(np.float32))
            writer.add_tensor(f"blk.{i}.ffn_{name}.weight.lora_b", b.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model_with_plan(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A tiny model with its sidecar beside it."""
    path = Path(shutil.copy(tiny_model(), tmp_path / "model.gguf"))
    tiny_models.write_tiny_plan(path, order_seed=1, predictor="linear")
    return path


@pytest.fixture
def llama(model_with_plan: Path) -> Iterator[Llama]:
    with Llama(model_with_plan, n_ctx=512, verbose=False) as model:
        yield model


def run_python(code: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )


# ---- The same logits as llama_cpp ----------------------------------------------------------------------------------


def test_model_without_plan_equals_llama_cpp_bit_for_bit(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model()
    expected = stock_logits(path)
    with Llama(path, **EXACT_OPTIONS) as model:
        for n, logits in zip(BATCHES, expected):
            assert np.array_equal(logits_of(model, n), logits)
        assert model.stats().computed_by == "upstream"


@pytest.mark.parametrize(
    ("arch", "shape"), SHAPES, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
@pytest.mark.parametrize("predictor", ["linear", "mlp"])
def test_every_mode_with_all_neurons_active_equals_llama_cpp(
    arch: str, shape: dict, predictor: str, tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    path = tiny_model(arch, **shape)
    activation = ACTIVATIONS[arch]
    plan = tiny_plan(path, activation=activation, order_seed=1, frequency=True, predictor=predictor)
    expected = stock_logits(path)
    with Llama(path, plan=plan, sparsity="dense", **EXACT_OPTIONS) as model:
        for mode in ("dense", "exact", "predicted"):
            model.sparsity = mode
            model.reset_stats()
            for n, logits in zip(BATCHES, expected):
                assert_close(logits_of(model, n), logits, activation, f"{mode}, {n} tokens")
            stats = model.stats()
            assert stats.n_blocks_whole == len(BATCHES) * shape.get("n_layer", 4) and stats.n_blocks_by_op == 0
            assert stats.n_tokens == sum(BATCHES) * shape.get("n_layer", 4)
            assert stats.modes == ((mode if mode != "exact" else stats.modes[0][0], shape.get("n_layer", 4)),)
            assert stats.candidate_density == 1.0


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_relu_plan_computes_relu(
    arch: str, tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny_model(arch)
    expected = stock_logits(relu_twin(path, tmp_path / "twin.gguf"))
    plan = tiny_plan(path, activation="relu", order_seed=1, predictor="linear", rank=64, predictor_threshold=0.0)
    with Llama(path, plan=plan, sparsity="dense", **EXACT_OPTIONS) as model:
        for mode in ("dense", "exact", "predicted"):
            if mode == "predicted" and arch == "gpt2":
                continue  # this predictor doesn't know the bias
            model.sparsity = mode
            model.reset_stats()
            for n, logits in zip(BATCHES, expected):
                assert np.abs(logits_of(model, n) - logits).max() < RELU_TOLERANCE, f"{mode}, {n} tokens"
            stats = model.stats()
            assert 0.3 < stats.density < 0.7 if mode != "dense" else stats.density == 1.0
            assert (stats.candidate_density < 0.7) == (mode == "predicted")


def test_embedded_and_mapped_models_compute_the_same(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    path = tiny_model()
    expected = stock_logits(path)
    plans = {
        "embedded": (tiny_plan(path, order_seed=1, embedded=True), {}),
        "stored down": (path, {"plan": tiny_plan(path, order_seed=1, ffn_down_t="F32")}),
        "mapped": (path, {"plan": tiny_plan(path, ffn_down_t="F32"), "mapped": True}),
        "mapped, order": (path, {"plan": tiny_plan(path, order_seed=2, ffn_down_t="F32"), "mapped": True}),
        "locked": (path, {"plan": tiny_plan(path), "use_mlock": True}),
        "without mmap": (path, {"plan": tiny_plan(path), "use_mmap": False}),
    }
    for what, (model_path, options) in plans.items():
        with Llama(model_path, sparsity="dense", **options, **EXACT_OPTIONS) as model:
            for n, logits in zip(BATCHES, expected):
                assert_close(logits_of(model, n), logits, "silu", f"{what}, {n} tokens")


def test_thread_count_changes_only_the_order_of_summation(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    path = tiny_model()
    plan = tiny_plan(path, activation="relu", order_seed=1)
    results = {}
    for n_threads in (0, -1, 1, 2, 7):
        options = {**EXACT_OPTIONS, "n_threads": n_threads, "n_threads_batch": n_threads}
        with Llama(path, plan=plan, sparsity="exact", **options) as model:
            results[n_threads] = [logits_of(model, n) for n in (1, 17)]
            again = [logits_of(model, n) for n in (1, 17)]
            assert all(np.array_equal(a, b) for a, b in zip(results[n_threads], again))
            if n_threads <= 0:
                assert model.n_threads == model.n_threads_batch == _core.physical_cores()
    for found in results.values():
        assert all(np.abs(a - b).max() < TOLERANCE for a, b in zip(found, results[1]))


@pytest.mark.parametrize("names", [("gate",), ("up",), ("down",), ("gate", "up", "down")], ids="+".join)
def test_lora_on_the_ffn_equals_llama_cpp(
    names: tuple[str, ...], tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny_model()
    lora = write_lora(tmp_path / "lora.gguf", path, names, n_layer=4)
    plain = stock_logits(path)
    expected = stock_logits(path, lora_path=str(lora))
    assert np.abs(plain[-1] - expected[-1]).max() > 100 * TOLERANCE
    for sparsity in ("dense", "exact"):
        plan = tiny_plan(path, order_seed=1)
        with Llama(path, plan=plan, sparsity=sparsity, lora_path=str(lora), **EXACT_OPTIONS) as model:
            for n, logits in zip(BATCHES, expected):
                assert_close(logits_of(model, n), logits, "silu", f"{sparsity}, {n} tokens")
            assert model.stats().n_blocks_by_op > 0


def test_lora_on_a_relu_plan_keeps_the_plans_activation(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny_model()
    lora = write_lora(tmp_path / "lora.gguf", path, ("up",), n_layer=4)
    twin = relu_twin(path, tmp_path / "twin.gguf")
    expected = stock_logits(twin, lora_path=str(lora))
    with Llama(
        path, plan=tiny_plan(path, activation="relu", order_seed=1), lora_path=str(lora), **EXACT_OPTIONS
    ) as model:
        for n, logits in zip(BATCHES, expected):
            assert np.abs(logits_of(model, n) - logits).max() < RELU_TOLERANCE, f"{n} tokens"


def test_dense_smollm2_keeps_its_perplexity(smollm2: Path, tiny_plan: Callable[..., Path]) -> None:
    """2,000 tokens; the down projection is re-quantized along the neuron, so logits aren't equal."""
    plan = tiny_plan(smollm2, order_seed=1)
    text = "\n".join(pydoc_data.topics.topics[name] for name in ("objects", "execmodel")).encode()

    def mean_loss(model: STOCK) -> float:
        tokens = model.tokenize(text)[:2000]
        losses = []
        for start in range(0, 2000, 500):
            window = tokens[start : start + 500]
            model.reset()
            model.eval(window)
            logprobs = model.logits_to_logprobs(model.scores[: len(window) - 1])
            losses.append(-logprobs[np.arange(len(window) - 1), window[1:]])
        return float(np.concatenate(losses).mean())

    options = {**EXACT_OPTIONS, "n_ctx": 512}
    with stock(smollm2, **options) as reference:
        expected = mean_loss(reference)
    with Llama(smollm2, plan=plan, sparsity="dense", **options) as model:
        found = mean_loss(model)
    assert abs(np.exp(found - expected) - 1) < 0.005


# ---- Finding plans -------------------------------------------------------------------------------------------------


def test_sidecar_is_found_beside_the_model(model_with_plan: Path) -> None:
    with Llama(model_with_plan, verbose=False) as model:
        assert model.stats().computed_by == "powerinfer"
        assert model.sparsity == "auto"


def test_extended_gguf_alone_finds_its_base(model_with_plan: Path) -> None:
    with Llama(str(model_with_plan).replace(".gguf", ".powerinfer.gguf"), verbose=False) as model:
        assert model.stats().computed_by == "powerinfer"
        assert model.n_vocab() == 384


def test_embedded_base_needs_no_other_file(tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]) -> None:
    with Llama(tiny_plan(tiny_model(), embedded=True), verbose=False) as model:
        assert model("a", max_tokens=4)["choices"][0]["finish_reason"]


def test_plain_model_says_once_that_upstream_computes(
    tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "powerinfer_py"), Llama(tiny_model(), verbose=False) as model:
        model("a", max_tokens=2)
    assert [r for r in caplog.messages if "no plan" in r and "powerinfer profile" in r] == caplog.messages
    caplog.clear()
    with Llama(tiny_model(), sparsity="dense", verbose=False):
        assert not caplog.messages


def test_strict_refuses_a_model_without_plan(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(PlanError, match="no plan"):
        Llama(tiny_model(), strict=True, verbose=False)


def test_strict_refuses_a_mode_that_the_plan_cannot_run(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    path = tiny_model()
    with pytest.raises(PlanError):
        Llama(path, plan=tiny_plan(path), sparsity="predicted", strict=True, verbose=False)


def test_sparsity_without_plan_cannot_be_set(tiny_model: Callable[..., Path]) -> None:
    with Llama(tiny_model(), verbose=False) as model:
        with pytest.raises(PlanError):
            model.sparsity = "exact"
        model.sparsity = "dense"


def test_plan_of_another_model_is_refused_with_the_layer(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    with pytest.raises(PlanError, match=r"(?i)layer 0|blk\.0"):
        Llama(tiny_model(seed=1), plan=tiny_plan(tiny_model()), verbose=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [("empty.gguf", b""), ("text.gguf", b"hello"), ("cut.gguf", b"GGUF\3\0\0\0"), ("missing.gguf", None)],
)
def test_bad_model_file_is_one_format_error(name: str, content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FormatError, match=name):
        Llama(path, verbose=False)


def test_missing_model_is_a_value_error_as_in_llama_cpp() -> None:
    with pytest.raises(ValueError, match="no such file"):
        Llama("missing.gguf", verbose=False)


def test_two_plans_for_one_model_are_refused(tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]) -> None:
    path = tiny_model()
    with pytest.raises(OptionError, match="plan"):
        Llama(tiny_plan(path, embedded=True), plan=tiny_plan(path), verbose=False)


# ---- Options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nearest"), [("n_thread", "n_threads"), ("sparcity", "sparsity"), ("n_gpu_layer", "n_gpu_layers")]
)
def test_misspelt_option_is_an_error_with_the_nearest_name(
    name: str, nearest: str, tiny_model: Callable[..., Path]
) -> None:
    with pytest.raises(OptionError, match=f"{name}.*{nearest}"):
        Llama(tiny_model(), **{name: 1})


def test_unknown_sparsity_is_an_error(tiny_model: Callable[..., Path], llama: Llama) -> None:
    with pytest.raises(OptionError, match="exact"):
        Llama(tiny_model(), sparsity="exakt")
    with pytest.raises(OptionError):
        llama.sparsity = "exakt"
    assert llama.sparsity == "auto"


def test_obsolete_option_is_noted_once(tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    with Llama(tiny_model(), sparsity="dense", f16_kv=True, n_parts=1, verbose=False):
        assert sorted(message.split()[1] for message in caplog.messages) == ["f16_kv:", "n_parts:"]


def test_every_option_of_llama_cpp_is_known() -> None:
    import inspect

    ours = inspect.signature(Llama.__init__).parameters
    theirs = inspect.signature(STOCK.__init__).parameters
    assert [name for name, p in theirs.items() if p.kind is p.KEYWORD_ONLY and name not in ours] == []


def test_threads_default_to_physical_cores(llama: Llama) -> None:
    assert llama.n_threads == llama.n_threads_batch == _core.physical_cores()


# ---- Drop-in: what llama_cpp.Llama can do --------------------------------------------------------------------------


def test_streamed_text_equals_the_whole_one(llama: Llama) -> None:
    whole = llama("The river", max_tokens=40, temperature=0)["choices"][0]["text"]
    assert (
        "".join(c["choices"][0]["text"] for c in llama("The river", max_tokens=40, temperature=0, stream=True)) == whole
    )


@pytest.mark.parametrize("text", ["\u6b6a", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u00df\u266c"])
def test_characters_of_several_tokens_stream_whole(text: str, llama: Llama) -> None:
    grammar = llama_cpp.LlamaGrammar.from_string(f'root ::= "a{text}b"', verbose=False)
    options = {"max_tokens": 60, "temperature": 0}
    assert llama("x", grammar=grammar, **options)["choices"][0]["text"] == f"a{text}b"
    chunks = [c["choices"][0]["text"] for c in llama("x", grammar=grammar, stream=True, **options)]
    assert "".join(chunks) == f"a{text}b"
    assert "\ufffd" not in "".join(chunks)


@pytest.mark.parametrize(
    ("stop", "expected"), [(["34"], "12"), (["3456", "345"], "12"), (["1"], ""), ("9", "12345678")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_never_leaks(stop: str | list[str], expected: str, stream: bool, llama: Llama) -> None:
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "123456789"', verbose=False)
    options = {"grammar": grammar, "max_tokens": 20, "temperature": 0, "stop": stop}
    if stream:
        chunks = list(llama("x", stream=True, **options))
        text, reason = "".join(c["choices"][0]["text"] for c in chunks), chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = llama("x", **options)["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
    assert (text, reason) == (expected, "stop")


@pytest.mark.parametrize("prompt", ["", "   ", "a\0b", [1]], ids=["empty", "spaces", "nul", "bos"])
def test_odd_prompt_generates(prompt: str | list[int], llama: Llama) -> None:
    assert llama(prompt, max_tokens=4, temperature=0)["usage"]["completion_tokens"] >= 1


def test_prompt_larger_than_the_context_is_an_error_and_the_next_one_works(llama: Llama) -> None:
    with pytest.raises(ValueError, match="exceed context window"):
        llama("a" * 1_000_000, max_tokens=1)
    assert llama("a", max_tokens=1)["choices"]


def test_empty_prompt_of_a_model_that_adds_no_bos_starts_from_bos(smollm2: Path) -> None:
    with Llama(smollm2, sparsity="dense", n_ctx=64, verbose=False) as model:
        assert model("", max_tokens=4, temperature=0)["usage"]["completion_tokens"] >= 1


def test_chat_completion_streams_the_same(llama: Llama) -> None:
    messages = [{"role": "user", "content": "hello"}]
    whole = llama.create_chat_completion(messages, max_tokens=12, temperature=0)["choices"][0]["message"]["content"]
    chunks = llama.create_chat_completion(messages, max_tokens=12, temperature=0, stream=True)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole


def test_grammar_is_obeyed(llama: Llama) -> None:
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= ("yes" | "no") "."', verbose=False)
    assert llama("is it?", grammar=grammar, max_tokens=10)["choices"][0]["text"] in ("yes.", "no.")


def test_draft_model_changes_no_text(model_with_plan: Path, llama: Llama) -> None:
    prompt = "one two three one two three one two"
    expected = llama(prompt, max_tokens=24, temperature=0)["choices"][0]["text"]
    draft = LlamaPromptLookupDecoding(num_pred_tokens=4)
    with Llama(model_with_plan, n_ctx=512, draft_model=draft, verbose=False) as model:
        assert model(prompt, max_tokens=24, temperature=0)["choices"][0]["text"] == expected


def test_saved_state_continues_with_the_same_text(llama: Llama) -> None:
    tokens = llama.tokenize(b"The river came down")
    llama.eval(tokens)
    state = llama.save_state()
    first = [t for t, _ in zip(llama.generate([*tokens, 40], temp=0), range(12))]
    llama("something else", max_tokens=8)
    llama.load_state(state)
    assert [t for t, _ in zip(llama.generate([*tokens, 40], temp=0), range(12))] == first


def test_embeddings_equal_llama_cpp(tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]) -> None:
    path = tiny_model()
    options = {**EXACT_OPTIONS, "embedding": True, "logits_all": False}
    texts = ["a river", "the wall", "nobody minded"]
    with stock(path, **options) as reference:
        expected = np.array(reference.embed(texts), dtype=object)
    with Llama(path, plan=tiny_plan(path, order_seed=1), sparsity="dense", **options) as model:
        found = np.array(model.embed(texts), dtype=object)
        assert len(model.create_embedding("a river")["data"]) == 1
    for a, b in zip(found, expected):
        assert np.abs(np.array(a, float) - np.array(b, float)).max() < TOLERANCE


def test_logprobs_and_logit_bias(model_with_plan: Path) -> None:
    with Llama(model_with_plan, n_ctx=256, logits_all=True, verbose=False) as model:
        answer = model("a", max_tokens=3, temperature=0, logprobs=2, logit_bias={70: 1000.0})
        assert answer["choices"][0]["text"] == model.detokenize([70] * 3).decode()
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 3


def test_pickled_model_is_rebuilt_with_its_options(model_with_plan: Path, tiny_plan: Callable[..., Path]) -> None:
    plan = tiny_plan(model_with_plan, order_seed=3)
    with Llama(model_with_plan, plan=plan, sparsity="exact", n_ctx=256, verbose=False) as model:
        expected = model("a", max_tokens=8, temperature=0)["choices"][0]["text"]
        with pickle.loads(pickle.dumps(model)) as copy:
            assert copy.sparsity == "exact" and copy.n_ctx() == 256
            assert copy.stats().computed_by == "powerinfer"
            assert copy("a", max_tokens=8, temperature=0)["choices"][0]["text"] == expected


def test_vocab_only_loads(model_with_plan: Path) -> None:
    with Llama(model_with_plan, vocab_only=True, n_ctx=8, verbose=False) as model:
        assert model.tokenize(b"abc")


def test_install_replaces_llama_cpp_and_uninstall_restores_it(model_with_plan: Path) -> None:
    try:
        assert powerinfer_py.install() is None
        powerinfer_py.install()
        assert llama_cpp.Llama is llama_cpp.llama.Llama is Llama
        model = llama_cpp.Llama(model_path=str(model_with_plan), verbose=False)
        assert model.stats().computed_by == "powerinfer"
        model.close()
    finally:
        powerinfer_py.uninstall()
    assert llama_cpp.Llama is llama_cpp.llama.Llama is STOCK


def test_twenty_runs_at_temperature_0_give_one_text(llama: Llama) -> None:
    texts = set()
    for _ in range(20):
        llama.reset()
        texts.add(llama("Once upon a time", max_tokens=24, temperature=0)["choices"][0]["text"])
    assert len(texts) == 1


# ---- Statistics ----------------------------------------------------------------------------------------------------


def test_stats_of_one_decode(tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]) -> None:
    path = tiny_model()
    plan = tiny_plan(path, activation="relu", order_seed=1)
    with Llama(path, plan=plan, sparsity="exact", **EXACT_OPTIONS) as model:
        assert model.stats().density is None
        assert "exact x 4" in str(model.stats())
        for token in (5, 6, 7):
            model.eval([token])
        stats = model.stats()
        assert stats.n_tokens == 3 * 4
        assert stats.n_blocks_whole == 3 * 4
        assert 0 < stats.density < 1 == stats.candidate_density
        assert 0 < stats.overlap < 1
        # gate is read whole, up and down by the active share
        assert stats.bytes_share == pytest.approx((1 + 2 * stats.density) / 3, abs=1e-3)
        assert stats.row_types == ("f32",) and stats.n_slow_rows == 0
        assert stats.memory_bytes >= 4 * 3 * 256 * 64 * 4
        assert stats.total_us >= stats.gate_us
        assert "density" in str(stats)
        model.reset_stats()
        assert model.stats().n_tokens == 0


def test_slow_row_types_are_counted(tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]) -> None:
    path = tiny_model(row_type="MXFP4")
    with Llama(path, plan=tiny_plan(path), sparsity="dense", **EXACT_OPTIONS) as model:
        logits_of(model, 1)
        stats = model.stats()
        assert stats.n_slow_rows > 0
        assert "mxfp4" in stats.row_types


def test_capture_gives_the_inputs_of_every_block(llama: Llama) -> None:
    seen: list[tuple[int, tuple[int, ...], str]] = []
    llama._plan.set_capture(lambda i_layer, x: seen.append((i_layer, x.shape, x.dtype.name)))
    llama.eval([5, 6, 7])
    llama._plan.set_capture(None)
    assert seen[:3] == [(i, (3, 64), "float32") for i in range(3)]
    assert seen[3] == (3, (1, 64), "float32")  # logits were asked for the last token only
    llama.eval([8])
    assert len(seen) == 4


def test_exception_in_capture_is_raised_by_the_next_call(llama: Llama) -> None:
    def fail(i_layer: int, x: np.ndarray) -> None:
        raise KeyError(i_layer)

    llama._plan.set_capture(fail)
    llama.eval([5])
    with pytest.raises(KeyError):
        llama.stats()
    llama._plan.set_capture(None)
    assert llama.stats().n_tokens == 4


def test_counts_are_in_the_bases_order(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model(n_layer=2)
    with _core.Plan.open_bare(path, count=True, note=lambda text: None) as plan:
        load = powerinfer_py.llama._Load(plan, lambda params: None)
        token = powerinfer_py.llama._to_load.set(load)
        try:
            model = STOCK(str(path), **EXACT_OPTIONS)
        finally:
            powerinfer_py.llama._to_load.reset(token)
        logits_of(model, 17)
        counts = plan.counts(1)
        assert counts["n_tokens"] == 17
        assert counts["active"].shape == (256,) and counts["active"].dtype == np.uint64
        assert counts["gate_histogram"].shape == counts["product_histogram"].shape == (_core.N_BINS,)
        assert counts["gate_histogram"].sum() == 17 * 256
        assert counts["gate_abs_sum"].dtype == np.float64 and (counts["gate_abs_sum"] > 0).all()
        with pytest.raises(IndexError):
            plan.counts(2)
        plan.reset_counts()
        assert plan.counts(1)["n_tokens"] == 0
        model.close()


# ---- Several at once, and the end of each --------------------------------------------------------------------------


def run_threads(*targets: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_models_in_two_threads_dont_disturb_each_other(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    cases = [(tiny_model(), "silu"), (tiny_model("gpt2", n_embd=100, n_ff=96), "gelu"), (tiny_model(), "silu")]
    expected = [stock_logits(path) for path, _ in cases]
    plans = [tiny_plan(path, activation=activation, order_seed=i) for i, (path, activation) in enumerate(cases)]

    def work(i: int) -> None:
        path, activation = cases[i]
        for _ in range(3):
            with Llama(path, plan=plans[i], sparsity="dense", **EXACT_OPTIONS) as model:
                for n, logits in zip(BATCHES, expected[i]):
                    assert_close(logits_of(model, n), logits, activation, f"model {i}, {n} tokens")
                assert model.stats().n_tokens == sum(BATCHES) * 4

    run_threads(*[lambda i=i: work(i) for i in range(len(cases))])


def test_stock_model_loaded_beside_ours_stays_stock(model_with_plan: Path) -> None:
    def load(kind: type[STOCK]) -> None:
        for _ in range(5):
            model = kind(str(model_with_plan), n_ctx=64, verbose=True)
            assert (model._model.plan is not None) == (kind is Llama)
            model.close()

    run_threads(lambda: load(STOCK), lambda: load(Llama))


def test_one_object_in_two_threads_takes_turns(llama: Llama) -> None:
    prompts = ["The river came", "One year the snow"]
    expected = [llama(p, max_tokens=20, temperature=0)["choices"][0]["text"] for p in prompts]
    found: dict[int, str] = {}

    def work(i: int, stream: bool) -> None:
        for _ in range(3):
            if stream:
                chunks = llama(prompts[i], max_tokens=20, temperature=0, stream=True)
                found[i] = "".join(c["choices"][0]["text"] for c in chunks)
            else:
                found[i] = llama(prompts[i], max_tokens=20, temperature=0)["choices"][0]["text"]
            assert found[i] == expected[i]

    run_threads(lambda: work(0, True), lambda: work(1, True))
    run_threads(lambda: work(0, True), lambda: work(1, False))


def test_stream_that_another_call_interrupted_says_so(llama: Llama) -> None:
    stream = llama("The river", max_tokens=20, temperature=0, stream=True)
    next(stream)
    expected = llama("a", max_tokens=4, temperature=0)["choices"][0]["text"]
    with pytest.raises(PowerInferError, match="another one was started"):
        list(stream)
    llama.reset()
    assert llama("a", max_tokens=4, temperature=0)["choices"][0]["text"] == expected


def test_closed_model_raises_on_use(llama: Llama) -> None:
    stream = llama("The river", max_tokens=20, stream=True)
    next(stream)
    llama.close()
    llama.close()
    uses = [
        lambda: llama("a"),
        lambda: next(stream),
        lambda: llama.tokenize(b"a"),
        lambda: llama.detokenize([5]),
        lambda: llama.eval([5]),
        lambda: next(llama.generate([5])),
        lambda: llama.embed("a"),
        lambda: llama.save_state(),
        lambda: llama.n_ctx(),
        lambda: llama.model,
        lambda: llama.ctx,
        lambda: llama.stats(),
        lambda: llama.reset_stats(),
        lambda: setattr(llama, "sparsity", "dense"),
        lambda: llama.create_chat_completion([{"role": "user", "content": "a"}]),
        lambda: llama.__enter__(),
    ]
    for use in uses:
        with pytest.raises((ClosedError, PowerInferError)):
            use()


def test_plan_survives_close_twice_and_refuses_use(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    with _core.Plan.open(tiny_plan(tiny_model()), tiny_model()) as plan:
        assert plan.n_layer == 4 and plan.n_embd == 64 and plan.base_offset == 0
    plan.close()
    for use in (plan.stats, plan.layers, lambda: plan.kernels, lambda: plan.load_model(0), plan.reset_counts):
        with pytest.raises(ClosedError):
            use()


def test_failed_load_leaves_the_seam_clean(model_with_plan: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model_with_plan.read_bytes()[:-100_000])
    shutil.copy(str(model_with_plan).replace(".gguf", ".powerinfer.gguf"), tmp_path / "broken.powerinfer.gguf")
    with pytest.raises(PowerInferError):
        Llama(broken, verbose=False)
    with stock(model_with_plan) as model:
        assert model._model.plan is None


MEMORY_CODE = """
import ctypes, gc, sys
from powerinfer_py import Llama
def anonymous_kib():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # the allocator's free lists move by megabytes, with stock models too
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon", "RssShmem")))
for i in range(30):
    with Llama(sys.argv[1], n_ctx=256, n_threads=2, verbose=False) as model:
        model("The river", max_tokens=8)
        assert model.stats().computed_by == "powerinfer"
    del model
    gc.collect()  # cycles of llama_cpp's own objects would fragment the heap
    if i == 9:
        before = anonymous_kib()
print(anonymous_kib() - before)
"""


def test_twenty_loads_return_their_memory(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    path = Path(shutil.copy(tiny_model(n_ff=1000), tmp_path / "model.gguf"))
    tiny_models.write_tiny_plan(path, order_seed=1)
    done = run_python(MEMORY_CODE, path)
    assert done.returncode == 0, done.stderr
    assert abs(int(done.stdout.split()[-1])) <= 1024, "KiB of anonymous memory more after 20 loads"


EXIT_CODES = {
    "global": "model = Llama(path, verbose=False); model('a', max_tokens=2)",
    "stream left open": "model = Llama(path, verbose=False); s = model('a', max_tokens=9, stream=True); next(s)",
    "cycle": "class A: pass\na = A(); a.a = a; a.model = Llama(path, verbose=False)",
    "failed init": "try:\n    Llama(path, n_thread=1)\nexcept TypeError:\n    pass",
    "plan": "from powerinfer_py import _core\nplan = _core.Plan.open_bare(path, note=print)\nplan.set_capture(print)",
    "installed": "import powerinfer_py as p, llama_cpp\np.install()\nm = llama_cpp.Llama(path, verbose=False)",
}


@pytest.mark.parametrize("name", EXIT_CODES)
def test_interpreter_exits_quietly(name: str, model_with_plan: Path) -> None:
    done = run_python(
        f"import sys\nfrom powerinfer_py import Llama\npath = sys.argv[1]\n{EXIT_CODES[name]}", model_with_plan
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr and "leak" not in done.stderr, done.stderr


def test_plan_whose_capture_holds_it_is_collected(tiny_model: Callable[..., Path]) -> None:
    class Owner:
        n_alive = 0

        def __init__(self) -> None:
            Owner.n_alive += 1
            self.plan = _core.Plan.open_bare(tiny_model(), note=self.on_note)
            self.plan.set_capture(self.on_capture)

        def on_note(self, text: str) -> None:
            pass

        def on_capture(self, i_layer: int, x: np.ndarray) -> None:
            pass

        def __del__(self) -> None:
            Owner.n_alive -= 1

    Owner()
    gc.collect()
    assert Owner.n_alive == 0


def test_loading_leaves_no_openmp_team(smollm2: Path) -> None:
    """A second team, of the thread that decodes, would sleep at each barrier: 22 instead of 118 tokens/s."""
    code = (
        "import os, sys; from powerinfer_py import Llama\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "before = count()\n"
        "llm = Llama(sys.argv[1], n_ctx=256, n_threads=2, n_threads_batch=2, sparsity='dense', verbose=False)\n"
        "loaded = count()\n"
        "llm('a', max_tokens=1)\n"
        "sys.exit(0 if loaded == before < count() else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, smollm2], check=False).returncode == 0
