"""Synthetic sparse models of any shape: a stock GGUF whose ReLU zeros are real, and its plan.

The zeros come from the weights and from inputs that change with every token; nothing is scripted. The predictor sees
only weights and sampled FFN inputs, as for any model (predictor.py).
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import NormalDist

import gguf
import numpy as np

from powerinfer_py.errors import OptionError
from powerinfer_py.format import BASE_TENSORS, SIDECAR_SUFFIX, PlanLayer, atomic_path, bare_plan, write_plan

from .predictor import calibrate_threshold, fit_linear_predictor, measure_predictor, round_predictor
from .row_types import dequantize_rows, plan_rows, quantize_rows, row_bytes, row_type_id

# Dimensions of the residual stream that hold one constant: a whole block of every 32-wide row type, so that the
# offsets of the neurons don't coarsen the rest of their rows.
N_CONSTANT = 32
# Share of the constant in the squared length of an embedding.
CONSTANT_SHARE = 0.1
# Weight of the attention's input times sqrt(layers): small, so that the first tokens, whose attention averages over
# little, have the same length and so the same density as later ones.
ATTENTION_GAIN = 0.5
# Share of gate's changing part that has no low-rank structure (standard deviation, of 1).
FULL_RANK_PART = 0.2
# Energy of the j-th structured direction ~ (1 + j) ** -SPECTRUM_DECAY.
SPECTRUM_DECAY = 0.5
ROPE_BASE = 10000.0
RMS_EPSILON = 1e-5
N_CONTROL_TOKENS = 3
N_BYTE_TOKENS = 256
# The pool of random blocks is rounded in rows of this many values: whole blocks of every type.
POOL_ROW = 256
N_THREADS = os.cpu_count() or 1


def _option(default, flag: str, text: str):
    return field(default=default, metadata={"flag": flag, "help": text})


@dataclass(frozen=True)
class SyntheticOptions:
    """What to generate. The defaults are the 1.2B shape."""

    layers: int = _option(16, "--layers", "number of layers")
    n_embd: int = _option(2048, "--n-embd", "embedding length, at least 64")
    n_ff: int = _option(8192, "--n-ff", "neurons per layer")
    heads: int = _option(32, "--heads", "attention heads")
    kv_heads: int = _option(0, "--kv-heads", "key/value heads; 0: as many as heads")
    vocab: int = _option(32000, "--vocab", "vocabulary size, at least 260")
    row_type: str = _option("q4_0", "--type", "ggml type of all weight rows, e.g. q4_0, q8_0, q4_K, f16, f32")
    density: float = _option(0.1, "--density", "wished share of active neurons, in (0, 1]")
    power_law: float = _option(
        1.0, "--power-law", "frequency of the k-th hottest neuron ~ k ** -EXPONENT; 0: all equal"
    )
    rank: int = _option(0, "--rank", "rank of the predictor, a multiple of 32; 0: n_embd / 16")
    predictor_type: str = _option("q4_0", "--predictor-type", "ggml type of the predictor's rows")
    recall: float = _option(0.96, "--recall", "share of active neurons that the predictor must keep")
    tokens: int = _option(
        384, "--tokens", "random tokens run through the model: half fit, a quarter each choose and measure"
    )
    seed: int = _option(0, "--seed", "of all random numbers")

    @property
    def n_kv(self) -> int:
        """Key/value heads."""
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        """Values per head."""
        return self.n_embd // self.heads

    @property
    def predictor_rank(self) -> int:
        """Rank of the predictor as stored."""
        return self.rank or max(32, self.n_embd // 16 // 32 * 32)

    def check(self) -> None:
        """Raises OptionError when the options can't be a model."""
        positive = ("layers", "n_ff", "heads", "n_kv")
        for name in positive:
            if getattr(self, name) < 1:
                raise OptionError(f"synthetic: {name} is {getattr(self, name)}; expected at least 1.")
        if self.n_embd < 2 * N_CONSTANT:
            raise OptionError(f"synthetic: n_embd is {self.n_embd}; expected at least {2 * N_CONSTANT}.")
        if self.n_embd % self.heads or self.head_dim % 2:
            raise OptionError(
                f"synthetic: {self.heads} heads don't cut n_embd {self.n_embd} into even parts; change --heads."
            )
        if self.heads % self.n_kv:
            raise OptionError(
                f"synthetic: {self.heads} heads can't share {self.n_kv} key/value heads; change --kv-heads."
            )
        if self.vocab < N_CONTROL_TOKENS + N_BYTE_TOKENS + 1:
            raise OptionError(f"synthetic: vocab is {self.vocab}; expected at least 260 (bytes, control, one word).")
        if not 0.0 < self.density <= 1.0 or not 0.0 < self.recall <= 1.0:
            raise OptionError(f"synthetic: density {self.density}, recall {self.recall}; expected shares in (0, 1].")
        if self.power_law < 0.0:
            raise OptionError(f"synthetic: power law exponent is {self.power_law}; expected 0 or more.")
        if self.tokens < 16:
            raise OptionError(f"synthetic: {self.tokens} tokens are too few to measure anything; expected at least 16.")
        if not 2 <= self.predictor_rank <= min(self.n_ff, self.n_embd):
            raise OptionError(
                f"synthetic: predictor rank is {self.predictor_rank}; expected 2 .. {min(self.n_ff, self.n_embd)}."
            )
        for n_values in (self.n_embd, self.n_ff):
            row_bytes(n_values, self.row_type)
        for n_values in (self.n_embd, self.predictor_rank):
            row_bytes(n_values, self.predictor_type)


