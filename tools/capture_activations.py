"""FFN inputs and active sets of sampled tokens, per layer, in memory-mapped shards: what predictors are trained with.

Windows of text are shared out once, by seed, to three parts: fit, calibrate, measure. No window is in two of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer_py.errors import FormatError, OptionError, PlanError
from powerinfer_py.format import BaseModel, Plan, atomic_path

from .active_sets import ActiveSets
from .terminal import Steps
from .text_runner import Runner

SHARDS_VERSION = 1
PARTS = ("fit", "calibrate", "measure")
_HELD_OUT_SHARE = 0.15  # of the windows, each: those that calibrate, those that measure
MIN_WINDOWS = len(PARTS)
_SAVE_EVERY_S = 20.0


@dataclass(frozen=True)
class Sample:
    """Which tokens are kept.

    Attributes:
        order: (n_used,) numbers of the windows in the order of the shards: those of fit, calibrate, measure.
        n_windows: of each part.
        n_kept: tokens kept of each window.
        seed: of the choice.
    """

    order: np.ndarray
    n_windows: tuple[int, int, int]
    n_kept: int
    seed: int

    @property
    def n_tokens(self) -> int:
        """Tokens in the shards."""
        return len(self.order) * self.n_kept

    def rows(self, part: str) -> slice:
        """Rows of the shards that belong to a part."""
        i = PARTS.index(part)
        return slice(sum(self.n_windows[:i]) * self.n_kept, sum(self.n_windows[: i + 1]) * self.n_kept)

    def windows(self, part: str) -> np.ndarray:
        """Numbers of the windows of a part."""
        i = PARTS.index(part)
        return self.order[sum(self.n_windows[:i]) : sum(self.n_windows[: i + 1])]

    def tokens(self, window: int, n_ctx: int) -> np.ndarray:
        """(n_kept,) positions kept of one window, ascending; the same whatever was done before."""
        chosen = np.random.default_rng([self.seed, window]).permutation(n_ctx)[: self.n_kept]
        return np.sort(chosen)


def choose_sample(n_windows: int, n_ctx: int, token_bytes: int, max_bytes: int, seed: int) -> Sample:
    """Shares windows out, and keeps as many tokens of each as the limit has room for.

    Args:
        n_windows: at least MIN_WINDOWS.
        n_ctx: tokens per window.
        token_bytes: of one token in all shards.
        max_bytes: of all shards.
        seed: of the choice.

    Returns:
        The sample.

    Raises:
        OptionError: not one token per part fits.
    """
    n_fitting = max_bytes // token_bytes
    if n_fitting < MIN_WINDOWS:
        raise OptionError(
            f"bytes: {max_bytes}; one token takes {token_bytes}; expected room for {MIN_WINDOWS} tokens at least; "
            "pass a larger --bytes or fewer --layers."
        )
    order = np.random.default_rng(seed).permutation(n_windows)[:n_fitting]
    n_held_out = max(1, round(_HELD_OUT_SHARE * len(order)))
    parts = (len(order) - 2 * n_held_out, n_held_out, n_held_out)
    return Sample(order, parts, int(min(n_ctx, n_fitting // len(order))), seed)


class Shards:
    """Two files per layer in a folder: `layer-NNN.x.npy` (n_tokens, n_embd) float16 and `layer-NNN.active.npy`
    (n_tokens, ceil(n_ff / 8)) uint8, bits in the plan's order, lowest bit first; and `capture.json`.

    float16 halves what float32 takes, and changes 3 of 10000 decisions about active neurons (SmolLM2).
    """

    def __init__(
        self, folder: Path, identity: dict[str, Any], sample: Sample, n_embd: int, n_ff: dict[int, int]
    ) -> None:
        """
        Args:
            folder: of the shards.
            identity: what shards that are there already must agree with to be of use, by name.
            sample: which tokens are kept.
            n_embd: width.
            n_ff: neurons by layer, of the layers that are captured.
        """
        self.folder = folder
        self.identity = identity
        self.sample = sample
        self.n_embd = n_embd
        self.n_ff = n_ff
        self.n_done = 0  # windows
        self._saved_s = time.monotonic()

    @staticmethod
    def token_bytes(n_embd: int, n_ff: Sequence[int]) -> int:
        """Bytes of one token in the shards of layers with n_ff neurons each."""
        return sum(2 * n_embd + (n + 7) // 8 for n in n_ff)

    @property
    def state_path(self) -> Path:
        """The file that says what the shards hold."""
        return self.folder / "capture.json"

    def x_path(self, i_layer: int) -> Path:
        """The file of a layer's inputs."""
        return self.folder / f"layer-{i_layer:03d}.x.npy"

    def active_path(self, i_layer: int) -> Path:
        """The file of a layer's active sets."""
        return self.folder / f"layer-{i_layer:03d}.active.npy"

    def create(self) -> None:
        """Makes empty shards."""
        self.folder.mkdir(exist_ok=True)
        for i_layer in self.n_ff:
            np.lib.format.open_memmap(
                self.x_path(i_layer), mode="w+", dtype=np.float16, shape=(self.sample.n_tokens, self.n_embd)
            )
        self.save()

    def load(self) -> None:
        """Reads what a stopped run left.

        Raises:
            FormatError: it is damaged or of another version.
            PlanError: it comes from another model, plan, text or options.
        """
        advice = "run without --resume to start again."
        try:
            meta = json.loads(self.state_path.read_text(encoding="utf-8"))
            found = {name: meta[name] for name in ("version", "identity", "n_done")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{self.state_path}: it can't be read ({error}); expected shards; {advice}") from None
        if found["version"] != SHARDS_VERSION:
            raise FormatError(f"{self.state_path}: version {found['version']}; expected {SHARDS_VERSION}; {advice}")
        for name, value in self.identity.items():
            if found["identity"].get(name) != value:
                raise PlanError(
                    f"{self.state_path}: it was made with {name} {found['identity'].get(name)}; "
                    f"this run has {value}; {advice}"
                )
        for i_layer in self.n_ff:
            self.x(i_layer)
        self.n_done = found["n_done"]

    def save(self) -> None:
        """Writes down how far the shards are filled."""
        meta = {"version": SHARDS_VERSION, "identity": self.identity, "n_done": self.n_done}
        with atomic_path(self.state_path) as temporary:
            temporary.write_text(json.dumps(meta, indent=2), encoding="utf-8")
        self._saved_s = time.monotonic()

    def x(self, i_layer: int, mode: str = "r") -> np.ndarray:
        """Inputs of a layer: (n_tokens, n_embd) float16, mapped."""
        return self._open(self.x_path(i_layer), np.dtype(np.float16), self.n_embd, mode)

    def packed(self, i_layer: int) -> np.ndarray:
        """Active sets of a layer: (n_tokens, ceil(n_ff / 8)) uint8, mapped."""
        return self._open(self.active_path(i_layer), np.dtype(np.uint8), (self.n_ff[i_layer] + 7) // 8, "r")

    def active(self, i_layer: int, rows: slice | np.ndarray) -> np.ndarray:
        """Active sets of some tokens: (n, n_ff) bool."""
        bits = np.unpackbits(self.packed(i_layer)[rows], axis=1, count=self.n_ff[i_layer], bitorder="little")
        return bits.view(bool)

    def _open(self, path: Path, dtype: np.dtype, width: int, mode: str) -> np.ndarray:
        shape = (self.sample.n_tokens, width)
        try:
            array = np.load(path, mmap_mode=mode)
        except (OSError, ValueError) as error:
            raise FormatError(f"{path}: it can't be read ({error}); expected a shard; run without --resume.") from None
        if array.dtype != dtype or array.shape != shape:
            raise FormatError(
                f"{path}: {array.dtype} {array.shape}; expected {dtype} {shape}; run without --resume to start again."
            )
        return array


def capture_inputs(runner: Runner, windows: np.ndarray, shards: Shards, steps: Steps) -> None:
    """Runs the windows that the shards lack, and keeps the sampled tokens' inputs.

    Args:
        runner: the model, in the mode whose inputs are wanted.
        windows: (n_windows, n_ctx) int32, all of them.
        shards: created or loaded.
        steps: progress.

    Raises:
        PlanError: an input that float16 can't hold.
    """
    sample = shards.sample
    mapped = {i_layer: shards.x(i_layer, "r+") for i_layer in shards.n_ff}
    seen: dict[int, int] = {}
    kept = np.empty(0, np.int64)
    first = 0

    def keep(i_layer: int, x: np.ndarray) -> None:
        if i_layer not in mapped:
            return
        before = seen.get(i_layer, 0)
        seen[i_layer] = before + len(x)
        low, high = np.searchsorted(kept, [before, before + len(x)])
        chosen = x[kept[low:high] - before]
        if chosen.size and not np.abs(chosen).max() <= np.finfo(np.float16).max:
            raise PlanError(f"layer {i_layer}: an FFN input isn't finite in float16; expected a model that works.")
        mapped[i_layer][first + low : first + high] = chosen

    runner.plan.set_capture(keep)
    try:
        with steps("running text", len(sample.order)) as step:
            for _ in range(shards.n_done):
                step()
            for at in range(shards.n_done, len(sample.order)):
                number = int(sample.order[at])
                seen.clear()
                kept = sample.tokens(number, windows.shape[1])
                first = at * sample.n_kept
                runner.run(windows[number])
                runner.plan.reset_stats()  # any call of the plan: raises what `keep` raised
                shards.n_done = at + 1
                if time.monotonic() - shards._saved_s > _SAVE_EVERY_S:
                    shards.save()
                step()
    finally:
        shards.save()
        runner.plan.set_capture(None)


def write_active(shards: Shards, base: BaseModel, plan: Plan, steps: Steps) -> None:
    """Computes the active sets of the layers that lack them.

    Args:
        shards: with all inputs.
        base: the model.
        plan: its plan.
        steps: progress.
    """
    with steps("active sets", len(shards.n_ff)) as step:
        for i_layer in shards.n_ff:
            path = shards.active_path(i_layer)
            if not path.exists():
                _, active = ActiveSets(base, plan, i_layer).of(shards.x(i_layer))
                with atomic_path(path) as temporary, temporary.open("wb") as file:
                    np.save(file, np.packbits(active, axis=1, bitorder="little"))
            step()
