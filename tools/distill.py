"""Distillation of a model's feed-forward blocks into sparse ones: layer by layer, then the whole model at once.

Local: a block learns the teacher's output from the teacher's input, then from the sparse model's own, where the target is what brings
the layer's output back to the teacher's. End to end: the logits' KL divergence and the hidden states. Only FFNs learn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .sparse_ffn import SparseFfn, steered_weight
from .torch_graph import Graph, compiled

# Rows of logits at a time: the vocabulary is wide.
_HEAD_ROWS = 512
# Of a layer's loss: part of the mean power that is added to each token's, so that quiet tokens don't rule.
_POWER_FLOOR = 1.0
# Per step: how fast the weight of a layer's pressure follows its distance from the wished density.
_CONTROL_RATE = 0.05
# Scale of a layer's pressure against the logits' divergence.
_END_TO_END_SCALE = 0.3
_HIDDEN_WEIGHT = 1.0
# Nats; perplexity of more is no float.
MAX_LOSS = 700.0


@dataclass
class StepResult:
    """What one step found, per layer in the order of the layers.

    Attributes:
        loss: of the step without pressure.
        errors: relative square errors: of the FFN's output, or of the hidden state (end to end).
        densities: share of active neurons.
    """

    loss: float
    errors: list[float]
    densities: list[float]


def relative_error(found: torch.Tensor, wished: torch.Tensor) -> torch.Tensor:
    """Square error per token against the token's power, mean of tokens: outliers with huge outputs count as one token each.

    Args:
        found: (n_seq, n_tok, n).
        wished: of the same shape; the error is relative to its power.
    """
    error = torch.linalg.vector_norm(found - wished, dim=-1, dtype=torch.float32).square()
    power = torch.linalg.vector_norm(wished, dim=-1, dtype=torch.float32).square()
    typical = power.clamp_min(1e-12).log().mean().exp()
    return (error / (power + _POWER_FLOOR * typical)).mean()


def _compare_logits(student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of KL(teacher || student) over rows of logits (n_rows, n_vocab), and its gradient by the student's, in their type."""
    wished, found = F.log_softmax(teacher.float(), dim=-1), F.log_softmax(student.float(), dim=-1)
    p = wished.exp()
    return ((wished - found) * p).sum(), (found.exp() - p).to(student.dtype)


class HeadDivergence(torch.autograd.Function):
    """KL(teacher || student) of the next token, mean of tokens, a few rows of logits at a time."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        student: torch.Tensor,
        teacher: torch.Tensor,
        head: torch.Tensor,
        is_compiled: bool,
    ) -> torch.Tensor:
        """student, teacher: (n_rows, n_embd), what the head reads; head: (n_vocab, n_embd). Returns a float32 scalar."""
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        gradient = torch.empty_like(student)
        compare = compiled(_compare_logits, is_compiled)
        for first in range(0, len(student), _HEAD_ROWS):
            rows = slice(first, first + _HEAD_ROWS)
            divergence, difference = compare(student[rows] @ head.T, teacher[rows] @ head.T)
            total += divergence
            gradient[rows] = (difference @ head) / len(student)
        ctx.save_for_backward(gradient)
        return total / len(student)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Of student only."""
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None