PRESETS = {
    "1.2b": SyntheticOptions(),
    "7b": SyntheticOptions(layers=32, n_embd=4096, n_ff=11008, heads=32),
}


@dataclass(frozen=True)
class SyntheticReport:
    """What was measured, as means over layers; all on the tokens that neither fit nor threshold has seen.

    Attributes:
        density, candidate_density, recall: of the predictor's decisions (see predictor.PredictorQuality).
        overlap: Jaccard overlap of the active sets of consecutive tokens.
        top_share: share of activations that the most frequent fifth of the neurons has.
        token_bytes: weight bytes that a dense pass reads per token.
        predictor_bytes: bytes of all predictors.
    """

    density: float
    candidate_density: float
    recall: float
    overlap: float
    top_share: float
    token_bytes: int
    predictor_bytes: int


def power_law_frequencies(n: int, density: float, exponent: float) -> np.ndarray:
    """Frequencies f_k = min(cap, c k^-exponent), k = 1 .. n, with c such that their mean is the density.

    Args:
        n: number of neurons.
        density: wished mean, in (0, 1].
        exponent: 0 makes all equal.
    Returns:
        (n,) float64, falling, within [1e-6, 1 - 1e-6].
    """
    shape = np.arange(1, n + 1, dtype=np.float64) ** -exponent
    cap = min(max(0.95, (1.0 + density) / 2.0), 1.0 - 1e-6)
    low, high = 0.0, cap / shape[-1]
    for _ in range(200):
        scale = (low + high) / 2.0
        if np.minimum(cap, scale * shape).mean() < density:
            low = scale
        else:
            high = scale
    return np.maximum(np.minimum(cap, high * shape), 1e-6)


