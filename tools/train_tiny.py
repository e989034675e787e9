"""Trains a small llama with a gated ReLU on free text: byte-level BPE, sparse activations, gates that can be predicted.

Writes a Hugging Face folder that transformers loads. State stands in its folder `training`, for --resume.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer_py.errors import OptionError, PowerInferError
from powerinfer_py.format import atomic_path

from .arguments import need_packages
from .terminal import interruptible

_SEPARATOR = "\f"  # between documents of a text file
_HELD_OUT_ONE_IN = 50  # documents, by checksum: the same text always falls on the same side
_END_OF_TEXT = "<|endoftext|>"
_N_CHECK_WINDOWS = 32  # of held-out text, spread evenly, for the loss that is logged
_N_WARMUP_STEPS = 200
_RAMP = (0.02, 0.4)  # of the run: between these the wished density falls to its aim
_START_DENSITY = 0.5
_CONTROL_RATE = 0.01  # per step: how fast a layer's pressure follows its distance from the wished density
_RANK_RAMP = 0.2  # of the run: the pull on the gates' tail reaches its full strength here
_N_LOGS_PER_CHECK = 6  # log entries per measurement on held-out text
_N_STEPS_PER_BASIS = 10  # steps between two looks for the gates' leading directions


@dataclass(frozen=True)
class TrainOptions:
    """Options of a run, with their defaults; _HELP says what each means."""

    text: tuple[Path, ...]
    out: Path
    minutes: float | None = 60.0
    steps: int | None = None
    vocab: int = 8192
    embd: int = 256
    layers: int = 6
    ff: int = 1536
    heads: int = 4
    heads_kv: int = 2
    ctx: int = 512
    batch: int = 4
    lr: float = 1.5e-3
    weight_decay: float = 0.1
    density: float = 0.12
    gate_rank: int = 64
    gate_pull: float = 5.0
    seed: int = 1
    threads: int = 2
    save_minutes: float = 3.0
    log_steps: int = 50
    compile: bool = False
    resume: bool = False


_HELP = {
    "text": "UTF-8 text, form feeds between documents; one document in fifty is held out",
    "out": "Hugging Face folder to write",
    "minutes": "length of the run; learning rate and density follow it",
    "steps": "length in steps instead",
    "vocab": "tokens of the vocabulary",
    "embd": "width of the residual stream",
    "layers": "blocks",
    "ff": "neurons per block",
    "heads": "attention heads",
    "heads_kv": "heads of keys and values",
    "ctx": "tokens per window",
    "batch": "windows per step",
    "lr": "peak learning rate",
    "weight_decay": "of the matrices",
    "density": "aim: share of neurons with relu(gate) > 0; 1 leaves out the pressure",
    "gate_rank": "leading directions of each gate that the pull leaves alone; 0 leaves out the pull",
    "gate_pull": "decay of a gate outside them, per step and unit of learning rate",
    "seed": "of weights and of the order of text",
    "threads": "threads of torch",
    "save_minutes": "minutes between checkpoints",
    "log_steps": "steps per log entry; every sixth measures held-out text",
    "compile": "torch.compile: half as fast again; needs a C++ compiler, and minutes to start",
    "resume": "go on from the checkpoint in the folder",
}
_PACKAGES = ("torch", "tokenizers", "safetensors", "matplotlib")
# What a resumed run may change.
_FREE_OPTIONS = {"out", "text", "minutes", "steps", "threads", "save_minutes", "log_steps", "compile", "resume"}


@dataclass
class TrainState:
    """What a checkpoint holds beside weights and optimizer.

    Attributes:
        step: optimizer steps done.
        seconds: spent training, over all runs.
        pressure: (n_layer,) weight of each layer's pressure.
        log: one entry per report.
    """

    step: int = 0
    seconds: float = 0.0
    pressure: list[float] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)


def check_options(options: TrainOptions) -> None:
    """Refuses what can't be trained, before anything is read.

    Raises:
        OptionError: a package is missing, a value is out of range, or sizes don't fit together.
    """
    need_packages("train_tiny", "train", *_PACKAGES)
    for name in ("vocab", "embd", "layers", "ff", "heads", "heads_kv", "ctx", "batch", "lr", "threads", "log_steps"):
        if not getattr(options, name) > 0:
            raise OptionError(f"{name}: {getattr(options, name)}; expected more than 0; pass a larger --{name}.")
    if (options.steps is None and not options.minutes > 0) or (options.steps is not None and options.steps < 1):
        raise OptionError(
            f"length: {options.steps} steps, {options.minutes} minutes; expected more than 0; pass --minutes or --steps."
        )
    if not 0.0 < options.density <= 1.0:
        raise OptionError(f"density: {options.density}; expected a share in (0, 1]; 1 leaves out the pressure.")
    if options.gate_rank < 0 or options.gate_pull < 0.0:
        raise OptionError(
            f"gate-rank, gate-pull: {options.gate_rank}, {options.gate_pull}; expected neither below 0; 0 leaves it out."
        )
    if options.vocab > 65536:
        raise OptionError(f"vocab: {options.vocab}; expected at most 65536 (tokens are kept in 16 bits); pass less.")
    if options.embd % (2 * options.heads) or options.heads % options.heads_kv:
        raise OptionError(
            f"heads: {options.heads} with {options.heads_kv} for keys, embd {options.embd}; expected heads of an even "
            "size, and a multiple of heads-kv; change one of them."
        )


def read_documents(paths: tuple[Path, ...]) -> tuple[list[str], list[str]]:
    """Documents of text files, to train on and held out.

    Args:
        paths: UTF-8 files, form feeds between documents.
    Returns:
        Two lists, in the order of the files. A document is held out by its checksum.
    Raises:
        OptionError: a file is missing or isn't UTF-8, or either list would be empty.
    """
    train, held_out = [], []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise OptionError(f"text: {path} doesn't exist; expected a UTF-8 text file; check --text.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"text: {path}: {error}; expected a UTF-8 text file; convert it first.") from None
        for document in text.split(_SEPARATOR):
            if document.strip():
                chosen = zlib.crc32(document.encode()) % _HELD_OUT_ONE_IN == 0
                (held_out if chosen else train).append(document)
    if not train or not held_out:
        raise OptionError(
            f"text: {len(train)} documents to train on, {len(held_out)} held out; expected some of both; "
            f"give more documents, with form feeds between them (one in {_HELD_OUT_ONE_IN} is held out)."
        )
    return train, held_out


def train_tokenizer(documents: list[str], n_vocab: int) -> Any:
    """A byte-level BPE tokenizer that splits words as GPT-2's does, which llama.cpp knows as `gpt-2`.

    Args:
        documents: texts to learn merges from.
        n_vocab: size of the vocabulary; token 0 ends a text.
    Returns:
        A tokenizers.Tokenizer with exactly n_vocab tokens.
    Raises:
        OptionError: the text has too few different words for the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=[_END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != n_vocab:
        raise OptionError(
            f"text: gives {tokenizer.get_vocab_size()} tokens; expected {n_vocab}; give more text or a smaller --vocab."
        )
    return tokenizer


def encode_documents(tokenizer: Any, documents: list[str]) -> np.ndarray:
    """Tokens of documents one after the other, an end token after each.

    Returns:
        (n_tokens,) uint16.
    """
    parts = []
    for first in range(0, len(documents), 64):
        for encoding in tokenizer.encode_batch_fast(documents[first : first + 64]):
            parts.append(np.array([*encoding.ids, 0], np.uint16))
    return np.concatenate(parts)


def batch_tokens(tokens: np.ndarray, step: int, options: TrainOptions) -> np.ndarray:
    """The windows of one step. Each epoch cuts the text at another offset and shuffles the windows.

    Args:
        tokens: (n_tokens,) of the training text.
        step: counted from 0.
    Returns:
        (batch, ctx + 1) int64.
    """
    n_windows = (len(tokens) - 1) // options.ctx - 1
    rows = []
    for i in range(step * options.batch, (step + 1) * options.batch):
        epoch, place = divmod(i, n_windows)
        rng = np.random.default_rng((options.seed, epoch))
        first = rng.integers(options.ctx) + rng.permutation(n_windows)[place] * options.ctx
        rows.append(tokens[first : first + options.ctx + 1])
    return np.stack(rows).astype(np.int64)


def held_out_windows(tokens: np.ndarray, options: TrainOptions) -> np.ndarray:
    """Windows of held-out text, spread evenly: (<= 32, ctx + 1) int64."""
    n_windows = (len(tokens) - 1) // options.ctx
    chosen = np.unique(np.linspace(0, n_windows - 1, _N_CHECK_WINDOWS).astype(int))
    return np.stack([tokens[i * options.ctx : (i + 1) * options.ctx + 1] for i in chosen]).astype(np.int64)


def wished_density(progress: float, aim: float) -> float:
    """The density that the pressure steers to at a point of the run: falls geometrically, then stays.

    Args:
        progress: of the run, 0 to 1.
        aim: density at the end, 0 to 1.
    """
    share = min(1.0, max(0.0, (progress - _RAMP[0]) / (_RAMP[1] - _RAMP[0])))
    start = max(_START_DENSITY, aim)
    return start * (aim / start) ** share


def learning_rate(step: int, progress: float, peak: float) -> float:
    """Linear warm-up over the first steps, then linearly to 0 at the end of the run."""
    return peak * min(1.0, (step + 1) / _N_WARMUP_STEPS) * max(0.0, 1.0 - progress)


class GatePull:
    """Pulls each gate towards its leading directions, so that a predictor of that rank sees most of it.

    A gate G (n_ff, n_embd) has leading right singular vectors V (n_embd, rank). After each optimizer step
    G -= rate (G - G V V^T): a weight decay of what lies outside them. V is found anew every few steps.
    """

    def __init__(self, gates: list[Any], rank: int) -> None:
        self.gates = gates
        self.rank = rank
        self.bases: list[Any] = []

    def find_bases(self) -> None:
        """Leading directions of the gates as they are now."""
        import torch

        self.bases = []
        for gate in self.gates:
            weight = gate.detach()
            _, vectors = torch.linalg.eigh(weight.T @ weight)
            self.bases.append(vectors[:, -self.rank :])

    def apply(self, rate: float) -> None:
        """One step of decay; rate in 0 .. 1."""
        import torch

        with torch.no_grad():
            for gate, basis in zip(self.gates, self.bases):
                gate.mul_(1.0 - rate).add_((gate @ basis) @ basis.T, alpha=rate / (1.0 - rate))

    def tail_share(self) -> list[float]:
        """Per gate: the part of its square norm that lies outside its leading directions."""
        import torch

        shares = []
        for gate in self.gates:
            squares = torch.linalg.svdvals(gate.detach()).square()
            shares.append(float(squares[self.rank :].sum() / squares.sum()))
        return shares


class Trainer:
    """Model, optimizer and state of one run."""

    def __init__(self, options: TrainOptions, train: np.ndarray, held_out: np.ndarray) -> None:
        import torch

        from .tiny_llama import TinyLlama, TinyShape

        torch.set_num_threads(options.threads)
        self.options = options
        self.train = train
        self.check = held_out_windows(held_out, options)
        shape = TinyShape(
            n_vocab=options.vocab,
            n_embd=options.embd,
            n_layer=options.layers,
            n_ff=options.ff,
            n_head=options.heads,
            n_head_kv=options.heads_kv,
            n_ctx=options.ctx,
        )
        self.model = TinyLlama(shape, options.seed)
        self.forward = torch.compile(self.model) if options.compile else self.model
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        vectors = [p for p in self.model.parameters() if p.ndim != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=options.lr,
            betas=(0.9, 0.95),
            fused=True,
        )
        gates = [layer.mlp.gate_proj.weight for layer in self.model.model.layers]
        self.pull = (
            GatePull(gates, options.gate_rank) if 0 < options.gate_rank < min(options.embd, options.ff) else None
        )
        self.state = TrainState(pressure=[0.0] * options.layers)

    def progress(self) -> float:
        """How much of the run is done, 0 to 1."""
        if self.options.steps is not None:
            return min(1.0, self.state.step / self.options.steps)
        return min(1.0, self.state.seconds / (60.0 * self.options.minutes))

    def take_step(self) -> float:
        """One optimizer step on the next windows.

        Returns:
            The loss: natural logarithm, mean per token, without pressure.
        """
        import torch
        from torch.nn import functional as F

        from .sparse_ffn import steered_weight

        options, state = self.options, self.state
        progress = self.progress()
        lr = learning_rate(state.step, progress, options.lr)
        windows = torch.from_numpy(batch_tokens(self.train, state.step, options))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = self.forward(windows[:, :-1])
        loss = F.cross_entropy(output.logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        total = loss
        if options.density < 1.0:
            total = loss + output.pressure @ torch.tensor(state.pressure)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.pull is not None:
            if state.step % _N_STEPS_PER_BASIS == 0:
                self.pull.find_bases()
            self.pull.apply(min(0.5, options.gate_pull * lr * min(1.0, progress / _RANK_RAMP)))
        wished = wished_density(progress, options.density)
        for i, found in enumerate(output.density.tolist()):
            state.pressure[i] = steered_weight(state.pressure[i], found, wished, _CONTROL_RATE)
        state.step += 1
        return float(loss.detach())

    def log_entry(self, losses: list[float], seconds: float) -> dict[str, Any]:
        """What is known of the last steps without another pass.

        Args:
            losses: of these steps.
            seconds: that they took.
        """
        state, n_tokens_per_step = self.state, self.options.batch * self.options.ctx
        return {
            "step": state.step,
            "tokens": state.step * n_tokens_per_step,
            "seconds": round(state.seconds, 1),
            "tokens_per_second": round(len(losses) * n_tokens_per_step / max(seconds, 1e-9)),
            "loss": sum(losses) / len(losses),
            "wished_density": round(wished_density(self.progress(), self.options.density), 4),
            "pressure": [round(x, 5) for x in state.pressure],
        }

    def measure(self) -> dict[str, Any]:
        """Held-out loss, density of each layer, neurons that never fire there, gates' tails."""
        import torch
        from torch.nn import functional as F

        losses, densities = [], []
        active = torch.zeros(self.options.layers, self.options.ff, dtype=torch.bool)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            for first in range(0, len(self.check), self.options.batch):
                windows = torch.from_numpy(self.check[first : first + self.options.batch])
                output = self.model(windows[:, :-1])
                loss = F.cross_entropy(output.logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction="none")
                losses.append(loss)
                densities.append(output.density * len(windows))
                active |= output.active
        return {
            "held_out_loss": float(torch.cat(losses).mean()),
            "density": [round(float(x) / len(self.check), 4) for x in sum(densities)],
            "dead": [int(x) for x in (~active).sum(dim=1)],
            "gate_tail": [round(x, 5) for x in self.pull.tail_share()] if self.pull else [],
        }

    def save(self, folder: Path) -> None:
        """Writes the checkpoint and the Hugging Face weights, each whole or not at all."""
        import torch
        from safetensors.torch import save_file

        (folder / "training").mkdir(parents=True, exist_ok=True)
        with atomic_path(folder / "training" / "checkpoint.pt") as path:
            torch.save(
                {
                    "options": {k: v for k, v in option_values(self.options).items() if k not in _FREE_OPTIONS},
                    "state": asdict(self.state),
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "bases": self.pull.bases if self.pull else [],
                },
                path,
            )
        with atomic_path(folder / "training" / "log.json") as path:
            log = {"options": option_values(self.options), "progress": self.progress(), "log": self.state.log}
            path.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
        with atomic_path(folder / "model.safetensors") as path:
            save_file(self.model.state_dict(), path, metadata={"format": "pt"})

    def load(self, folder: Path) -> None:
        """Takes up a checkpoint.

        Raises:
            OptionError: there is none, or it was made with other options.
        """
        import torch

        path = folder / "training" / "checkpoint.pt"
        if not path.is_file():
            raise OptionError(f"resume: {path} doesn't exist; expected a checkpoint; leave --resume out.")
        stored = torch.load(path, weights_only=True)
        for name, value in option_values(self.options).items():
            if name not in _FREE_OPTIONS and stored["options"][name] != value:
                raise OptionError(
                    f"resume: {path}: {name} is {stored['options'][name]}; this run has {value}; "
                    "give the same options or leave --resume out."
                )
        self.model.load_state_dict(stored["model"])
        self.optimizer.load_state_dict(stored["optimizer"])
        self.state = TrainState(**stored["state"])
        if self.pull is not None:
            self.pull.bases = stored["bases"]


def option_values(options: TrainOptions) -> dict[str, Any]:
    """The options as JSON takes them."""
    values = asdict(options)
    return {**values, "text": [path.name for path in options.text], "out": options.out.name}


def write_folder(folder: Path, tokenizer: Any, held_out: list[str], options: TrainOptions) -> None:
    """Writes what a Hugging Face folder holds beside weights, and the held-out text."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "relu",
        "vocab_size": options.vocab,
        "hidden_size": options.embd,
        "intermediate_size": options.ff,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.heads_kv,
        "head_dim": options.embd // options.heads,
        "max_position_embeddings": options.ctx,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _END_OF_TEXT,
        "eos_token": _END_OF_TEXT,
        "model_max_length": options.ctx,
        "clean_up_tokenization_spaces": False,
    }
    generation = {"bos_token_id": 0, "eos_token_id": 0}
    for name, values in [
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
    ]:
        with atomic_path(folder / name) as path:
            path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    with atomic_path(folder / "tokenizer.json") as path:
        tokenizer.save(str(path))
    with atomic_path(folder / "held-out.txt") as path:
        path.write_text("\n\n".join(held_out), encoding="utf-8")


def prepare(options: TrainOptions) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the text, to train on and held out; those of an earlier start when resuming.

    Returns:
        Two arrays (n_tokens,) uint16.
    """
    stored = [options.out / "training" / f"{name}.npy" for name in ("train", "held-out")]
    if options.resume and all(path.is_file() for path in stored):
        return np.load(stored[0], mmap_mode="r"), np.load(stored[1], mmap_mode="r")
    train, held_out = read_documents(options.text)
    tokenizer = train_tokenizer(train, options.vocab)
    tokens = tuple(encode_documents(tokenizer, documents) for documents in (train, held_out))
    for name, found in zip(("train", "held-out"), tokens):
        if len(found) < 2 * (options.ctx + 1):
            raise OptionError(
                f"text: {len(found)} tokens ({name}); expected at least {2 * (options.ctx + 1)}; "
                "give more text or a smaller --ctx."
            )
    (options.out / "training").mkdir(parents=True, exist_ok=True)
    write_folder(options.out, tokenizer, held_out, options)
    for target, found in zip(stored, tokens):
        with atomic_path(target) as path, path.open("wb") as file:
            np.save(file, found)
    return tokens


def train_tiny(options: TrainOptions, report: Callable[[Trainer, dict[str, Any] | None], None]) -> Trainer:
    """Trains until the run is done or interrupted; what was reached is saved either way.

    Args:
        options: of the run.
        report: called after each step, with a log entry where one was made.
    Returns:
        The trainer; its progress() is below 1 after an interruption.
    Raises:
        OptionError: text or options that can't be used.
    """
    check_options(options)
    train, held_out = prepare(options)
    trainer = Trainer(options, train, held_out)
    if options.resume:
        trainer.load(options.out)
    state = trainer.state
    began = time.monotonic() - state.seconds
    saved = time.monotonic()
    losses: list[float] = []
    last_seconds = state.seconds
    with interruptible() as stopped:
        while trainer.progress() < 1.0 and not stopped():
            losses.append(trainer.take_step())
            state.seconds = time.monotonic() - began
            entry = None
            if state.step % options.log_steps == 0:
                entry = trainer.log_entry(losses, state.seconds - last_seconds)
                if state.step % (_N_LOGS_PER_CHECK * options.log_steps) == 0:
                    entry.update(trainer.measure())
                state.log.append(entry)
                losses, last_seconds = [], state.seconds
            if time.monotonic() - saved > 60.0 * options.save_minutes:
                trainer.save(options.out)
                saved = time.monotonic()
            report(trainer, entry)
        if losses:
            state.log.append(trainer.log_entry(losses, state.seconds - last_seconds))
        if state.log and "held_out_loss" not in state.log[-1]:
            state.log[-1].update(trainer.measure())
            report(trainer, state.log[-1])
        trainer.save(options.out)
    return trainer


def write_curve(log: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draws loss and density over tokens as PNG.

    Args:
        log: entries of a run.
        path: the file.
        title: above the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.plot([e["tokens"] / 1e6 for e in log], [e["loss"] for e in log], linewidth=0.9, color="0.6", label="training")
    checks = [entry for entry in log if "held_out_loss" in entry]
    tokens = [entry["tokens"] / 1e6 for entry in checks]
    axes.plot(tokens, [entry["held_out_loss"] for entry in checks], linewidth=1.4, color="C0", label="held out")
    axes.set(xlabel="million tokens", ylabel="loss, nats per token", title=title)
    axes.grid(color="0.92")
    densities = axes.twinx()
    mean = [sum(entry["density"]) / len(entry["density"]) for entry in checks]
    densities.plot(tokens, mean, linewidth=1.2, color="C1", linestyle="--", label="density (right)")
    densities.set(ylabel="active neurons, mean of layers", ylim=(0, None))
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        figure.savefig(file, format="png")


def build_parser() -> argparse.ArgumentParser:
    """Flags made from the options."""
    parser = argparse.ArgumentParser(prog="python -m powerinfer_py.tools.train_tiny", description=__doc__)
    for option in fields(TrainOptions):
        flag = "--" + option.name.replace("_", "-")
        about = _HELP[option.name]
        if option.name == "text":
            parser.add_argument(flag, type=Path, nargs="+", required=True, metavar="FILE", help=about)
        elif option.name == "out":
            parser.add_argument(flag, type=Path, required=True, metavar="FOLDER", help=about)
        elif option.type == "bool":
            parser.add_argument(flag, action="store_true", help=about)
        else:
            kind = float if "float" in option.type else int
            parser.add_argument(flag, type=kind, default=option.default, help=f"{about} (default: %(default)s)")
    return parser


def run(options: TrainOptions) -> int:
    """Trains with a progress bar on stderr and a line per log entry on stdout.

    Returns:
        The exit code: 130 after an interruption.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=1.0)

        def report(trainer: Trainer, entry: dict[str, Any] | None) -> None:
            bar.update(task, completed=trainer.progress())
            if entry is None:
                return
            line = f"step {entry['step']}: {entry['tokens_per_second']} tokens/s, loss {entry['loss']:.3f}"
            if "held_out_loss" in entry:
                density = " ".join(f"{x:.3f}" for x in entry["density"])
                line += f", held out {entry['held_out_loss']:.3f}, density {density}"
            print(line, flush=True)

        trainer = train_tiny(options, report)
    write_curve(trainer.state.log, options.out / "training" / "curve.png", options.out.name)
    if trainer.progress() < 1.0:
        print(f"stopped at {trainer.progress():.1%}; go on with --resume")
        return 130
    print(f"model: {options.out}")
    return 0


def main() -> int:
    """The command line."""
    values = vars(build_parser().parse_args())
    try:
        return run(TrainOptions(**{**values, "text": tuple(values["text"])}))
    except (PowerInferError, OSError) as error:
        print(f"train_tiny: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