class Distiller:
    """Steps over a group of layers.

    Attributes:
        graph: the teacher, and the attention of both.
        students: layer -> its sparse FFN; consecutive layers.
        weights: layer -> weight of its pressure.
        optimizer: of the students.
    """

    def __init__(self, graph: Graph, students: dict[int, SparseFfn]) -> None:
        self.graph = graph
        self.students = students
        self._error = compiled(relative_error, graph.compiled)
        self.weights = dict.fromkeys(students, 0.0)
        parameters = [weight for student in students.values() for weight in student.weights.values()]
        self.optimizer = torch.optim.Adam(parameters, lr=0.0, betas=(0.9, 0.98), fused=True)

    def _begin(self) -> None:
        for student in self.students.values():
            student.begin(train=True)

    def _end(self, lr: float, max_norm: float | None) -> None:
        for student in self.students.values():
            student.end()
        parameters = self.optimizer.param_groups[0]["params"]
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    def _steer(self, densities: Sequence[float], wished: Sequence[float]) -> None:
        for i, density, aim in zip(self.students, densities, wished):
            self.weights[i] = steered_weight(self.weights[i], density, aim, _CONTROL_RATE)

    def densities(self, h: torch.Tensor) -> list[float]:
        """Share of active neurons in each block as it is now.

        Args:
            h: (n_seq, n_tok, n_embd) float32, hidden states before the first layer.
        """
        found = []
        with torch.no_grad():
            for i, ffn in self.students.items():
                ffn.begin(train=False)
                after, x = self.graph.attend(i, h)
                found.append(float(ffn(x).density))
                h = self.graph.add_ffn(after, self.graph.ffn(i, x))
                ffn.end()
        return found

    def local_step(
        self, teacher: torch.Tensor, student: torch.Tensor | None, blend: float, wished: Sequence[float], lr: float
    ) -> StepResult:
        """One step in which every block learns by itself.

        Args:
            teacher: (n_seq, n_tok, n_embd) float32, the teacher's hidden states before the first layer.
            student: the sparse model's; None: the same.
            blend: 0: blocks read the teacher's hidden states; 1: the sparse model's.
            wished: density to steer each layer to.
            lr: learning rate.
        """
        graph, errors, densities = self.graph, [], []
        self._begin()
        student = teacher if student is None else student
        for i, ffn in self.students.items():
            with torch.no_grad():
                after, x = graph.attend(i, teacher)
                y = graph.ffn(i, x)
                before, teacher = teacher, graph.add_ffn(after, y)
                target = y.float()
                if blend > 0.0:
                    after, x = graph.attend(i, before + blend * (student - before))
                    target = (teacher - after) / graph.residual_scale
            out = ffn(x)
            error = self._error(out.y, target)
            (error + self.weights[i] * out.pressure).backward()
            with torch.no_grad():
                student = graph.add_ffn(after, out.y)
            errors.append(float(error.detach()))
            densities.append(float(out.density))
        self._end(lr, None)
        self._steer(densities, wished)
        return StepResult(sum(errors) / len(errors), errors, densities)

    def end_to_end_step(self, tokens: torch.Tensor, wished: Sequence[float], lr: float) -> StepResult:
        """One step in which the whole model learns the teacher's logits and hidden states.

        Args:
            tokens: (n_seq, n_tok) int64.
            wished: density to steer each layer to.
            lr: learning rate.
        """
        graph = self.graph
        self._begin()
        teacher_states = []
        with torch.no_grad():
            h = embedded = graph.embed(tokens)
            for i in range(graph.n_layer):
                after, x = graph.attend(i, h)
                h = graph.add_ffn(after, graph.ffn(i, x))
                teacher_states.append(h)
            teacher_last = graph.last_norm(h).flatten(0, -2)
        h, pressure = embedded, 0.0
        errors, densities = [], []
        for i in range(graph.n_layer):
            after, x = graph.attend(i, h)
            out = self.students[i](x)
            h = graph.add_ffn(after, out.y)
            errors.append(self._error(h, teacher_states[i]))
            pressure = pressure + _END_TO_END_SCALE * self.weights[i] * out.pressure
            densities.append(out.density)
        divergence = HeadDivergence.apply(graph.last_norm(h).flatten(0, -2), teacher_last, graph.head(), graph.compiled)
        hidden = torch.stack(errors).mean()
        (divergence + _HIDDEN_WEIGHT * hidden + pressure).backward()
        self._end(lr, 1.0)
        found = torch.stack(densities).tolist()
        self._steer(found, wished)
        return StepResult(float(divergence.detach()), torch.stack(errors).detach().tolist(), found)


def forward_layers(
    graph: Graph, students: Mapping[int, SparseFfn], layers: Iterable[int], h: torch.Tensor
) -> torch.Tensor:
    """Layers with their sparse FFN where there is one (after begin()), else with the model's own. No gradients.

    Args:
        graph: the model.
        students: layer -> sparse FFN.
        layers: to run, ascending.
        h: (n_seq, n_tok, n_embd) float32.
    """
    with torch.no_grad():
        for i in layers:
            after, x = graph.attend(i, h)
            h = graph.add_ffn(after, students[i](x).y if i in students else graph.ffn(i, x))
    return h


def negative_log_likelihood(graph: Graph, h: torch.Tensor, tokens: torch.Tensor) -> float:
    """Mean over all tokens but the first of each window, nats.

    Args:
        graph: the model.
        h: (n_seq, n_tok, n_embd) float32 after the last layer.
        tokens: (n_seq, n_tok) int64.
    """
    with torch.no_grad():
        rows = graph.last_norm(h)[:, :-1].flatten(0, 1)
        wished = tokens[:, 1:].flatten()
        head = graph.head()
        total = 0.0
        for first in range(0, len(rows), _HEAD_ROWS):
            logits = (rows[first : first + _HEAD_ROWS] @ head.T).float()
            total += float(F.cross_entropy(logits, wished[first : first + _HEAD_ROWS], reduction="sum"))
    return total / len(rows)


def perplexity(graph: Graph, students: Mapping[int, SparseFfn], windows: torch.Tensor, batch: int) -> float:
    """Perplexity of a model with the sparse FFNs that there are.

    Args:
        graph: the model.
        students: layer -> sparse FFN; empty: the teacher's own.
        windows: (n, n_tok) int64.
        batch: windows at a time.
    """
    batches = [windows[first : first + batch].to(graph.device) for first in range(0, len(windows), batch)]
    hidden = [graph.embed(tokens) for tokens in batches]
    for i in range(graph.n_layer):  # one layer after the other: of a large model's, one fits into memory
        if i in students:
            students[i].begin(train=False)
        hidden = [forward_layers(graph, students, [i], h) for h in hidden]
        if i in students:
            students[i].end()
    losses = [negative_log_likelihood(graph, h, tokens) * len(tokens) for h, tokens in zip(hidden, batches)]
    return math.exp(min(sum(losses) / len(windows), MAX_LOSS))