class RandomPool:
    """Random rows, rounded to the row type once; every random matrix of the model is a window of it.

    Windows start at random blocks, so two matrices have the same numbers at most in other places. Without it a 7B
    model would take minutes of random numbers and rounding.

    Attributes:
        std: standard deviation of the values, the power of two nearest 1 / sqrt(n_embd).
    """

    def __init__(self, options: SyntheticOptions, rng: np.random.Generator) -> None:
        self._rng = rng
        self._row_type = options.row_type
        self.std = 2.0 ** -round(math.log2(options.n_embd) / 2)
        n_rows = max(options.vocab, options.n_ff, options.n_embd) * options.n_embd // POOL_ROW + (1 << 12)
        values = rng.standard_normal((n_rows, POOL_ROW), dtype=np.float32)
        values *= np.float32(self.std)
        rows = quantize_rows(values, self._row_type, n_threads=N_THREADS)
        self._values = dequantize_rows(rows, self._row_type, out=values, n_threads=N_THREADS).ravel()
        self._bytes = rows.ravel()

    def window(self, n_rows: int, n_values: int) -> tuple[np.ndarray, np.ndarray]:
        """A random matrix.

        Returns:
            (n_rows, row bytes) uint8 and (n_rows, n_values) float32 that they decode to; read-only views.
        """
        n = n_rows * n_values
        block, block_bytes = gguf.GGML_QUANT_SIZES[row_type_id(self._row_type)]
        first = int(self._rng.integers((self._values.size - n) // block + 1))
        rows = self._bytes[first * block_bytes : (first * block + n) // block * block_bytes]
        values = self._values[first * block : first * block + n]
        return rows.reshape(n_rows, -1), values.reshape(n_rows, n_values)


class BaseWriter:
    """Streams the base GGUF: all tensors are announced first, then written in that order."""

    def __init__(self, path: Path, options: SyntheticOptions) -> None:
        self._writer = gguf.GGUFWriter(path, "llama")
        self._row_type = row_type_id(options.row_type)
        self.token_bytes = 0
        writer = self._writer
        writer.add_name(f"synthetic {options.layers}x{options.n_embd}x{options.n_ff}")
        writer.add_context_length(4096)
        writer.add_embedding_length(options.n_embd)
        writer.add_block_count(options.layers)
        writer.add_feed_forward_length(options.n_ff)
        writer.add_head_count(options.heads)
        writer.add_head_count_kv(options.n_kv)
        writer.add_layer_norm_rms_eps(RMS_EPSILON)
        writer.add_rope_dimension_count(options.head_dim)
        writer.add_rope_freq_base(ROPE_BASE)
        writer.add_vocab_size(options.vocab)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_byte_tokenizer(writer, options.vocab)
        n_embd, n_ff, n_kv_values = options.n_embd, options.n_ff, options.n_kv * options.head_dim
        self._announce("token_embd.weight", options.vocab, n_embd, is_read=False)
        for i_layer in range(options.layers):
            block = f"blk.{i_layer}."
            self._announce_norm(block + "attn_norm.weight", n_embd)
            self._announce(block + "attn_q.weight", n_embd, n_embd)
            self._announce(block + "attn_k.weight", n_kv_values, n_embd)
            self._announce(block + "attn_v.weight", n_kv_values, n_embd)
            self._announce(block + "attn_output.weight", n_embd, n_embd)
            self._announce_norm(block + "ffn_norm.weight", n_embd)
            self._announce(BASE_TENSORS["base_gate"] % i_layer, n_ff, n_embd)
            self._announce(BASE_TENSORS["base_up"] % i_layer, n_ff, n_embd)
            self._announce(BASE_TENSORS["base_down"] % i_layer, n_embd, n_ff)
        self._announce_norm("output_norm.weight", n_embd)
        self._announce("output.weight", options.vocab, n_embd)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()

    def _announce(self, name: str, n_rows: int, n_values: int, *, is_read: bool = True) -> None:
        block, size = gguf.GGML_QUANT_SIZES[self._row_type]
        shape = (n_rows, n_values // block * size)
        n_bytes = shape[0] * shape[1]
        self._writer.add_tensor_info(name, shape, np.dtype(np.uint8), n_bytes, raw_dtype=self._row_type)
        self.token_bytes += n_bytes if is_read else 0

    def _announce_norm(self, name: str, n_values: int) -> None:
        self._writer.add_tensor_info(name, (n_values,), np.dtype(np.float32), 4 * n_values)
        self.token_bytes += 4 * n_values

    def write(self, *tensors: np.ndarray) -> None:
        """Writes the next tensors."""
        for tensor in tensors:
            self._writer.write_tensor_data(tensor)

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def _add_byte_tokenizer(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """A SentencePiece vocabulary that spells any text in bytes; the rest are words that only generation produces."""
    kinds = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(N_BYTE_TOKENS))]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * N_BYTE_TOKENS]
    n_words = n_vocab - len(tokens)
    # the space is a word of its own: without it text would spell each space in three bytes
    tokens += ["\u2581", *(f"\u2581w{i}" for i in range(1, n_words))]
    types += [kinds.NORMAL] * n_words
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * N_CONTROL_TOKENS + [-float(i) for i in range(n_vocab - N_CONTROL_TOKENS)])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)


