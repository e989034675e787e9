"""models/tiny-relu, the real ReLU model that this project trained: its plan keeps what its README says, on text that it never saw."""

from __future__ import annotations

import json
import pydoc_data.topics
import shutil
from pathlib import Path

import pytest

from powerinfer_py import Llama, cli
from powerinfer_py import format as pi_format

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "models" / "tiny-relu"
MODEL = FOLDER / "tiny-relu.Q8_0.gguf"
PLAN = FOLDER / "tiny-relu.Q8_0.powerinfer.gguf"
# The goals of the predictors, and the size that was promised.
LEAST_RECALL = 0.95
MOST_CANDIDATES = 1.6  # x density
MOST_PARAMETERS = 0.08
MOST_LOSS = 0.01
MOST_BYTES = 12_000_000


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our own documents: English, technical, and written after the model's text was chosen."""
    path = tmp_path_factory.mktemp("text") / "documents.txt"
    names = ("README.md", "CONTRIBUTING.md", "docs/pipeline.md", "docs/speed.md", "models/README.md")
    path.write_text("\n".join((ROOT / name).read_text(encoding="utf-8") for name in names), encoding="utf-8")
    return path


def n_parameters(path: Path) -> int:
    base = pi_format.BaseModel(path)
    return sum(int(t.rows_shape[0]) * int(t.rows_shape[1]) for file in base.files for t in file.tensors.values())


def test_plan_holds_predictors_within_the_budget() -> None:
    plan = pi_format.read_plan(PLAN)
    plan.open_base(MODEL)
    assert plan.activation == "relu" and all(layer.predictor != "none" for layer in plan.layers)
    size = sum(rows.n_rows * rows.n for layer in plan.layers for rows in (layer.fc1, layer.fc2))
    assert size <= MOST_PARAMETERS * n_parameters(MODEL)
    assert MODEL.stat().st_size < MOST_BYTES
    for layer in plan.layers:
        assert 0.05 < layer.profile_density < 0.15
        assert layer.predictor_recall >= LEAST_RECALL


def test_predicted_keeps_recall_and_perplexity_on_unseen_text(unseen: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert cli.main(["perplexity", str(MODEL), "-f", str(unseen), "--chunks", "16", "-t", "2", "--json", str(out)]) == 0
    modes = {mode["mode"]: mode for mode in json.loads(out.read_text())["modes"]}
    assert set(modes) == {"dense", "exact", "predicted"}
    assert abs(modes["exact"]["ratio"] - 1) < 1e-3
    assert abs(modes["predicted"]["ratio"] - 1) < MOST_LOSS
    density = modes["exact"]["density"]
    assert 0.05 < density < 0.2
    assert modes["predicted"]["density"] >= LEAST_RECALL * density
    assert modes["predicted"]["candidate_density"] <= MOST_CANDIDATES * density


def test_profile_and_train_reach_the_goals_from_the_model_alone(tmp_path: Path) -> None:
    model = shutil.copy(MODEL, tmp_path / "tiny.gguf")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
    out = tmp_path / "report.json"
    assert cli.main(["profile", str(model), "--activation", "relu", "--text", str(text), "--tokens", "8192"]) == 0
    budget = ["--kind", "linear", "--max-parameters", str(MOST_PARAMETERS)]
    command = [
        "train",
        str(model),
        "--text",
        str(text),
        "--tokens",
        "16384",
        "--no-plot",
        "--json",
        str(out),
        "-j",
        "1",
    ]
    assert cli.main([*command, *budget]) == 0
    totals = json.loads(out.read_text())["totals"]
    assert totals["layers"] == 6
    assert totals["recall"] >= LEAST_RECALL
    assert totals["candidate_density"] <= MOST_CANDIDATES * totals["density"]
    assert totals["parameters_share"] <= MOST_PARAMETERS


def test_text_is_the_same_in_every_exact_mode() -> None:
    texts = []
    for sparsity in ("dense", "exact"):
        with Llama(str(MODEL), sparsity=sparsity, n_ctx=128, verbose=False) as model:
            texts.append(model("In the beginning God", max_tokens=24, temperature=0.0)["choices"][0]["text"])
    assert texts[0] == texts[1] != ""
