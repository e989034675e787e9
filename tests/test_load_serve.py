"""A short load on `powerinfer serve`; by hand for minutes: python tests/load_serve.py MODEL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import load_serve
import pytest

# What must have happened at least once.
OUTCOMES = ("answered", "answered, streamed", "client left", "broken HTTP", "embeddings", "refused (400)")


def test_load_is_held_and_every_answer_is_right(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(tied=True)
    options = load_serve.LoadOptions(model, streams=32, minutes=0.25, seed=1, plan=tiny_plan(model, order_seed=3))
    report = load_serve.run_load(options)
    assert not report.failures
    assert all(report.outcomes[name] for name in OUTCOMES), report.outcomes
    assert report.is_exact and len(report.gaps) > 100 and len(report.errors) > 100
    assert report.stats["computed_by"] == "powerinfer" and report.stats["n_cached_tokens"] > 0
    load_serve.print_report(options, report)
    assert "greedy token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"finish_reason": None}, "finish_reason None"),
        ({"text": "one STOP"}, "a stop string"),
        ({"text": "other text"}, "but tokens"),
        ({"tokens": [(b"one", -1.0)]}, "but tokens 'one'"),
        ({"finish_reason": "length", "text": "one", "tokens": [(b"one", -1.0)]}, "1 tokens of 2"),
    ],
)
def test_answers_that_are_wrong_are_found(change: dict, words: str) -> None:
    body = {"max_tokens": 2, "stop": ["STOP"], "logprobs": 0}
    right = {"text": "one two", "finish_reason": "length", "tokens": [(b"one", -1.0), (b" two", -2.0)]}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    sent = load_serve.Sent("/v1/completions", body, [(1, 2, 3)], choices=[load_serve.Choice(**right)], usage=usage)
    assert load_serve.check_answer(sent) is None
    sent.choices = [load_serve.Choice(**{**right, **change})]
    assert words in load_serve.check_answer(sent)


def test_tokens_of_another_answer_are_found(tiny_model: Callable[..., Path]) -> None:
    """A mixed answer: the right tokens for another prompt."""
    options = load_serve.LoadOptions(tiny_model(tied=True))
    vocabulary = load_serve.Vocabulary(options.model)
    tokens = [(text, -3.0) for text in list(vocabulary.ids)[5:9]]
    body = {"temperature": 0}
    sent = load_serve.Sent("/v1/completions", body, [(5, 6)], choices=[load_serve.Choice(tokens=tokens)])
    report = load_serve.Report(sent=[sent], is_exact=True)
    load_serve.score(options, vocabulary, report)
    load_serve.check_figures(options, report)
    assert [text.split(":")[0] for text in report.failures] == ["logit below the best one", "log-probability"]
