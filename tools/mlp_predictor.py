"""Predictors with a ReLU between their matrices, trained in torch from the closed linear fit; on CPU or GPU.

Only numpy is needed to import this; torch is imported when something is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from powerinfer_py.errors import OptionError

from .arguments import need_packages
from .predictor import LinearFit, LinearPredictor, MlpPredictor

_BATCH = 512  # at most, and an epoch has 32 of them at least
_LEARNING_RATE = 4e-3
_START_SPREAD = 3.0  # standard deviation of the scores that training starts with, as logits
_PATIENCE = 3  # epochs without a better one, in the second half of them
# Active neurons weigh as much more as makes the wished recall's threshold the even odds, within these limits.
_POSITIVE_WEIGHT = (1.0, 20.0)
# A value below this share of tokens falls into the ReLU's zero part where a start is to be linear.
_CLIPPED_SHARE = 0.01


@dataclass(frozen=True)
class MlpOptions:
    """Options of one training."""

    recall: float
    epochs: int = 8
    max_seconds: float = 300.0
    device: str = "cpu"
    seed: int = 0


def check_torch() -> None:
    """Says whether predictors of kind mlp can be trained here.

    Raises:
        OptionError: torch isn't installed.
    """
    need_packages("kind mlp", "train", "torch", otherwise=" or pass --kind linear")


def find_device(device: str) -> str:
    """The device to train on.

    Args:
        device: auto, cpu or cuda.

    Returns:
        cpu or cuda.

    Raises:
        OptionError: cuda was asked for and torch has none.
    """
    if device == "cpu":
        return device
    try:
        import torch

        has_cuda = torch.cuda.is_available()
    except ImportError:
        has_cuda = False
    if device == "cuda" and not has_cuda:
        raise OptionError("device: cuda; torch finds no GPU here; expected one; pass --device cpu.")
    return "cuda" if has_cuda else "cpu"


def start_of(fit: LinearFit, rank: int, x: np.ndarray, constant: np.ndarray) -> list[MlpPredictor]:
    """Predictors with a ReLU whose scores are those of a linear one, or nearly.

    Shifted: relu(f x + k c x) - k relu(c x) = f x where c x, about 1 for every token, times k keeps the sum positive. It
    costs one rank for all. Paired: relu(f x) - relu(-f x) = f x always, at half the rank.

    Args:
        fit: of the layer, of `rank` at least.
        rank: of the predictors, 2 at least.
        x: (n_samples, n_embd) float32.
        constant: c, (n_embd,) float32.

    Returns:
        The shifted one and the paired one; unit 0 is the constant's, or the strongest.
    """
    inner = rank - 1
    fc1, fc2 = fit.fc1[:inner], fit.scaled(inner).fc2
    shift = np.maximum(0.0, -np.quantile(x @ fc1.T, _CLIPPED_SHARE, axis=0)).astype(np.float32)
    shifted = MlpPredictor(
        np.concatenate([constant[None], fc1 + shift[:, None] * constant]),
        np.concatenate([-(fc2 @ shift)[:, None], fc2], axis=1),
    )
    half = rank // 2
    fc1, fc2 = fit.fc1[:half], fit.scaled(half).fc2
    nothing = rank - 2 * half
    paired = MlpPredictor(
        np.pad(np.concatenate([fc1, -fc1]), ((0, nothing), (0, 0))),
        np.pad(np.concatenate([fc2, -fc2], axis=1), ((0, 0), (0, nothing))),
    )
    return [shifted, paired]


def balanced(predictor: LinearPredictor, x: np.ndarray) -> LinearPredictor:
    """The same scores, with hidden units of equal size, so that one learning rate suits all.

    Args:
        predictor: any.
        x: (n_samples, n_embd) float32.

    Returns:
        A predictor of the same kind.
    """
    size = np.sqrt(np.square(predictor.hidden(x)).mean(axis=0)) + 1e-6
    return type(predictor)(predictor.fc1 / size[:, None], predictor.fc2 * size)


def train_mlp(
    start: MlpPredictor,
    x: np.ndarray,
    packed: np.ndarray,
    threshold: float,
    positive_weight: float,
    candidates: Callable[[LinearPredictor], float],
    options: MlpOptions,
) -> tuple[MlpPredictor, int]:
    """Trains with binary cross-entropy, and keeps the epoch that needs the fewest candidates on held-out tokens.

    Args:
        start: where to start.
        x: (n_tokens, n_embd) float16, inputs to fit to.
        packed: (n_tokens, ceil(n_ff / 8)) uint8, their active sets, lowest bit first.
        threshold: of the start's scores at the wished recall; the first even odds.
        positive_weight: what an active neuron weighs, see odds_at.
        candidates: predictor -> candidate density at the wished recall, on tokens that aren't in x.
        options: of the training.

    Returns:
        The best predictor, the start when nothing is better, and the number of epochs that were run.
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    device = options.device
    n_ff = len(start.fc2)
    inputs = torch.from_numpy(np.array(x)).to(device)
    bits = torch.from_numpy(np.array(packed)).to(device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    batch = max(1, min(_BATCH, len(x) // 32))
    few = x[: 4 * _BATCH].astype(np.float32)
    scale = np.float32(_START_SPREAD / max(float(start.scores(few).std()), 1e-30))
    start = balanced(MlpPredictor(start.fc1, start.fc2 * scale), few)
    fc1, fc2 = (torch.from_numpy(np.array(w, np.float32)).to(device).requires_grad_() for w in (start.fc1, start.fc2))
    bias = torch.tensor(-threshold * float(scale), device=device, requires_grad=True)
    weight = torch.tensor(float(np.clip(positive_weight, *_POSITIVE_WEIGHT)), device=device)
    optimizer = torch.optim.Adam([fc1, fc2, bias], lr=_LEARNING_RATE)
    generator = torch.Generator().manual_seed(options.seed)

    def loss_of(rows: Any, low: bool) -> Any:
        active = (bits[rows][:, :, None] >> shifts & 1).flatten(1)[:, :n_ff].float()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=low):
            scores = torch.relu(inputs[rows].float() @ fc1.T) @ fc2.T
        return torch.nn.functional.binary_cross_entropy_with_logits(scores.float() + bias, active, pos_weight=weight)

    low = _bf16_is_faster(lambda low: loss_of(torch.arange(batch), low).backward())
    best, best_candidates, n_worse = start, candidates(start), 0
    n_steps = options.epochs * -(-len(x) // batch)
    i_step, started = 0, time.monotonic()
    for epoch in range(1, options.epochs + 1):
        for rows in torch.randperm(len(x), generator=generator).split(batch):
            for group in optimizer.param_groups:
                group["lr"] = _LEARNING_RATE * (1.0 - i_step / n_steps)
            optimizer.zero_grad()
            loss_of(rows.to(device), low).backward()
            optimizer.step()
            i_step += 1
        found = MlpPredictor(*(w.detach().cpu().numpy().copy() for w in (fc1, fc2)))
        found_candidates = candidates(found)
        n_worse += epoch > options.epochs // 2
        if found_candidates < best_candidates:
            best, best_candidates, n_worse = found, found_candidates, 0
        if n_worse == _PATIENCE or time.monotonic() - started > options.max_seconds:
            return best, epoch
    return best, options.epochs


def _bf16_is_faster(step: Callable[[bool], object]) -> bool:
    """Whether products of bf16 numbers, with float32 weights and sums kept, take less time here."""

    def seconds(low: bool) -> float:
        step(low)
        started = time.perf_counter()
        for _ in range(3):
            step(low)
        return time.perf_counter() - started

    return seconds(True) < 0.9 * seconds(False)


def odds_at(scores: np.ndarray, active: np.ndarray, threshold: float) -> float:
    """How many inactive neurons there are per active one among scores near a threshold.

    A loss in which an active neuron weighs so much has its even odds there.

    Args:
        scores: (n_samples, n_ff) float32.
        active: (n_samples, n_ff) bool.
        threshold: the threshold.

    Returns:
        The ratio; 1 when nothing is near.
    """
    near = np.abs(scores - np.float32(threshold)) < 0.05 * scores.std()
    n_active = int(active[near].sum())
    return (int(near.sum()) - n_active) / n_active if n_active else 1.0
