"""The mathematics of distillation: sparse blocks against plain numpy in double, losses and gradients against autograd in double."""

from __future__ import annotations

import shutil
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from powerinfer_py.format import BaseModel
from powerinfer_py.tools import distill, sparse_ffn
from powerinfer_py.tools.distill import Distiller, HeadDivergence, forward_layers, perplexity, relative_error
from powerinfer_py.tools.sparse_ffn import SparseFfn, read_ffn, steered_weight
from powerinfer_py.tools.torch_graph import Graph

# Float32 against double, of values of order 1.
TOLERANCE = 1e-5
N_EMBD, N_FF = 32, 48


def block(activation: str, *, gated: bool = True, biases: bool = False, row_type: str = "", **how: object) -> SparseFfn:
    """A random block; all rows of one type."""
    rng = np.random.default_rng(1)
    names = ("gate", "up", "down") if gated else ("up", "down")
    weights = {name: rng.standard_normal((N_FF, N_EMBD)) / N_EMBD**0.5 for name in names}
    if biases:
        weights |= {f"{name}_bias": 0.3 * rng.standard_normal(N_EMBD if name == "down" else N_FF) for name in names}
    graph = types.SimpleNamespace(**{"dtype": torch.float32, "n_threads": 1, "compiled": False, **how})
    tensors = {name: torch.from_numpy(weight.astype(np.float32)) for name, weight in weights.items()}
    row_types = {name: GGMLQuantizationType[row_type] for name in names} if row_type else {}
    return SparseFfn(activation, tensors, row_types, graph)


def reference(activation: str, w: dict[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, float, float]:
    """(y, pressure, density) in double."""
    up = x @ w["up"].T + w.get("up_bias", 0.0)
    gate = x @ w["gate"].T + w.get("gate_bias", 0.0) if "gate" in w else None
    a = np.maximum(up if gate is None else gate, 0.0)
    if activation == "drelu" and gate is not None:
        a = product = a * np.maximum(up, 0.0)
    else:
        product = a * a if activation == "relu_sqr" else a
        product = product if gate is None else product * up
    return product @ w["down"] + w.get("down_bias", 0.0), a.mean() ** 2 / (a**2).mean(), (a > 0).mean()


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, N_EMBD, generator=torch.Generator().manual_seed(2))


# ---- Blocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("activation", ["relu", "relu_sqr", "drelu"])
def test_pass_equals_plain_double(activation: str, gated: bool, biases: bool) -> None:
    ffn, x = block(activation, gated=gated, biases=biases), inputs(2, 7)
    y, pressure, density = reference(
        activation, {n: w.double().numpy() for n, w in ffn.weights.items()}, x.double().numpy()
    )
    ffn.begin(train=False)
    out = ffn(x)
    ffn.end()
    assert np.abs(out.y.numpy() - y).max() < TOLERANCE
    assert out.pressure.item() == pytest.approx(pressure, rel=TOLERANCE)
    assert out.density.item() == pytest.approx(density) and 0.1 < density < 0.9


@pytest.mark.parametrize("row_type", ["Q4_0", "Q8_0", "F16"])
def test_pass_sees_rounded_rows_and_gradients_pass_straight_through(row_type: str) -> None:
    ffn, x = block("relu", biases=True, row_type=row_type), inputs(9)
    seen = {name: ffn.rounded(name).double().requires_grad_() for name in ffn.weights}
    assert all(torch.equal(seen[name].detach().float(), ffn.weights[name]) == ("bias" in name) for name in seen)
    y, pressure, _ = block_in_torch(seen, x.double())
    (y.square().sum() + 0.7 * pressure).backward()
    before = {name: weight.clone() for name, weight in ffn.weights.items()}
    ffn.begin(train=True)
    out = ffn(x)
    (out.y.square().sum() + 0.7 * out.pressure).backward()
    ffn.end()
    for name, weight in ffn.weights.items():
        assert torch.allclose(weight.grad.double(), seen[name].grad, rtol=1e-4, atol=1e-4), name
        assert torch.equal(weight, before[name]) and weight.grad.dtype == torch.float32
    ffn.begin(train=False)
    assert not ffn(x).y.requires_grad
    ffn.end()


