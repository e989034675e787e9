"""The training of `powerinfer reluify`: stages over time, one group of layers after the other, checks, checkpoints.

A run that fits into memory has one group, which is trained locally, then end to end. A larger model's groups are trained locally, one
after the other, over windows whose hidden states before the group are kept on disk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType

from powerinfer_py.errors import OptionError
from powerinfer_py.format import BaseModel, atomic_path

from .distill import Distiller, StepResult, forward_layers, perplexity
from .reluify_state import RunFolder, RunState
from .sparse_ffn import SparseFfn, read_ffn
from .torch_graph import Graph

# Of a group's time: blocks read the teacher's states up to the first, only the sparse model's from the second on.
LOCAL, BLENDED = 0.06, 0.12
LOCAL_GROUPED, BLENDED_GROUPED = 0.3, 0.7
# Of the training: between these the wished density falls from the one found first to its aim.
_RAMP = (0.02, 0.5)
_LEAST_DENSITY = 1e-3  # to steer to, where a layer begins with nothing active
_N_WARMUP_STEPS = 20
_WARMUP = 0.03  # of the end-to-end stage
_CHECKS = 40  # of the held-out text, over the run, at most
_LEAST_PAUSE = 10.0  # between two checks, in times of a check: a short run by the clock trains instead
_SAVE_SECONDS = 300.0


@dataclass(frozen=True)
class RunOptions:
    """What the training needs to know of the command line.

    Attributes:
        activation: of the sparse model.
        density: aim for each layer, 0 to 1; None: layers aren't steered.
        row_types: `gate`, `up`, `down` -> type that passes see rows rounded to; empty: none; None: those that `start` has.
        groups: layers of each group, ascending.
        batch: windows per step.
        seconds: of the training, over all stops; None: n_steps decide.
        n_steps: of each group.
        lr, end_to_end_lr: peaks of the learning rate.
        seed: of the windows' order.
        down_t_type: where row_types is None, the type of neuron-major down rows in a plan; None: `down` is rounded as a stock file's is.
        start: model whose FFNs the students begin with; None: the teacher.
        end_to_end_only: no local stages where all layers are one group.
    """

    activation: str
    density: float | None
    row_types: dict[str, GGMLQuantizationType] | None
    groups: list[range]
    batch: int
    seconds: float | None
    n_steps: int | None
    lr: float
    end_to_end_lr: float
    seed: int
    down_t_type: GGMLQuantizationType | None = None
    start: BaseModel | None = None
    end_to_end_only: bool = False


class Run:
    """A training that can be stopped after any step, and taken up again.

    Attributes:
        state: how far it is.
        window_seconds: that a held-out window takes through the teacher.
        distiller: the group that is being trained.
    """

    def __init__(
        self,
        graph: Graph,
        windows: np.ndarray,
        held_out: np.ndarray,
        options: RunOptions,
        folder: RunFolder,
        *,
        resume: bool,
        began: float,
    ) -> None:
        """Reads the first group, or takes up the state of a stopped run.

        Args:
            graph: the teacher.
            windows: (n, ctx) int32 to train on.
            held_out: (n, ctx) int32 to measure on.
            options: what to do.
            folder: opened.
            resume: it holds the state of a stopped run.
            began: time.monotonic() when this start of the run began.
        """
        self.graph = graph
        self.windows = windows
        self.held_out = torch.from_numpy(held_out.astype(np.int64))
        self.folder = folder
        self.state = (
            folder.load_state() if resume else RunState([[group.start, group.stop] for group in options.groups])
        )
        self.options = replace(options, groups=[range(*ends) for ends in self.state.groups])
        self.distiller: Distiller | None = None
        self._saved = time.monotonic()
        self._began = began - self.state.seconds
        self._checked = self._check_seconds = 0.0
        self.window_seconds = 0.0
        if not self.finished:
            self._read_group()
            if resume:
                folder.load_weights(self.distiller)

    # ---- How far ----

    @property
    def whole(self) -> bool:
        """Whether all layers are one group, which end-to-end training needs."""
        return len(self.options.groups) == 1

    @property
    def finished(self) -> bool:
        """Whether all groups are trained."""
        return self.state.i_group == len(self.options.groups)

    def group_progress(self) -> float:
        """Of the present group, 0 to 1."""
        options, state = self.options, self.state
        if options.n_steps is not None:
            return min(1.0, state.step / options.n_steps)
        n_left = sum(len(group) for group in options.groups[state.i_group :])
        share = len(options.groups[state.i_group]) / n_left
        seconds = max(1.0, (options.seconds - state.group_began) * share)
        return min(1.0, (state.seconds - state.group_began) / seconds)

    def progress(self) -> float:
        """Of the training, 0 to 1."""
        if self.finished:
            return 1.0
        if self.options.n_steps is None:
            return min(1.0, self.state.seconds / self.options.seconds)
        return (self.state.i_group + self.group_progress()) / len(self.options.groups)

    def stage(self) -> tuple[str, float, float]:
        """Name of the stage, blend of local training, share of the peak learning rate."""
        p = self.group_progress()
        warmup = min(1.0, (self.state.step + 1) / _N_WARMUP_STEPS)
        local, blended = (LOCAL, BLENDED) if self.whole else (LOCAL_GROUPED, BLENDED_GROUPED)
        if self.whole and self.options.end_to_end_only:
            local = blended = 0.0
        if self.whole and p >= blended:
            q = (p - blended) / (1.0 - blended)
            return "end to end", 1.0, min(1.0, q / _WARMUP) * (1.0 - q)
        blend = min(1.0, max(0.0, (p - local) / (blended - local)))
        return ("blended" if blend else "local"), blend, warmup * (1.0 - 0.5 * p / blended if self.whole else 1.0 - p)

    def wished_densities(self) -> list[float]:
        """What each layer of the group is steered to now: falls geometrically from where it began, then stays.

        All layers fall by the same factor, so that the mean of the group's becomes the aim: layers differ in how many neurons they need.

        Returns:
            One per layer of the group, or nothing.
        """
        if self.options.density is None:
            return []
        share = min(1.0, max(0.0, (self.group_progress() - _RAMP[0]) / (_RAMP[1] - _RAMP[0])))
        starts = self.state.start_density
        factor = min(1.0, self.options.density * len(starts) / sum(starts))
        return [start * factor**share for start in starts]

    def seconds(self) -> float:
        """Of the whole run so far."""
        return time.monotonic() - self._began

    # ---- Steps ----

    def measure_teacher(self) -> None:
        """The teacher's perplexity, and how long it takes."""
        if self.graph.compiled:  # what compiling takes isn't the windows' time
            perplexity(self.graph, {}, self.held_out[: self.options.batch], self.options.batch)
        began = time.monotonic()
        self.state.teacher_perplexity = perplexity(self.graph, {}, self.held_out, self.options.batch)
        self.window_seconds = (time.monotonic() - began) / len(self.held_out)

    def train(self, report: Callable[[dict[str, Any] | None], None], stopped: Callable[[], bool]) -> bool:
        """Trains until all is done, or it is stopped; what was reached is saved.

        Args:
            report: called after each step, with an entry of the log where one was made.
            stopped: says whether to stop.

        Returns:
            Whether it is done.
        """
        while not self.finished:
            checked = self.progress()
            while self.group_progress() < 1.0:
                if stopped():
                    self.save()
                    return False
                if time.monotonic() - self._saved > _SAVE_SECONDS:
                    self.save()
                stage, result = self._step()
                self._tick()
                entry = None
                p = self.progress()
                due = int(p * _CHECKS) > int(checked * _CHECKS) and self._has_paused()
                if self.state.step == 1 or due or self.group_progress() == 1.0:
                    entry = self._check(stage, result)
                    checked = p
                report(entry)
            self._finish_group()
        return True

    def _tick(self) -> None:
        self.state.seconds = self.seconds()

    def save(self) -> None:
        """Writes the state; later stops take it up."""
        self._tick()
        self.folder.save(self.state, self.distiller)
        self._saved = time.monotonic()

    def _step(self) -> tuple[str, StepResult]:
        """One step: its stage, and what it found."""
        state, options = self.state, self.options
        stage, blend, share = self.stage()
        picked = self._picked(state.step)
        tokens = torch.from_numpy(self.windows[picked].astype(np.int64)).to(self.graph.device)
        if not state.start_density:
            found = self.distiller.densities(self._inputs(tokens, picked)[1])
            state.start_density = [max(density, _LEAST_DENSITY) for density in found]
        wished = self.wished_densities()
        if stage == "end to end":
            result = self.distiller.end_to_end_step(tokens, wished, share * options.end_to_end_lr)
        else:
            result = self.distiller.local_step(*self._inputs(tokens, picked), blend, wished, share * options.lr)
        if not math.isfinite(result.loss):
            raise OptionError(
                f"lr: the loss of step {state.step + 1} ({stage}) is {result.loss}; expected a number; "
                "pass a smaller --lr or --end-to-end-lr."
            )
        state.step += 1
        state.n_tokens += tokens.numel()
        return stage, result

    def _inputs(self, tokens: torch.Tensor, picked: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states before the group, of the teacher and of the sparse model."""
        if self.state.i_group == 0:
            h = self.graph.embed(tokens)
            return h, h
        teacher, student = (
            torch.from_numpy(self.folder.hidden(whose, self.state.i_group)[picked]).to(self.graph.device)
            for whose in ("teacher", "student")
        )
        return teacher, student

    def _picked(self, step: int) -> np.ndarray:
        """Windows of a step, ascending; each epoch shuffles them anew."""
        epochs, places = np.divmod(np.arange(self.options.batch) + step * self.options.batch, len(self.windows))
        picked = []
        for epoch in np.unique(epochs):
            order = np.random.default_rng((self.options.seed, int(epoch))).permutation(len(self.windows))
            picked.append(order[places[epochs == epoch]])
        return np.sort(np.concatenate(picked))

    def _has_paused(self) -> bool:
        """Whether a check is worth its time by now; always where steps are counted."""
        paused = time.monotonic() - self._checked
        return self.options.n_steps is not None or paused >= _LEAST_PAUSE * self._check_seconds

    def _check(self, stage: str, result: StepResult) -> dict[str, Any]:
        """Measures the held-out text with the sparse blocks that there are, after a step."""
        began = time.monotonic()
        students = self._students(range(self.options.groups[self.state.i_group].stop))
        found = perplexity(self.graph, students, self.held_out, self.options.batch)
        self._tick()
        entry = {
            "seconds": round(self.state.seconds, 1),
            "tokens": self.state.n_tokens,
            "group": self.state.i_group,
            "step": self.state.step,
            "stage": stage,
            "loss": result.loss,
            "errors": [round(error, 5) for error in result.errors],
            "density": [round(density, 4) for density in result.densities],
            "wished_density": [round(wished, 4) for wished in self.wished_densities()],
            "pressure": [round(weight, 5) for weight in self.distiller.weights.values()],
            "perplexity": found,
        }
        self.state.log.append(entry)
        self._checked = time.monotonic()
        self._check_seconds = self._checked - began
        return entry

    # ---- Groups ----

    def _students(self, layers: range) -> dict[int, SparseFfn]:
        """Blocks of these layers: those in training, others from their files."""
        found = {}
        for i in layers:
            student = self.distiller.students.get(i) if self.distiller else None
            found[i] = student or self._read(i, self.folder.read_layer(i))
        return found

    def _read(self, i_layer: int, weights: dict[str, torch.Tensor] | None = None) -> SparseFfn:
        options, graph = self.options, self.graph
        base, row_types, stock_down = options.start or graph.base, options.row_types, False
        if row_types is None:
            stock_down = options.down_t_type is None
            types = {name: tensor.type for name, tensor in base.ffn(i_layer).items()}
            if not stock_down:
                types["down"] = options.down_t_type
            row_types = {name: kind for name, kind in types.items() if kind != GGMLQuantizationType.F32}
        if weights is None:
            return read_ffn(graph, base, i_layer, options.activation, row_types, stock_down=stock_down)
        moved = {name: weight.to(graph.device) for name, weight in weights.items()}
        return SparseFfn(options.activation, moved, row_types, graph, stock_down=stock_down)

    def _read_group(self) -> None:
        group = self.options.groups[self.state.i_group]
        self.distiller = Distiller(self.graph, {i: self._read(i) for i in group})

    def _finish_group(self) -> None:
        """Keeps the group's layers, and what the next one starts from."""
        state, options = self.state, self.options
        for i, student in self.distiller.students.items():
            self.folder.write_layer(i, student.weights)
        last = state.i_group + 1 == len(options.groups)
        if not last:
            self._write_hidden()
        state.i_group += 1
        state.step = 0
        state.start_density = []
        self._tick()
        state.group_began = state.seconds
        self.distiller = None
        self.folder.save(state, None)
        for whose in ("teacher", "student"):
            self.folder.hidden_path(whose, state.i_group - 1).unlink(missing_ok=True)
        if not last:
            self._read_group()

    def _write_hidden(self) -> None:
        """Hidden states of all windows after the group, of the teacher and of the sparse model."""
        i_group, options, graph = self.state.i_group, self.options, self.graph
        group = options.groups[i_group]
        for whose in ("teacher", "student"):
            students = self.distiller.students if whose == "student" else {}
            before = self.folder.hidden(whose, i_group) if i_group else None
            for student in students.values():
                student.begin(train=False)
            with atomic_path(self.folder.hidden_path(whose, i_group + 1)) as path, path.open("wb") as file:
                shape = (*self.windows.shape, graph.n_embd)
                # not through a mapping: where a disk is full, that ends the process
                np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
                for first in range(0, len(self.windows), options.batch):
                    rows = slice(first, first + options.batch)
                    if before is None:
                        h = graph.embed(torch.from_numpy(self.windows[rows].astype(np.int64)).to(graph.device))
                    else:
                        h = torch.from_numpy(np.array(before[rows])).to(graph.device)
                    file.write(forward_layers(graph, students, group, h).cpu().numpy())
            for student in students.values():
                student.end()


def hidden_bytes(n_windows: int, n_ctx: int, n_embd: int) -> int:
    """Bytes on disk of a grouped run's hidden states: the teacher's and the sparse model's, before and after a group."""
    return 4 * n_windows * n_ctx * n_embd * 4


def layer_groups(n_layer: int, n_per_group: int) -> list[range]:
    """Layers in groups as even as possible.

    Args:
        n_layer: of the model.
        n_per_group: at most.
    """
    n_groups = -(-n_layer // max(1, n_per_group))
    edges = [n_layer * k // n_groups for k in range(n_groups + 1)]
    return [range(a, b) for a, b in zip(edges, edges[1:])]


def run_folder(out: Path, verb: str) -> Path:
    """Where the files of a verb's run are kept: beside the output."""
    return out.with_name(f"{out.name.removesuffix('.gguf')}.{verb}")
