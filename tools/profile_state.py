"""What a profile run has found so far, kept beside its output: a stopped run goes on as if it had never stopped."""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer_py.errors import FormatError, PlanError
from powerinfer_py.format import atomic_path

STATE_VERSION = 1
_SAVE_EVERY_S = 60.0


class ProfileState:
    """What a run has found so far; saved beside the output, so that a stopped run can go on.

    Attributes:
        prices: (n_layer, 2) KL divergence per dropped energy of the tests on |a| and on the impact; NaN: not measured.
        dense: (n_windows,) negative log-likelihood of the dense model per window; NaN: not measured.
        trials: (n, 4) limit, increase, its error and density of each set of thresholds that was measured.
        active: (n_layer, n_ff) tokens in which each neuron was active, in the base's order.
        counted: (n_counted,) negative log-likelihood of the counted windows.
    """

    _ARRAYS = ("prices", "dense", "trials", "active", "counted")
    _GROWING = ("trials", "counted")  # their first dimension is what has been done
    _BY_TARGET = ("trials", "active", "counted")

    def __init__(
        self, path: Path, identity: dict[str, Any], target: str, n_layer: int, n_ff: int, n_windows: int
    ) -> None:
        """An empty one.

        Args:
            path: the file.
            identity: what a saved state must agree with to be of use, by name.
            target: what thresholds are chosen for; with another one only `prices` and `dense` are of use.
            n_layer: layers of the model.
            n_ff: neurons of its widest layer.
            n_windows: windows of the text.
        """
        self.path = path
        self.identity = identity
        self.target = target
        self.prices = np.full((n_layer, 2), np.nan)
        self.dense = np.full(n_windows, np.nan)
        self.trials = np.empty((0, 4))
        self.active = np.zeros((n_layer, n_ff), np.uint64)
        self.counted = np.empty(0)
        self._saved_s = time.monotonic()

    def load(self) -> None:
        """Reads the file.

        Raises:
            FormatError: it is damaged or of another version.
            PlanError: it comes from another model, text or options.
        """
        advice = "run without --resume to start again."
        try:
            with np.load(self.path, allow_pickle=False) as file:
                meta = json.loads(str(file["meta"]))
                arrays = {name: file[name] for name in self._ARRAYS}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise FormatError(
                f"{self.path}: it can't be read ({error}); expected the state of a stopped run; {advice}"
            ) from None
        if not isinstance(meta, dict) or meta.get("version") != STATE_VERSION:
            raise FormatError(f"{self.path}: it isn't a state of version {STATE_VERSION}; {advice}")
        for name, value in self.identity.items():
            if meta.get(name) != value:
                raise PlanError(
                    f"{self.path}: it was made with {name} {meta.get(name)}; this run has {value}; {advice}"
                )
        for name, array in arrays.items():
            own = getattr(self, name)
            shapes = [a.shape[1:] if name in self._GROWING else a.shape for a in (array, own)]
            if array.dtype != own.dtype or shapes[0] != shapes[1]:
                raise FormatError(
                    f"{self.path}: {name} is {array.dtype} {array.shape}; expected {own.dtype} {own.shape}; {advice}"
                )
            if meta.get("target") == self.target or name not in self._BY_TARGET:
                setattr(self, name, array)

    def save(self) -> None:
        """Writes the file."""
        meta = json.dumps({"version": STATE_VERSION, "target": self.target, **self.identity})
        with atomic_path(self.path) as temporary, temporary.open("wb") as file:
            np.savez(file, meta=meta, **{name: getattr(self, name) for name in self._ARRAYS})
        self._saved_s = time.monotonic()

    def save_sometimes(self) -> None:
        """Writes the file when the last time is long ago."""
        if time.monotonic() - self._saved_s > _SAVE_EVERY_S:
            self.save()
