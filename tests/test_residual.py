"""Predictors that read the residual stream, inside a real llama context, against a plain float64 forward pass.

The device must drop exactly the neurons that the rule drops: logits and candidate counts are both compared.
"""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
import test_preload
from reference_model import ReferenceModel
from test_llama import write_lora

from powerinfer_py import _core
from powerinfer_py.format import read_plan

ARCHITECTURES = ("llama", "gpt2", "falcon")
N_LAYER, N_FF, RANK, ORDER_SEED = 3, 96, 16, 3
N_SEQUENCES, N_TOKENS = 2, 64
# F32 weights and F32 KV cache against float64, logits of size 1: only rounding differs (measured: 2.3e-6).
TOLERANCE = 1e-3
# A score this near its threshold may fall on either side of it by rounding.
SCORE_MARGIN = 5e-6
# A threshold that no score reaches.
NONE_ACTIVE = 1e30
TOKENS = np.random.default_rng(11).integers(3, 380, (N_SEQUENCES, N_TOKENS))

Step = list[tuple[int, int, bool]]  # one batch: (sequence, position, whether its logits are wanted)


def wide_gap(scores: np.ndarray, wanted: float) -> float:
    """A float32 in the middle of the widest gap between scores that are near `wanted`."""
    near = np.sort(scores[np.abs(scores - wanted) < 0.05])
    at = np.diff(near).argmax()
    return float(np.float32((near[at] + near[at + 1]) / 2))


class Case:
    """A model, a plan whose predictors read the residual, and what the rule says about both.

    Args:
        path: the model.
        tiny_plan: the fixture.
        wanted: about where the thresholds are; 0: exactly there.
        control: (N_LAYER, n_embd) control vector; None: none.
        tokens: (n_sequences, n_tokens) what is evaluated.
        options: of the plan.
    """

    def __init__(
        self,
        path: Path,
        tiny_plan: Callable[..., Path],
        wanted: float,
        control: np.ndarray | None = None,
        tokens: np.ndarray = TOKENS,
        **options: object,
    ) -> None:
        self.path = path
        self.reference = ReferenceModel(path)
        self.n_candidates = np.zeros((N_LAYER, *tokens.shape), np.int64)
        options = {"activation": "relu", "order_seed": ORDER_SEED, "predictor": "mlp", "rank": RANK, **options}
        plan = read_plan(tiny_plan(path, predictor_input="residual", **options))
        thresholds = []

        def ffn(i: int, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
            layer = plan.layers[i]
            fc1, fc2 = layer.fc1.data.astype(np.float64), layer.fc2.data.astype(np.float64)
            scores = np.maximum(residual @ fc1.T, 0.0) @ fc2.T
            is_far = wanted == 0.0 or abs(wanted) >= NONE_ACTIVE
            threshold = wanted if is_far else wide_gap(scores, wanted)
            thresholds.append(threshold)
            assert np.abs(scores - threshold).min() > SCORE_MARGIN
            used = np.empty(scores.shape, bool)
            used[..., layer.neuron_order] = scores >= threshold
            self.n_candidates[i] = used.sum(-1)
            return self.reference.relu_ffn(i, x, used)

        self.logits = self.reference.logits(tokens, ffn, control)
        self.file = tiny_plan(path, predictor_input="residual", predictor_threshold=thresholds, **options)

    def candidates(self, steps: list[Step]) -> int:
        """Candidates of all decoded tokens; the last layer only computes those whose logits are wanted."""
        return sum(
            self.n_candidates[: N_LAYER if wanted else N_LAYER - 1, sequence, position].sum()
            for step in steps
            for sequence, position, wanted in step
        )


@pytest.fixture
def notes() -> list[str]:
    """The notes of `open_plan`'s plans."""
    return []


@pytest.fixture
def open_plan(notes: list[str]) -> Callable[..., _core.Plan]:
    """`open_plan(file, path, **options) -> Plan` in `predicted` mode."""

    plans = []  # a plan that nobody holds tells its notes to stderr

    def opened(file: Path, path: Path, **options: object) -> _core.Plan:
        plans.append(_core.Plan.open(str(file), str(path), sparsity="predicted", note=notes.append, **options))
        return plans[-1]

    return opened


@pytest.fixture
def context() -> Iterator[Callable[..., int]]:
    """`context(plan, wanted=None, lora=None)`: a llama_context, optionally observed; all are freed at the end."""
    llama_cpp.llama_backend_init()
    made = []

    def make(plan: _core.Plan, wanted: Callable[[str], bool] | None = None, lora: Path | None = None) -> int:
        base = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so.0"))
        base.ggml_get_name.restype = ctypes.c_char_p
        base.ggml_get_name.argtypes = [ctypes.c_void_p]
        model_params = llama_cpp.llama_model_default_params()
        model = plan.load_model(ctypes.addressof(model_params))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = N_SEQUENCES * N_TOKENS
        params.n_batch = params.n_ubatch = N_SEQUENCES * N_TOKENS
        params.n_seq_max = N_SEQUENCES
        params.kv_unified = True
        params.type_k = params.type_v = 0  # F32
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.n_threads = params.n_threads_batch = 2
        keep = llama_cpp.ggml_backend_sched_eval_callback(
            lambda tensor, ask, _: wanted(base.ggml_get_name(tensor).decode()) if ask else True
        )
        if wanted is not None:
            params.cb_eval = keep
        context = llama_cpp.llama_init_from_model(model, params)
        if lora is not None:
            adapter = llama_cpp.llama_adapter_lora_init(model, str(lora).encode())
            adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
            scales = (ctypes.c_float * 1)(1.0)
            assert llama_cpp.llama_set_adapters_lora(context, adapters, 1, scales) == 0
        made.append((model, context, keep))
        return context

    yield make
    for model, context, _ in made:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


def decode(context: int, steps: list[Step]) -> dict[tuple[int, int], np.ndarray]:
    """Logits (n_vocab) of the wanted tokens by sequence and position. RuntimeError when llama_decode fails."""
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(context)))
    batch = llama_cpp.llama_batch_init(N_SEQUENCES * N_TOKENS, 0, 1)
    logits = {}
    for step in steps:
        batch.n_tokens = len(step)
        for i, (sequence, position, wanted) in enumerate(step):
            batch.token[i] = TOKENS[sequence, position]
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        if llama_cpp.llama_decode(context, batch) != 0:
            llama_cpp.llama_batch_free(batch)
            raise RuntimeError("llama_decode failed")
        for i, (sequence, position, wanted) in enumerate(step):
            if wanted:
                row = llama_cpp.llama_get_logits_ith(context, i)
                logits[sequence, position] = np.ctypeslib.as_array(row, shape=(n_vocab,)).copy()
    llama_cpp.llama_batch_free(batch)
    return logits