def _rms_norm(h: np.ndarray) -> np.ndarray:
    return h / np.sqrt(np.square(h).mean(axis=1, keepdims=True) + np.float32(RMS_EPSILON))


def _rotate(heads: np.ndarray) -> np.ndarray:
    """RoPE of pairs (2i, 2i + 1). heads: (n_heads, n_tokens, head_dim) float32."""
    n_heads, n_tokens, head_dim = heads.shape
    angles = np.outer(np.arange(n_tokens), ROPE_BASE ** (-np.arange(0, head_dim, 2) / head_dim))
    turn = np.exp(1j * angles).astype(np.complex64)
    return (np.ascontiguousarray(heads).view(np.complex64) * turn).view(np.float32).reshape(n_heads, n_tokens, head_dim)


def causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, n_heads: int, n_kv: int) -> np.ndarray:
    """Attention of one sequence with rotary positions.

    Args:
        q: (n_tokens, n_heads * head_dim) float32.
        k, v: (n_tokens, n_kv * head_dim) float32.
    Returns:
        (n_tokens, n_heads * head_dim) float32, before the output projection.
    """
    n_tokens = q.shape[0]
    queries = _rotate(q.reshape(n_tokens, n_heads, -1).transpose(1, 0, 2))
    keys = _rotate(k.reshape(n_tokens, n_kv, -1).transpose(1, 0, 2))
    values = v.reshape(n_tokens, n_kv, -1).transpose(1, 0, 2)
    future = np.triu(np.full((n_tokens, n_tokens), -np.inf, np.float32), 1)
    result = np.empty_like(queries)
    for i_head in range(n_heads):
        i_kv = i_head * n_kv // n_heads
        weights = queries[i_head] @ keys[i_kv].T / np.float32(math.sqrt(queries.shape[2])) + future
        weights = np.exp(weights - weights.max(axis=1, keepdims=True))
        result[i_head] = weights @ values[i_kv] / weights.sum(axis=1, keepdims=True)
    return result.transpose(1, 0, 2).reshape(n_tokens, -1)


def consecutive_overlap(active: np.ndarray) -> float:
    """Mean Jaccard overlap of the active sets of consecutive tokens.

    Args:
        active: (n_tokens >= 2, n_ff) bool.
    Returns:
        Between 0 and 1; two empty sets count as 1.
    """
    both = (active[1:] & active[:-1]).sum(axis=1)
    either = (active[1:] | active[:-1]).sum(axis=1)
    return float(np.where(either > 0, both / np.maximum(either, 1), 1.0).mean())