def block_in_torch(w: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A gated ReLU block with biases, its pressure and its density."""
    a = (x @ w["gate"].T + w["gate_bias"]).relu()
    y = (a * (x @ w["up"].T + w["up_bias"])) @ w["down"] + w["down_bias"]
    return y, a.mean() ** 2 / (a * a).mean(), (a > 0).double().mean()


def test_a_neuron_that_never_fires_has_no_gradient_and_no_density() -> None:
    ffn = block("relu", gated=False, biases=True)
    ffn.weights["up_bias"][5] = -100.0
    ffn.begin(train=True)
    ffn(inputs(9)).y.sum().backward()
    ffn.end()
    assert not ffn.weights["up"].grad[5].any() and not ffn.weights["down"].grad[5].any()
    ffn.weights["up_bias"][:] = -100.0
    ffn.begin(train=False)
    out = ffn(inputs(9))
    assert (out.pressure.item(), out.density.item()) == (0.0, 0.0)
    assert torch.equal(out.y, ffn.weights["down_bias"].expand(9, N_EMBD))


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_a_models_own_block_starts_as_it_is(tiny_model: Callable[..., Path], arch: str) -> None:
    base = BaseModel(tiny_model(arch, n_layer=2, n_ff=96, row_type="Q8_0", bias=True))
    ffn = read_ffn(Graph(base), base, 1, "relu", {})
    expected = {"gate", "up", "down", "gate_bias", "up_bias", "down_bias"}
    assert set(ffn.weights) == {name for name in expected if arch == "llama" or "gate" not in name}
    for name in ("up", "down"):
        rows = base.rows_f32(f"blk.1.ffn_{name}.weight")
        assert np.array_equal(ffn.weights[name].numpy(), rows.T if name == "down" else rows)
        assert np.array_equal(ffn.weights[f"{name}_bias"].numpy(), base.array(f"blk.1.ffn_{name}.bias"))


# ---- Pressure ------------------------------------------------------------------------------------------------------


def test_weight_of_pressure_follows_the_density_within_its_limits() -> None:
    assert steered_weight(0.5, 0.2, 0.2, 0.03) == 0.5
    assert steered_weight(0.5, 0.22, 0.2, 0.03) == pytest.approx(0.5 * (1 + 0.03 * 0.1))
    assert steered_weight(0.5, 0.9, 0.2, 0.03) == pytest.approx(0.5 * 1.03)  # far off is no faster than twice the wish
    assert steered_weight(-0.05, 0.9, 0.2, 0.03) == pytest.approx(-0.05 + 0.03 * 0.05)
    least, most = sparse_ffn._WEIGHT_LIMITS
    assert least < 0 < most
    for density, limit in ((1.0, most), (0.0, least)):
        weight = 0.0
        for _ in range(2000):
            after = steered_weight(weight, density, 0.2, 0.03)
            assert (after > weight) == (density > 0.2) or after == limit
            weight = after
        assert weight == limit
    for _ in range(2000):
        weight = steered_weight(weight, 1.0, 0.2, 0.03)
    assert weight == most  # it passes 0 again


# ---- Losses --------------------------------------------------------------------------------------------------------


def test_relative_error_counts_each_token_against_its_power() -> None:
    rng = np.random.default_rng(3)
    found, wished = (rng.standard_normal((2, 5, 8)) * rng.lognormal(0, 2, (2, 5, 1)) for _ in range(2))
    wished[0, 0] = 0.0
    error, power = ((found - wished) ** 2).sum(-1), (wished**2).sum(-1)
    typical = np.exp(np.log(np.maximum(power, 1e-12)).mean())
    expected = (error / (power + typical)).mean()
    tensors = [torch.from_numpy(values.astype(np.float32)) for values in (found, wished)]
    assert float(relative_error(*tensors)) == pytest.approx(expected, rel=1e-4)
    assert float(relative_error(tensors[0], tensors[0])) == 0.0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, TOLERANCE), (torch.bfloat16, 0.02)], ids=str)
def test_divergence_and_its_gradient_are_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float
) -> None:
    monkeypatch.setattr(distill, "_HEAD_ROWS", 4)  # the last part is shorter
    generator = torch.Generator().manual_seed(4)
    student, teacher = (torch.randn(10, N_EMBD, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    head = (torch.randn(50, N_EMBD, generator=generator) / 3).to(dtype)
    exact = student.detach().double().requires_grad_()
    log_p = (teacher.detach().double() @ head.double().T).log_softmax(-1)
    expected = (log_p.exp() * (log_p - (exact @ head.double().T).log_softmax(-1))).sum(-1).mean()
    (3.0 * expected).backward()
    found = HeadDivergence.apply(student, teacher, head, False)
    (3.0 * found).backward()
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), rel=tolerance)
    assert (student.grad.double() - exact.grad).abs().max() < tolerance * exact.grad.abs().max()
    assert teacher.grad is None
    same = HeadDivergence.apply(student, student.detach(), head, False)
    assert abs(same.item()) < TOLERANCE


# ---- Steps ---------------------------------------------------------------------------------------------------------


def distiller(base: BaseModel, activation: str = "relu", own: str = "", **how: object) -> Distiller:
    """Over all layers; `own`: the activation that the teacher's weights are meant for."""
    graph = Graph(base, **how)
    graph.activation = own or graph.activation
    return Distiller(graph, {i: read_ffn(graph, graph.base, i, activation, {}) for i in range(base.n_layer)})


def tokens(n_seq: int = 3) -> torch.Tensor:
    return torch.randint(3, 380, (n_seq, 16), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("activation", ["relu", "relu_sqr"])
@pytest.mark.parametrize("arch", ["llama", "gpt2", "falcon"])
def test_a_student_that_is_the_teacher_has_no_loss(tiny_model: Callable[..., Path], arch: str, activation: str) -> None:
    trained = distiller(BaseModel(tiny_model(arch, n_layer=2)), activation, own=activation)
    embedded = trained.graph.embed(tokens())
    for blend in (0.0, 0.4, 1.0):
        assert trained.local_step(embedded, embedded, blend, [0.5, 0.5], 0.0).loss < 1e-10
    result = trained.end_to_end_step(tokens(), [0.5, 0.5], 0.0)
    assert abs(result.loss) < 1e-6 and max(result.errors) < 1e-10
    assert all(0.2 < density < 0.8 for density in result.densities)


def test_densities_are_those_of_the_blocks_on_the_teachers_states(tiny_model: Callable[..., Path]) -> None:
    trained = distiller(BaseModel(tiny_model(n_layer=2)))
    embedded = trained.graph.embed(tokens())
    result = trained.local_step(embedded, embedded, 0.0, [0.5, 0.5], 0.0)
    assert trained.densities(embedded) == pytest.approx(result.densities)
    assert all(not ffn._seen for ffn in trained.students.values())


def test_blended_block_learns_what_brings_the_hidden_state_back(tiny_model: Callable[..., Path]) -> None:
    trained = distiller(BaseModel(tiny_model(n_layer=2)))
    trained.graph.residual_scale = 0.5  # MiniCPM's
    graph, teacher = trained.graph, trained.graph.embed(tokens())
    student = teacher + 0.1 * torch.randn(teacher.shape, generator=torch.Generator().manual_seed(6))
    found = trained.local_step(teacher, student, 0.75, [0.5, 0.5], 0.0).errors
    h = {"teacher": teacher, "student": student}
    for i, ffn in trained.students.items():
        after, x = graph.attend(i, h["teacher"])
        wished = graph.add_ffn(after, graph.ffn(i, x))
        after, x = graph.attend(i, h["teacher"] + 0.75 * (h["student"] - h["teacher"]))
        ffn.begin(train=False)
        y = ffn(x).y
        target = 2.0 * (wished - after)
        expected = relative_error(y, target)
        assert found[i] == pytest.approx(float(expected), rel=1e-5)
        h = {"teacher": wished, "student": after + 0.5 * y}
        ffn.end()


def test_end_to_end_step_goes_down_the_gradient_of_the_whole(tiny_model: Callable[..., Path]) -> None:
    trained = distiller(BaseModel(tiny_model(n_layer=2)))
    trained.weights = {0: 0.3, 1: 0.6}
    graph, batch, seen = trained.graph, tokens(), {}
    trained.optimizer.step = lambda: seen.update(
        {(i, name): w.grad.clone() for i, ffn in trained.students.items() for name, w in ffn.weights.items()}
    )
    result = trained.end_to_end_step(batch, [0.5, 0.5], 0.0)
    logits = graph.forward(batch).detach().log_softmax(-1)
    h = own = graph.embed(batch)
    leaves = {i: {n: w.clone().requires_grad_() for n, w in ffn.weights.items()} for i, ffn in trained.students.items()}
    loss = 0.0
    for i, w in leaves.items():
        after, x = graph.attend(i, own)
        own = after + graph.ffn(i, x)
        after, x = graph.attend(i, h)
        a = (x @ w["gate"].T).relu()
        h = after + (a * (x @ w["up"].T)) @ w["down"]
        loss = (
            loss
            + relative_error(h, own) / 2
            + distill._END_TO_END_SCALE * trained_weight(i) * a.mean() ** 2 / (a * a).mean()
        )
    found = (graph.last_norm(h) @ graph.head().T).log_softmax(-1)
    divergence = (logits.exp() * (logits - found)).sum(-1).mean()
    (loss + divergence).backward()
    assert result.loss == pytest.approx(float(divergence.detach()), rel=1e-4)
    gradients = torch.cat([w.grad.flatten() for layer in leaves.values() for w in layer.values()])
    expected = gradients / max(1.0, float(gradients.norm()))  # clipped to a norm of 1
    assert torch.allclose(
        torch.cat([g.flatten() for g in seen.values()]), expected, atol=1e-3 * float(expected.abs().max())
    )


def trained_weight(i_layer: int) -> float:
    """Of the pressure in the test above."""
    return {0: 0.3, 1: 0.6}[i_layer]


def test_perplexity_is_that_of_the_models_logits(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "_HEAD_ROWS", 7)
    trained = distiller(BaseModel(tiny_model(n_layer=2)))
    graph, windows = trained.graph, tokens(5)
    expected = torch.nn.functional.cross_entropy(graph.forward(windows)[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
    assert perplexity(graph, {}, windows, 2) == pytest.approx(expected.exp().item(), rel=1e-5)
    for ffn in trained.students.values():
        ffn.begin(train=False)
    h = forward_layers(graph, {1: trained.students[1]}, range(2), graph.embed(windows))
    logits = graph.last_norm(h) @ graph.head().T
    for ffn in trained.students.values():
        ffn.end()
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
    assert perplexity(graph, {1: trained.students[1]}, windows, 2) == pytest.approx(expected.exp().item(), rel=1e-5)


def test_compiled_steps_equal_eager_ones(tiny_model: Callable[..., Path]) -> None:
    if not shutil.which("g++"):
        pytest.skip("no g++; torch.compile needs a C++ compiler")
    base, batch = BaseModel(tiny_model(n_layer=1, n_ff=96)), tokens(1)
    results = []
    for compiled in (False, True):
        trained = distiller(base, compiled=compiled)
        results.append((trained.end_to_end_step(batch, [0.3], 1e-3), trained.students[0].weights))
    eager, other = results
    assert other[0].loss == pytest.approx(eager[0].loss, rel=1e-4)
    assert other[0].errors == pytest.approx(eager[0].errors, rel=1e-4) and other[0].densities == eager[0].densities
    for name, weight in eager[1].items():
        assert torch.allclose(other[1][name], weight, atol=1e-4), name


def test_perplexity_of_a_broken_model_is_a_number(tiny_model: Callable[..., Path]) -> None:
    trained = distiller(BaseModel(tiny_model(n_layer=2)))
    trained.students[1].weights["down"].mul_(1e10)
    trained.graph._logit_factor = 1e6
    assert 1e300 < perplexity(trained.graph, trained.students, tokens(), 2) < float("inf")
