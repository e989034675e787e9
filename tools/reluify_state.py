"""What a reluify run keeps on disk: its state, the weights that are being trained, finished layers, hidden states of large models.

Every file is whole or not there; a state says which run it belongs to.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from powerinfer_py.errors import OptionError
from powerinfer_py.format import atomic_path

from .distill import Distiller

# What a run keeps in its folder, and what one that was killed left half written.
_OWN_FILE = re.compile(r"checkpoint\.pt|pruned(\.powerinfer)?\.gguf|layer-\d+\.pt|(teacher|student)-\d+\.npy")
_HALF_WRITTEN = re.compile(rf"\.({_OWN_FILE.pattern})\.\d+\.tmp|output-\w+")


@dataclass
class RunState:
    """How far a run is.

    Attributes:
        groups: first layer of each group, and the one after its last: those that the run began with, whatever memory is free later.
        i_group: group of layers that is being trained.
        step: optimizer steps done in it.
        seconds: of the whole run so far.
        group_began: seconds when the group's training began.
        n_tokens: that steps have seen.
        start_density: of each layer of the group before its first step.
        teacher_perplexity: on the held-out windows; 0: not measured yet.
        log: one entry per report.
    """

    groups: list[list[int]]
    i_group: int = 0
    step: int = 0
    seconds: float = 0.0
    group_began: float = 0.0
    n_tokens: int = 0
    start_density: list[float] = field(default_factory=list)
    teacher_perplexity: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)


class RunFolder:
    """Files of a run, in a folder of its own beside the output."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        """Names it; see open().

        Args:
            path: the folder.
            identity: what a state must agree with to be of use.
        """
        self.path = path
        self.identity = identity
        self.checkpoint = path / "checkpoint.pt"

    def open(self, *, resume: bool) -> bool:
        """Makes the folder, or takes up a stopped run.

        Args:
            resume: a state is used, if there is one; otherwise it is replaced.

        Returns:
            Whether there is one that is used.

        Raises:
            OptionError: the folder holds something else, or the state is another run's.
        """
        exists = self.checkpoint.is_file()
        if not all(_is_own(path) for path in self._files()):
            raise OptionError(
                f"out: {self.path} holds other files; expected none there; move them, or pass another -o."
            )
        if exists and resume:
            stored = torch.load(self.checkpoint, weights_only=True, mmap=True)["identity"]
            for name, value in self.identity.items():
                if stored.get(name) != value:
                    raise OptionError(
                        f"resume: {self.checkpoint} was made with {name} {stored.get(name)}; this run has {value}; "
                        "give the same options, or leave --resume out."
                    )
            for path in self._files():
                if _HALF_WRITTEN.fullmatch(path.name):
                    _delete(path)
        else:
            self.remove()
        self.path.mkdir(parents=True, exist_ok=True)
        return exists and resume

    def _files(self) -> list[Path]:
        return list(self.path.iterdir()) if self.path.exists() else []

    def save(self, state: RunState, distiller: Distiller | None) -> None:
        """Writes the state, and the weights that are being trained."""
        values: dict[str, Any] = {"identity": self.identity, "state": asdict(state)}
        if distiller is not None:
            values |= {
                "pressure": distiller.weights,
                "ffn": {i: student.weights for i, student in distiller.students.items()},
                "optimizer": distiller.optimizer.state_dict(),
            }
        _save(values, self.checkpoint)

    def load_state(self) -> RunState:
        """The state of a stopped run."""
        return RunState(**torch.load(self.checkpoint, weights_only=True, mmap=True)["state"])

    def load_weights(self, distiller: Distiller) -> None:
        """Takes up the weights of a stopped run, if it kept those of this group."""
        stored = torch.load(self.checkpoint, weights_only=True)
        if "ffn" not in stored:
            return
        for i, weights in stored["ffn"].items():
            for name, weight in weights.items():
                distiller.students[i].weights[name].copy_(weight)
        distiller.weights.update(stored["pressure"])
        distiller.optimizer.load_state_dict(stored["optimizer"])

    def write_layer(self, i_layer: int, weights: dict[str, torch.Tensor]) -> None:
        """Keeps a finished layer."""
        _save({name: weight.cpu() for name, weight in weights.items()}, self.path / f"layer-{i_layer}.pt")

    def read_layer(self, i_layer: int) -> dict[str, torch.Tensor]:
        """A finished layer's weights, mapped."""
        return torch.load(self.path / f"layer-{i_layer}.pt", weights_only=True, mmap=True)

    def hidden_path(self, whose: str, i_group: int) -> Path:
        """Where hidden states before a group are kept."""
        return self.path / f"{whose}-{i_group}.npy"

    def hidden(self, whose: str, i_group: int) -> np.ndarray:
        """Hidden states before a group, mapped: (n_windows, ctx, n_embd) float32."""
        return np.load(self.hidden_path(whose, i_group), mmap_mode="r")

    def remove(self) -> None:
        """Deletes all of it; files that no run wrote stay."""
        for path in filter(_is_own, self._files()):
            _delete(path)
        if self.path.exists() and not self._files():
            self.path.rmdir()


def _save(values: dict[str, Any], path: Path) -> None:
    with atomic_path(path) as temporary:
        try:
            torch.save(values, temporary)
        except RuntimeError:  # torch's word for a full disk
            raise OSError(
                f"{path}: it could not be written; expected room for it on the disk; make room, then --resume."
            ) from None


def _is_own(path: Path) -> bool:
    return bool(_OWN_FILE.fullmatch(path.name) or _HALF_WRITTEN.fullmatch(path.name))


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