class _Generator:
    """State of one generation: options, random numbers, shared matrices, and the tokens' residual stream."""

    def __init__(self, options: SyntheticOptions) -> None:
        self.options = options
        self.rng = np.random.default_rng(options.seed)
        self.pool = RandomPool(options, self.rng)
        self.frequencies = power_law_frequencies(options.n_ff, options.density, options.power_law)
        normal = NormalDist()
        # (n_ff,) a neuron of frequency f is active where its standard normal signal exceeds this
        self.quantiles = np.array([-normal.inv_cdf(f) for f in self.frequencies])
        # length of a pool row: what a row's product with inputs of unit variance has as standard deviation
        self.row_length = self.pool.std * math.sqrt(options.n_embd)
        self.gate = np.empty((options.n_ff, options.n_embd), np.float32)

    def embeddings(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token embeddings of unit variance, with the constant in the first N_CONSTANT dimensions.

        Returns:
            (n_vocab, row bytes) uint8, and (n_tokens, n_embd) float32 of the tokens given.
        """
        options = self.options
        _, values = self.pool.window(options.vocab, options.n_embd)
        constant = math.sqrt(CONSTANT_SHARE / (1.0 - CONSTANT_SHARE) * (options.n_embd - N_CONSTANT) / N_CONSTANT)
        rows = np.empty((options.vocab, row_bytes(options.n_embd, options.row_type)), np.uint8)
        for first in range(0, options.vocab, 4096):
            part = values[first : first + 4096] * np.float32(1.0 / self.pool.std)
            part[:, :N_CONSTANT] = constant
            rows[first : first + 4096] = quantize_rows(part, options.row_type, n_threads=N_THREADS)
        return rows, dequantize_rows(rows[tokens], options.row_type)

    def output(self) -> np.ndarray:
        """Output projection of numbers of its own: a row that is also an embedding would always be the next token.

        The rows of control and byte tokens are zero: generated tokens are words.

        Returns:
            (n_vocab, row bytes) uint8.
        """
        options = self.options
        rows = np.empty((options.vocab, row_bytes(options.n_embd, options.row_type)), np.uint8)
        width = np.float32(self.pool.std * math.sqrt(12.0))
        for first in range(0, options.vocab, 4096):
            n_rows = min(4096, options.vocab - first)
            part = (self.rng.random((n_rows, options.n_embd), dtype=np.float32) - np.float32(0.5)) * width
            if first == 0:
                part[: N_CONTROL_TOKENS + N_BYTE_TOKENS] = 0.0
            rows[first : first + n_rows] = quantize_rows(part, options.row_type, n_threads=N_THREADS)
        return rows

    def down(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Down projection, one for all layers (rounding it twice for each would take half of the time).

        Its size makes the FFNs of all layers together add as much variance as the embedding has; it leaves the
        constant alone.

        Returns:
            ffn_down (n_embd, row bytes) uint8; ffn_down_t (n_ff, row bytes) uint8 and (n_ff, n_embd) float32.
        """
        options = self.options
        z, f = self.quantiles, self.frequencies
        # E[relu(s - z)^2] of a standard normal s, summed over neurons
        power = ((1.0 + z * z) * f - z * np.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi)).sum()
        size = math.sqrt(1.0 / options.layers / max(power, 1e-6)) / self.row_length / self.pool.std
        _, values = self.pool.window(options.n_embd, options.n_ff)
        values = values * np.float32(size)
        values[:N_CONSTANT] = 0.0
        down = quantize_rows(values, options.row_type, n_threads=N_THREADS)
        dequantize_rows(down, options.row_type, out=values, n_threads=N_THREADS)
        down_t = quantize_rows(values.T, options.row_type, n_threads=N_THREADS)
        return down, down_t, dequantize_rows(down_t, options.row_type, n_threads=N_THREADS)

    def gate_rows(self, x: np.ndarray) -> np.ndarray:
        """Gate of one layer, made for these FFN inputs; self.gate then holds what the rows decode to.

        Row i is U_i P / row_length + noise_i, so its signal is a mixture of n_embd / 16 shared directions P plus a
        part of its own, of variance 1 over tokens. The constant dimensions get -b_i / c (c: their mean sum), with
        b_i the quantile of the signal that makes the neuron active at its frequency. Which neuron gets which
        frequency is random.

        Args:
            x: (n_tokens, n_embd) float32, normed.
        Returns:
            (n_ff, row bytes) uint8.
        """
        options, gate = self.options, self.gate
        n_directions = max(8, options.n_embd // 16)
        energy = (1.0 + np.arange(n_directions)) ** -SPECTRUM_DECAY
        energy *= (1.0 - FULL_RANK_PART**2) / energy.sum() / self.row_length**2
        mixture = self.rng.standard_normal((options.n_ff, n_directions), dtype=np.float32)
        mixture *= np.sqrt(energy).astype(np.float32)
        _, directions = self.pool.window(n_directions, options.n_embd)
        _, noise = self.pool.window(options.n_ff, options.n_embd)
        np.matmul(mixture, directions, out=gate)
        noise_size = np.float32(FULL_RANK_PART / self.row_length)
        for first in range(0, options.n_ff, 512):
            gate[first : first + 512] += noise_size * noise[first : first + 512]
        changing = x[:, N_CONSTANT:]
        signal = (changing @ directions[:, N_CONSTANT:].T) @ mixture.T  # (n_tokens, n_ff)
        mean = signal.mean(axis=0)
        std = np.sqrt(signal.var(axis=0) + FULL_RANK_PART**2 * float(np.square(changing).mean()))
        offset = mean + std * self.rng.permutation(self.quantiles)
        gate[:, :N_CONSTANT] = (-offset / x[:, :N_CONSTANT].sum(axis=1).mean())[:, None]
        rows = quantize_rows(gate, options.row_type, n_threads=N_THREADS)
        dequantize_rows(rows, options.row_type, out=gate, n_threads=N_THREADS)
        return rows


def generate_synthetic(
    options: SyntheticOptions, path: str | os.PathLike[str], report: Callable[[str], None] = print
) -> SyntheticReport:
    """Writes a synthetic model `X.gguf` and its plan `X.powerinfer.gguf`.

    The model is an ordinary `llama`. Its first N_CONSTANT residual dimensions hold the same constant for every token
    and layer (no weight writes to them), which gives each gate row an offset, and so each neuron a frequency; the
    rest of the residual is random per token and moved by every attention and FFN. Random tokens are run through the
    model layer by layer as it grows: each layer's offsets are set for the inputs that really arrive, then its order,
    frequencies and predictor are measured on the rounded weights.

    Args:
        options: shape, type, sparsity.
        path: of the base GGUF; ends in .gguf.
        report: receives one line per layer and a summary.
    Returns:
        What was measured.
    Raises:
        OptionError: options that can't be a model, or a path that doesn't end in .gguf.
    """
    options.check()
    path = Path(path)
    if path.suffix != ".gguf" or path.name.endswith(SIDECAR_SUFFIX):
        raise OptionError(f"synthetic: output is {path}; expected a name such as model.gguf (the plan goes beside it).")
    started = time.monotonic()
    state = _Generator(options)
    with atomic_path(path) as temporary:
        writer = BaseWriter(temporary, options)
        try:
            layers, result = _write_layers(state, writer, report)
        finally:
            writer.close()
    bare = bare_plan(path, activation="relu")
    plan = replace(
        bare,
        corpus=f"synthetic: {options.tokens} random tokens, seed {options.seed}",
        layers=tuple(replace(layer, digest=known.digest) for layer, known in zip(layers, bare.layers)),
    )
    plan_path = write_plan(plan, path.with_name(path.stem + SIDECAR_SUFFIX))
    report(
        f"{path} and {plan_path.name}: {result.token_bytes / 1e6:.0f} MB read per dense token, "
        f"predictors {result.predictor_bytes / 1e6:.1f} MB, {time.monotonic() - started:.0f} s"
    )
    report(
        f"density {result.density:.3f}, overlap of consecutive tokens {result.overlap:.2f}, top 20 % of neurons have "
        f"{result.top_share:.0%} of activations; predictor recall {result.recall:.3f} "
        f"at candidate_density {result.candidate_density:.3f}"
    )
    return result


def _write_layers(
    state: _Generator, writer: BaseWriter, report: Callable[[str], None]
) -> tuple[list[PlanLayer], SyntheticReport]:
    options, pool, rng = state.options, state.pool, state.rng
    n_embd, n_ff, n_kv_values = options.n_embd, options.n_ff, options.n_kv * options.head_dim
    fit_end, choose_end = options.tokens // 2, options.tokens * 3 // 4
    tokens = rng.integers(N_CONTROL_TOKENS, options.vocab, options.tokens)
    embedding_rows, h = state.embeddings(tokens)
    writer.write(embedding_rows)
    down_rows, down_t_rows, down_t = state.down()
    # attention doesn't see the constant
    attention_norm = np.full(n_embd, ATTENTION_GAIN / math.sqrt(options.layers), np.float32)
    attention_norm[:N_CONSTANT] = 0.0
    ffn_norm = np.ones(n_embd, np.float32)
    layers, measured = [], []
    for i_layer in range(options.layers):
        q_rows, q = pool.window(n_embd, n_embd)
        k_rows, k = pool.window(n_kv_values, n_embd)
        v_rows, v = pool.window(n_kv_values, n_embd)
        output_rows, output = pool.window(n_embd, n_embd)
        output_rows = output_rows.copy()
        output_rows[:N_CONSTANT] = quantize_rows(np.zeros((N_CONSTANT, n_embd), np.float32), options.row_type)
        x = _rms_norm(h) * attention_norm
        attended = causal_attention(x @ q.T, x @ k.T, x @ v.T, options.heads, options.n_kv) @ output.T
        h[:, N_CONSTANT:] += attended[:, N_CONSTANT:]
        x = _rms_norm(h)
        gate_rows = state.gate_rows(x)
        up_rows, up = pool.window(n_ff, n_embd)
        writer.write(attention_norm, q_rows, k_rows, v_rows, output_rows, ffn_norm, gate_rows, up_rows, down_rows)

        gated = x @ state.gate.T
        active = gated > 0.0
        np.maximum(gated, 0.0, out=gated)
        gated *= x @ up.T
        h += gated @ down_t

        predictor = fit_linear_predictor(
            state.gate, x[:fit_end], options.predictor_rank - 1, seed=int(rng.integers(1 << 32))
        )
        predictor_rows = round_predictor(predictor, x[:fit_end], options.predictor_type)
        scores = predictor_rows.rounded.scores(x[fit_end:])
        n_choose = choose_end - fit_end
        threshold = calibrate_threshold(scores[:n_choose], active[fit_end:choose_end], options.recall)
        quality = measure_predictor(scores[n_choose:], active[choose_end:], threshold)
        overlap = consecutive_overlap(active)
        frequency = active.mean(axis=0, dtype=np.float64)
        order = np.argsort(-frequency, kind="stable").astype(np.int32)
        frequency = frequency[order].astype(np.float32)
        top_share = float(frequency[: n_ff // 5].sum() / max(frequency.sum(), 1e-9))
        measured.append((quality.density, quality.candidate_density, quality.recall, overlap, top_share))
        layers.append(
            PlanLayer(
                n_ff=n_ff,
                neuron_order=order,
                neuron_frequency=frequency,
                ffn_down_t=plan_rows(down_t_rows[order], options.row_type, n_embd),
                predictor="linear",
                fc1=plan_rows(predictor_rows.fc1, options.predictor_type, n_embd),
                fc2=plan_rows(predictor_rows.fc2[order], options.predictor_type, options.predictor_rank),
                predictor_threshold=threshold,
                predictor_recall=quality.recall,
                predictor_candidate_density=quality.candidate_density,
                profile_tokens=options.tokens,
                profile_density=float(active.mean()),
            )
        )
        report(
            f"layer {i_layer}: density {quality.density:.3f}, overlap {overlap:.2f}, recall {quality.recall:.3f} "
            f"at candidate_density {quality.candidate_density:.3f}"
        )
    # the constant says nothing about the next token
    output_norm = np.ones(n_embd, np.float32)
    output_norm[:N_CONSTANT] = 0.0
    writer.write(output_norm, state.output())
    density, candidate_density, recall, overlap, top_share = (float(v) for v in np.mean(measured, axis=0))
    predictor_bytes = sum(layer.fc1.data.nbytes + layer.fc2.data.nbytes for layer in layers)
    return layers, SyntheticReport(
        density, candidate_density, recall, overlap, top_share, writer.token_bytes, predictor_bytes
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags; they are SyntheticOptions' fields."""
    parser.add_argument("-o", "--output", required=True, metavar="OUT.gguf", help="base model; the plan goes beside it")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="a shape; other flags change it")
    for option in fields(SyntheticOptions):
        parser.add_argument(
            option.metadata["flag"],
            dest=option.name,
            type=type(option.default),
            help=f"{option.metadata['help']} (default: {option.default})".replace("%", "%%"),
        )


def run(args: argparse.Namespace) -> int:
    """Runs the verb. Returns the exit status."""
    given = {option.name: getattr(args, option.name) for option in fields(SyntheticOptions)}
    preset = PRESETS[args.preset] if args.preset else SyntheticOptions()
    options = replace(preset, **{name: value for name, value in given.items() if value is not None})
    generate_synthetic(options, args.output)
    return 0