def in_batches(sizes: list[int], sequence: int = 0) -> list[Step]:
    """One sequence, all logits, in batches of these sizes."""
    ends = np.cumsum(sizes)
    return [[(sequence, p, True) for p in range(end - n, end)] for n, end in zip(sizes, ends)]


STEPS = {
    "one by one": in_batches([1] * 20),
    "few": in_batches([2, 16, 5, 9, 3]),
    "prompt": in_batches([N_TOKENS]),
    "prompt, then decode": in_batches([40, 1, 1, 3, 1]),
    "last logits only": [[(0, p, p == 29) for p in range(30)], [(0, 30, True)], [(0, 31, False)], [(0, 32, True)]],
    "no logits": [[(0, p, False) for p in range(30)], [(0, p, False) for p in range(30, 33)], [(0, 33, True)]],
    "two sequences": [
        [(s, p, p > 15) for p in range(20) for s in range(2)],
        *([(s, p, True) for s in range(2)] for p in range(20, 30)),
    ],
}


@pytest.mark.parametrize("wanted", [0.0, 0.4, -0.3])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_and_candidates_are_those_of_the_rule(
    arch: str,
    wanted: float,
    tiny_model: Callable[..., Path],
    tiny_plan: Callable[..., Path],
    open_plan: Callable[..., _core.Plan],
    context: Callable[..., int],
    notes: list[str],
) -> None:
    path = tiny_model(arch, n_layer=N_LAYER, n_ff=N_FF)
    case = Case(path, tiny_plan, wanted)
    plan = open_plan(case.file, path)
    for name, steps in STEPS.items():
        plan.reset_stats()
        found = decode(context(plan), steps)
        assert max(np.abs(found[at] - case.logits[at]).max() for at in found) < TOLERANCE, name
        stats = plan.stats()
        assert stats["n_candidates"] == case.candidates(steps), name
        assert stats["n_active"] <= stats["n_candidates"]
        assert stats["n_blocks_whole"] == N_LAYER * len(steps) and stats["n_blocks_by_op"] == 0, name
        n_last = sum(wanted for step in steps for _, _, wanted in step)
        assert stats["n_tokens"] == (N_LAYER - 1) * sum(len(step) for step in steps) + n_last, name
    assert not notes


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_layer_without_candidates_gives_its_bias(
    arch: str,
    tiny_model: Callable[..., Path],
    tiny_plan: Callable[..., Path],
    open_plan: Callable[..., _core.Plan],
    context: Callable[..., int],
) -> None:
    path = tiny_model(arch, n_layer=N_LAYER, n_ff=N_FF, bias=arch == "llama")
    case = Case(path, tiny_plan, NONE_ACTIVE)
    plan = open_plan(case.file, path)
    for steps in (STEPS["prompt, then decode"], STEPS["two sequences"]):
        found = decode(context(plan), steps)
        assert max(np.abs(found[at] - case.logits[at]).max() for at in found) < TOLERANCE
    assert plan.stats()["n_candidates"] == 0


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "mpt"])
def test_other_modes_compute_the_same_as_without_the_predictors(
    arch: str,
    tiny_model: Callable[..., Path],
    tiny_plan: Callable[..., Path],
    open_plan: Callable[..., _core.Plan],
    context: Callable[..., int],
    notes: list[str],
) -> None:
    path = tiny_model(arch, n_layer=N_LAYER, n_ff=N_FF)
    options = {"activation": "relu", "order_seed": ORDER_SEED}
    steps = STEPS["prompt, then decode"]
    plain = _core.Plan.open(str(tiny_plan(path, **options)), str(path), sparsity="exact")
    expected = decode(context(plain), steps)
    plan = open_plan(tiny_plan(path, predictor="mlp", predictor_input="residual", **options), path)
    made = context(plan)
    for sparsity in ("dense", "exact", "predicted", "exact"):  # changed while a graph is reused
        plan.set_sparsity(sparsity)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(made), True)
        found = decode(made, steps)
        assert max(np.abs(found[at] - expected[at]).max() for at in found) < TOLERANCE
    assert not notes


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_observed_nodes_are_right_and_a_residual_cut_off_means_exact(
    arch: str,
    tiny_model: Callable[..., Path],
    tiny_plan: Callable[..., Path],
    open_plan: Callable[..., _core.Plan],
    context: Callable[..., int],
    notes: list[str],
) -> None:
    path = tiny_model(arch, n_layer=N_LAYER, n_ff=N_FF)
    case = Case(path, tiny_plan, 0.4)
    steps = in_batches([9, 1])

    def is_output(node: str) -> bool:
        return node.startswith("ffn_out")

    exact = _core.Plan.open(str(case.file), str(path), sparsity="exact")
    expected = decode(context(exact), steps)

    # Every node alone: blocks run op by op, with every neuron.
    plan = open_plan(case.file, path)
    found = decode(context(plan, lambda _: True), steps)
    assert max(np.abs(found[at] - expected[at]).max() for at in found) < TOLERANCE

    # The block's own output: the addition of the residual comes apart from it.
    plan = open_plan(case.file, path)
    found = decode(context(plan, is_output), steps)
    assert max(np.abs(found[at] - expected[at]).max() for at in found) < TOLERANCE
    assert (
        len(notes) == 1
        and "residual stream, which this graph doesn't deliver" in notes[0]
        and "`exact` is used" in notes[0]
    )

    strict = open_plan(case.file, path, strict=True)
    with pytest.raises(RuntimeError):
        decode(context(strict, is_output), steps)
    found = decode(context(open_plan(case.file, path, strict=True)), steps)
    assert max(np.abs(found[at] - case.logits[at]).max() for at in found) < TOLERANCE

    # Nodes outside of the blocks. (With attention beside the FFN any observer takes the addition apart.)
    if arch != "falcon":
        found = decode(context(open_plan(case.file, path, strict=True), lambda node: node.startswith("kqv_out")), steps)
        assert max(np.abs(found[at] - case.logits[at]).max() for at in found) < TOLERANCE


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_control_vector_stays_outside_of_the_block(
    arch: str,
    tiny_model: Callable[..., Path],
    tiny_plan: Callable[..., Path],
    open_plan: Callable[..., _core.Plan],
    context: Callable[..., int],
    notes: list[str],
) -> None:
    path = tiny_model(arch, n_layer=N_LAYER, n_ff=N_FF)
    n_embd = ReferenceModel(path).tensors["output.weight"].shape[1]
    control = 0.3 * np.random.default_rng(1).standard_normal((N_LAYER, n_embd)).astype(np.float32)
    control[0] = 0.0  # llama.cpp has none for the first layer
    case = Case(path, tiny_plan, 0.4, control)
    plan = open_plan(case.file, path)
    made = context(plan)
    data = np.ascontiguousarray(control[1:])
    pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    assert llama_cpp.llama_set_adapter_cvec(made, pointer, data.size, n_embd, 1, N_LAYER) == 0
    steps = STEPS["prompt, then decode"]
    found = decode(made, steps)
    assert max(np.abs(found[at] - case.logits[at]).max() for at in found) < TOLERANCE
    assert plan.stats()["n_candidates"] == case.candidates(steps)
    assert not notes


@pytest.mark.parametrize("name", ["up", "down"])
def test_lora_on_the_ffn_computes_every_neuron(
    name: str,
    tiny_model: Callable[..., Path],
    tiny_plan: Callable[..., Path],
    open_plan: Callable[..., _core.Plan],
    context: Callable[..., int],
    tmp_path: Path,
) -> None:
    path = tiny_model("llama", n_layer=N_LAYER, n_ff=N_FF)
    lora = write_lora(tmp_path / "lora.gguf", path, (name,), n_layer=N_LAYER)
    steps = STEPS["prompt, then decode"]
    plain = _core.Plan.open(str(tiny_plan(path, activation="relu")), str(path), sparsity="exact")
    expected = decode(context(plain, lora=lora), steps)
    case = Case(path, tiny_plan, 0.4)
    plan = open_plan(case.file, path)
    found = decode(context(plan, lora=lora), steps)
    assert max(np.abs(found[at] - expected[at]).max() for at in found) < TOLERANCE
    assert plan.stats()["n_blocks_by_op"] == N_LAYER * len(steps)


def test_norms_behind_the_ffn_mean_exact(
    tiny_model: Callable[..., Path],
    tiny_plan: Callable[..., Path],
    open_plan: Callable[..., _core.Plan],
    context: Callable[..., int],
    notes: list[str],
) -> None:
    path = tiny_model("olmo2", n_layer=N_LAYER, n_ff=N_FF)
    steps = STEPS["prompt, then decode"]
    options = {"activation": "relu", "order_seed": ORDER_SEED}
    plain = _core.Plan.open(str(tiny_plan(path, **options)), str(path), sparsity="exact")
    expected = decode(context(plain), steps)
    file = tiny_plan(path, predictor="mlp", predictor_threshold=0.4, predictor_input="residual", **options)
    found = decode(context(open_plan(file, path)), steps)
    assert max(np.abs(found[at] - expected[at]).max() for at in found) < TOLERANCE
    assert len(notes) == 1 and "residual stream, which this graph doesn't deliver" in notes[0]
    with pytest.raises(RuntimeError):
        decode(context(open_plan(file, path, strict=True)), steps)


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "mpt"])
def test_splits_change_only_where_a_residual_comes_later(
    arch: str, tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], context: Callable[..., int]
) -> None:
    path = tiny_model(arch, n_layer=N_LAYER, n_ff=N_FF)
    lines: list[str] = []
    keep = llama_cpp.llama_log_callback(lambda _, text, __: lines.append(text.decode(errors="replace")))

    def n_splits(**options: object) -> int:
        plan = _core.Plan.open(str(tiny_plan(path, activation="relu", **options)), str(path), note=lambda _: None)
        lines.clear()
        llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))
        try:
            context(plan)
        finally:
            llama_cpp.llama_log_set(llama_cpp._logger.llama_log_callback, ctypes.c_void_p(0))
        return int(re.findall(r"splits = (\d+)", "".join(lines))[-1])

    plain = n_splits()
    assert plain == 2 * N_LAYER + 1
    assert n_splits(predictor="mlp") == plain
    assert n_splits(predictor="mlp", predictor_input="residual", predictor_layers=[]) == plain
    later = 2 * N_LAYER if arch == "falcon" else 0  # one more of ours per layer, and stock nodes before it
    assert n_splits(predictor="mlp", predictor_input="residual") == plain + later


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_preloaded_plan_runs_in_an_unmodified_program(
    arch: str, tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    path = Path(shutil.copy(tiny_model(arch, n_layer=N_LAYER, n_ff=1024), tmp_path))  # beside its plan
    # small enough that `auto` takes it
    case = Case(path, tiny_plan, 0.4, tokens=np.array([test_preload.TOKENS]), rank=2, candidate_density=0.3)
    result = test_preload.run_stock(path, tmp_path / "logits.npy", case.file)
    assert "auto chose predicted" in result.stderr, result.stderr
    found = np.load(tmp_path / "logits.npy")
    if arch == "falcon":  # a later addition only reaches a device whose own buffers are the CPU's
        assert "residual stream, which this graph doesn't deliver" in result.stderr
        everything = np.ones(1024, bool)
        expected = case.reference.logits(
            np.array([test_preload.TOKENS]), lambda i, x, _: case.reference.relu_ffn(i, x, everything)
        )
    else:
        assert "residual stream" not in result.stderr
        expected = case.logits
    assert np.abs(found - expected[0]).max() < TOLERANCE
