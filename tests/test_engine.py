"""The serving engine: each answer is what the model gives alone, whatever else runs in the same batch."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from powerinfer_py import Llama
from powerinfer_py.errors import CancelledError, ClosedError, OptionError, PowerInferError, QueueFullError
from powerinfer_py.serving.engine import Engine, EngineOptions, Generation, load_model
from powerinfer_py.serving.fair_queue import FairQueue
from powerinfer_py.serving.requests import Piece, Request, Sampling, TokenLogprob
from powerinfer_py.serving.sampler import top_logprobs
from powerinfer_py.serving.text_assembly import TextAssembly

# A chosen token is at most this far below the best logit when its text is scored alone (F32 weights and KV cache).
SCORE_TOLERANCE = 1e-3
EXACT_OPTIONS = {"type_k": 0, "type_v": 0, "flash_attn": False, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
GREEDY = Sampling(temperature=0)
N_CTX = 256


@pytest.fixture(scope="module")
def model_path(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(tied=True)


@pytest.fixture(scope="module")
def llama(model_path: Path) -> Iterator[Llama]:
    with load_model(model_path, 4, N_CTX, **EXACT_OPTIONS) as model:
        yield model


@pytest.fixture
def engine(llama: Llama) -> Iterator[Engine]:
    with Engine(llama) as running:
        yield running


@pytest.fixture(scope="module")
def alone(model_path: Path) -> Iterator[Llama]:
    """The same model, one sequence, all logits."""
    with Llama(model_path, n_ctx=N_CTX, logits_all=True, **EXACT_OPTIONS) as model:
        yield model


def prompt_of(seed: int, n_tokens: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 380, n_tokens).tolist())


def collect(generation: Generation) -> tuple[str, str, list[TokenLogprob]]:
    """Text, finish_reason and log-probabilities of a whole answer."""
    pieces = list(generation)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
    return "".join(piece.text for piece in pieces), pieces[-1].finish_reason, logprobs


def assert_greedy(alone: Llama, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Every token is the best one, within the tolerance, when the text is scored alone."""
    alone.reset()
    alone.eval([*prompt, *tokens])
    scores = alone.scores[len(prompt) - 1 : len(prompt) + len(tokens) - 1]
    chosen = scores[np.arange(len(tokens)), list(tokens)]
    assert (scores.max(1) - chosen).max() < SCORE_TOLERANCE


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_answers_of_one_batch_are_those_that_each_prompt_gets_alone(engine: Engine, alone: Llama) -> None:
    prompts = [prompt_of(seed, n) for seed, n in enumerate((1, 3, 90, 17, 200, 2, 40, 5, 120, 64))]
    generations = [engine.submit(Request(p, 24, sampling=GREEDY, n_top_logprobs=0)) for p in prompts]
    for prompt, generation in zip(prompts, generations):
        _, reason, logprobs = collect(generation)
        tokens = [logprob.token for logprob in logprobs]
        assert (
            generation.n_prompt == len(prompt)
            and generation.n_generated == len(tokens)
            and reason in ("length", "stop")
        )
        assert_greedy(alone, prompt, tokens)


def test_random_arrivals_and_cancels_mix_no_answers(engine: Engine, alone: Llama) -> None:
    """Prompts with common prefixes, so that sequences are reused, copied and moved; a third of them is cancelled."""
    chance = random.Random(5)
    shared = [prompt_of(1000 + i, 60) for i in range(3)]
    answers: list[tuple[tuple[int, ...], list[int], str]] = []
    lock = threading.Lock()

    def client(number: int) -> None:
        mine = random.Random(number)
        for i in range(8):
            prompt = mine.choice(shared)[: mine.randint(1, 60)] + prompt_of(100 * number + i, mine.randint(1, 30))
            generation = engine.submit(Request(prompt, mine.randint(1, 40), sampling=GREEDY, n_top_logprobs=0))
            cancel_after = mine.randint(0, 20) if mine.random() < 0.33 else None
            tokens, reason = [], None
            for n_pieces, piece in enumerate(generation):
                tokens += [logprob.token for logprob in piece.logprobs]
                reason = piece.finish_reason
                if n_pieces == cancel_after:
                    generation.cancel()
            with lock:
                answers.append((prompt, tokens, reason))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(9)]
    for thread in threads:
        thread.start()
        time.sleep(chance.random() * 0.01)
    for thread in threads:
        thread.join()
    assert len(answers) == 72
    for prompt, tokens, reason in answers:
        assert reason in ("length", "stop", "cancelled")
        if tokens:
            assert_greedy(alone, prompt, tokens)
    snapshot = engine.snapshot()
    assert snapshot.n_running == snapshot.n_waiting == 0
    assert sum(snapshot.n_requests.values()) == 72
    assert snapshot.n_cached_tokens > 0


def test_same_text_as_llama_cpp_gives_with_the_same_seed(engine: Engine, alone: Llama) -> None:
    prompt = "The quick brown fox"
    tokens = tuple(alone.tokenize(prompt.encode()))
    for seed in (1, 2, 3):
        options = {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "repeat_penalty": 1.1, "frequency_penalty": 0.2}
        expected = alone.create_completion(list(tokens), max_tokens=30, seed=seed, **options)["choices"][0]["text"]
        text, _, _ = collect(engine.submit(Request(tokens, 30, sampling=Sampling(seed=seed, **options))))
        assert text == expected


def test_conversation_that_goes_on_computes_only_what_is_new(engine: Engine, alone: Llama) -> None:
    prompt = prompt_of(7, 100)
    first = engine.submit(Request(prompt, 10, sampling=GREEDY, n_top_logprobs=0))
    _, _, logprobs = collect(first)
    answer = tuple(logprob.token for logprob in logprobs)
    again = engine.submit(Request(prompt + answer + prompt_of(8, 5), 10, sampling=GREEDY, n_top_logprobs=0))
    _, _, logprobs = collect(again)
    assert first.n_cached == 0 and again.n_cached >= len(prompt) + len(answer) - 1
    assert_greedy(alone, again.request.prompt, [logprob.token for logprob in logprobs])
    same = engine.submit(Request(prompt, 4, sampling=GREEDY))
    collect(same)
    assert same.n_cached == len(prompt) - 1  # the last one is computed for its logits


def test_answers_to_one_prompt_at_once_compute_it_once(engine: Engine, alone: Llama) -> None:
    prompt = prompt_of(11, 150)
    generations = [engine.submit(Request(prompt, 20, sampling=GREEDY, n_top_logprobs=0)) for _ in range(4)]
    for generation in generations:
        _, _, logprobs = collect(generation)
        assert_greedy(alone, prompt, [logprob.token for logprob in logprobs])
    assert sorted(generation.n_cached for generation in generations) == [0, 149, 149, 149]


def test_request_whose_prefix_was_being_computed_elsewhere_forgets_what_its_sequence_held(
    llama: Llama, alone: Llama
) -> None:
    """It waits for another request's prompt, on a sequence with an older text; the other one is cancelled meanwhile."""
    with Engine(llama, EngineOptions(prompt_chunk=1)) as engine:
        old = [engine.submit(Request(prompt_of(30 + i, 60), 1, sampling=GREEDY)) for i in range(4)]
        for generation in old:
            collect(generation)
        # A running answer keeps the prompts' chunks short.
        busy = engine.submit(Request(prompt_of(40, 4), 200, sampling=Sampling(temperature=0, logit_bias={2: -100.0})))
        wait_until(lambda: busy.n_generated > 1)
        prompt = prompt_of(41, 100)
        first = engine.submit(Request(prompt, 4, sampling=GREEDY))
        second = engine.submit(Request(prompt, 8, sampling=GREEDY, n_top_logprobs=0))
        wait_until(lambda: any(slot.waits_for is not None for slot in engine._slots))
        first.cancel()
        assert collect(first)[1] == "cancelled"
        _, _, logprobs = collect(second)
        busy.cancel()
        assert_greedy(alone, prompt, [logprob.token for logprob in logprobs])


def test_gaps_between_sequences_close(engine: Engine, alone: Llama) -> None:
    generations = [engine.submit(Request(prompt_of(i, 20), 200, sampling=GREEDY, n_top_logprobs=0)) for i in range(4)]
    wait_until(lambda: all(generation.n_generated > 3 for generation in generations))
    for i in (0, 2):
        generations[i].cancel()
    wait_until(lambda: min(generations[1].n_generated, generations[3].n_generated) > 60)
    used = [slot.i_seq for slot in engine._slots if slot.job is not None]
    assert max(used) - min(used) + 1 == len(used) == 2
    for i in (1, 3):
        generations[i].cancel()
        _, _, logprobs = collect(generations[i])
        assert_greedy(alone, generations[i].request.prompt, [logprob.token for logprob in logprobs])
    # The idle ones were moved with their cache.
    again = engine.submit(Request(generations[0].request.prompt, 1, sampling=GREEDY))
    collect(again)
    assert again.n_cached == 19


def test_answer_ends_where_the_context_ends(engine: Engine) -> None:
    generation = engine.submit(Request(prompt_of(3, N_CTX - 6), sampling=Sampling(seed=1, logit_bias={2: -100.0})))
    _, reason, _ = collect(generation)
    assert reason == "length" and generation.n_generated == 6
    last = engine.submit(Request(prompt_of(4, N_CTX - 1), sampling=Sampling(seed=1, logit_bias={2: -100.0})))
    assert collect(last)[1] == "length" and last.n_generated == 1


def test_end_of_text_token_stops(engine: Engine) -> None:
    generation = engine.submit(Request((5, 6), 50, sampling=Sampling(temperature=0, logit_bias={2: 1000.0})))
    assert collect(generation) == ("", "stop", [])


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(()), "prompt: 0 tokens"),
        (Request(tuple(range(3, 3 + N_CTX))), f"prompt: {N_CTX} tokens; expected 1 .. {N_CTX - 1}"),
        (Request((1, 384)), "token 384; expected 0 .. 383"),
        (Request((1,), max_tokens=0), "max_tokens: 0"),
        (Request((1,), n_top_logprobs=385), "logprobs: 385"),
        (Request((1,), sampling=Sampling(logit_bias={-1: 1.0})), "logit_bias: token -1"),
        (Request((1,), sampling=Sampling(grammar="root = 1")), "grammar: llama.cpp can't read it"),
    ],
)
def test_unusable_request_is_refused(engine: Engine, request_: Request, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        engine.submit(request_)
    assert collect(engine.submit(Request((5,), 2, sampling=GREEDY)))[1] in ("length", "stop")


def test_queue_is_limited_and_clients_take_turns(llama: Llama) -> None:
    endless = Sampling(seed=1, logit_bias={2: -100.0})
    with Engine(llama, EngineOptions(queue_limit=4)) as engine:
        running = [engine.submit(Request((5, i), sampling=endless)) for i in range(3, 7)]
        wait_until(lambda: engine.snapshot().n_running == 4)
        waiting = [engine.submit(Request((9,), 1, client=client)) for client in ("a", "a", "a", "b")]
        with pytest.raises(QueueFullError, match="4 requests are waiting"):
            engine.submit(Request((9,), 1, client="c"))
        assert engine.snapshot().n_rejected == 1
        waiting[1].cancel()
        assert next(waiting[1]).finish_reason == "cancelled"
        for generation in running:
            generation.cancel()
        for generation in waiting:
            list(generation)
    queue: FairQueue[str] = FairQueue(9)
    for client, item in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")):
        queue.put(client, item)
    assert [queue.get() for _ in range(6)] == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_time_out_ends_waiting_and_running_requests(llama: Llama) -> None:
    endless = Sampling(seed=1, logit_bias={2: -100.0})
    with Engine(llama) as engine:
        running = [engine.submit(Request((5, i), sampling=endless, timeout_s=0.05)) for i in range(3, 7)]
        waiting = engine.submit(Request((5,), timeout_s=0.0))
        assert collect(waiting)[:2] == ("", "timeout")
        assert {collect(generation)[1] for generation in running} <= {"timeout", "length"}
        with pytest.raises(PowerInferError, match="timeout"):
            engine.submit_embedding([5, 6], timeout_s=0.0).wait()


def test_closing_ends_everything(llama: Llama) -> None:
    engine = Engine(llama)
    generations = [engine.submit(Request((5, i), sampling=Sampling(logit_bias={2: -100.0}))) for i in range(3, 20)]
    engine.close()
    engine.close()
    assert {collect(generation)[1] for generation in generations} <= {"cancelled", "length"}
    for action in (lambda: engine.submit(Request((5,))), lambda: engine.set_sparsity("dense")):
        with pytest.raises(ClosedError):
            action()


def test_failed_decode_ends_every_request_with_an_error(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(llama) as engine:
        monkeypatch.setattr(engine, "_decode", lambda: (_ for _ in ()).throw(PowerInferError("it broke")))
        generation = engine.submit(Request((5,)))
        with pytest.raises(PowerInferError, match="it broke"):
            list(generation)
        wait_until(lambda: not engine._thread.is_alive())
        with pytest.raises(PowerInferError, match="it broke"):
            engine.submit(Request((5,)))


def test_grammar_shapes_the_text(engine: Engine) -> None:
    grammar = 'root ::= "{" [0-9] [0-9] [0-9] "}"'
    for temperature in (0.0, 1.5):
        sampling = Sampling(temperature=temperature, seed=4, grammar=grammar)
        text, reason, _ = collect(engine.submit(Request((5, 6, 7), 40, sampling=sampling)))
        assert len(text) == 5 and text[0] == "{" and text[1:4].isdigit() and text[4] == "}"
        assert reason == "stop"


def test_logprobs_are_those_of_the_model(engine: Engine, alone: Llama) -> None:
    prompt = prompt_of(21, 12)
    _, _, logprobs = collect(engine.submit(Request(prompt, 6, sampling=GREEDY, n_top_logprobs=3)))
    alone.reset()
    alone.eval([*prompt, *(logprob.token for logprob in logprobs)])
    for i, found in enumerate(logprobs):
        scores = alone.scores[len(prompt) - 1 + i].astype(np.float64)
        expected = scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
        assert found.logprob == pytest.approx(expected[found.token], abs=1e-3)
        assert [value for _, _, value in found.top] == pytest.approx(np.sort(expected)[::-1][:3], abs=1e-3)
        assert found.top[0][0] == found.token and found.top[0][1] == found.text


def test_top_logprobs_of_all_and_of_none() -> None:
    values = np.array([0.0, 2.0, 1.0], np.float32)
    assert top_logprobs(values, 2, 0)[1] == []
    assert [token for token, _ in top_logprobs(values, 2, 3)[1]] == [1, 2, 0]
    assert np.exp([value for _, value in top_logprobs(values, 2, 5)[1]]).sum() == pytest.approx(1)


def test_embeddings_are_those_of_llama_cpp(engine: Engine, model_path: Path) -> None:
    prompts = [prompt_of(i, n) for i, n in enumerate((1, 30, 200))]
    busy = engine.submit(Request((5, 6), 30, sampling=GREEDY))
    jobs = [engine.submit_embedding(prompt) for prompt in prompts]
    gone = engine.submit_embedding(prompts[2])
    gone.cancel()
    found = [job.wait() for job in jobs]
    with pytest.raises(CancelledError):
        gone.wait()
    collect(busy)
    with Llama(model_path, n_ctx=N_CTX, embedding=True, pooling_type=0, **EXACT_OPTIONS) as stock:
        for row, prompt in zip(found, prompts):
            assert row.shape == (64,) and row.dtype == np.float32
            stock._batch.reset()
            stock._ctx.kv_cache_clear()
            stock._batch.add_sequence(list(prompt), 0, True)
            stock._ctx.decode(stock._batch)
            rows = np.stack(
                [np.ctypeslib.as_array(stock._ctx.get_embeddings_ith(i), (64,)) for i in range(len(prompt))]
            )
            expected = rows.mean(0) / np.linalg.norm(rows.mean(0))
            assert np.abs(row - expected).max() < 1e-4


def test_snapshot_says_what_runs(tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]) -> None:
    path = tiny_model()
    with (
        load_model(path, 2, N_CTX, plan=tiny_plan(path), **EXACT_OPTIONS) as model,
        Engine(model) as engine,
    ):
        idle = engine.snapshot()
        assert idle.computed_by == "powerinfer" and idle.n_parallel == 2 and idle.n_ctx == N_CTX
        assert [slot.state for slot in idle.slots] == ["idle", "idle"]
        generation = engine.submit(Request((5, 6, 7), 200, sampling=Sampling(logit_bias={2: -100.0})))
        wait_until(lambda: any(slot.state == "generating" for slot in engine.snapshot().slots))
        engine.set_sparsity("dense")
        assert {layer.sparsity for layer in engine.snapshot().layers} == {"dense"}
        collect(generation)
        wait_until(lambda: engine.snapshot().n_running == 0)
        after = engine.snapshot()
        assert after.sparsity == "dense" and after.n_generated_tokens == 200 and after.n_requests == {"length": 1}
        assert after.read_bytes <= after.dense_bytes and after.density is not None
        assert len(after.layers) == len(model.layers()) and all(layer.n_ff for layer in after.layers)
        assert all(0 < layer.density <= 1 for layer in after.layers)
        with pytest.raises(OptionError, match="nonsense"):
            engine.set_sparsity("nonsense")


def test_text_assembly_holds_back_what_may_become_a_stop_string() -> None:
    def run(parts: Sequence[bytes], stop: Sequence[str]) -> list[str]:
        assembly = TextAssembly(stop)
        texts = []
        for part in parts:
            texts.append(assembly.add(part, None)[0])
            if assembly.is_stopped:
                return texts
        return [*texts, assembly.finish()[0]]

    assert run([b"one ", b"ST", b"OP", b" two"], ["STOP"]) == ["one ", "", ""]
    assert run([b"one ", b"ST", b"AY"], ["STOP"]) == ["one ", "", "STAY", ""]
    assert run([b"STOP"], ["STOP"]) == [""]
    assert run([b"abcd"], ["cd", "b"]) == ["a"]  # the earliest one counts
    assert run([b"a\n", b"\n", b"b"], ["\n\n"]) == ["a", ""]
    assert run([b"xaa", b"ab"], ["aab"]) == ["x", "a"]
    assert run([b"ab"], []) == ["ab", ""]


@pytest.mark.parametrize("text", ["\u6b6a", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u00df\u266c", "a\u6b6ab"])
def test_characters_split_over_tokens_come_whole(text: str) -> None:
    data = text.encode()
    for n in (1, 2, 3):
        assembly = TextAssembly([])
        parts = [assembly.add(data[i : i + n], None)[0] for i in range(0, len(data), n)]
        assert "".join(parts) + assembly.finish()[0] == text
    broken = TextAssembly([])
    assert broken.add(b"a\xff", None)[0] + broken.add(b"\xe6\xad", None)[0] + broken.finish()[0] == "a"


def test_stop_string_inside_a_character_boundary() -> None:
    assembly = TextAssembly(["\u266c"])
    data = "\u00df\u266cx".encode()
    assert "".join(assembly.add(data[i : i + 1], None)[0] for i in range(len(data) - 1)) == "\u00df"
    assert assembly.is_stopped


def test_logprobs_come_with_the_text_of_their_token() -> None:
    logprobs = [TokenLogprob(i, b"", -1.0, ()) for i in range(4)]
    assembly = TextAssembly(["STOP"])
    assert assembly.add(b"a", logprobs[0]) == ("a", (logprobs[0],))
    assert assembly.add(b"bST", logprobs[1]) == ("b", ())
    assert assembly.add(b"x", logprobs[2]) == ("STx", (logprobs[1], logprobs[2]))
    assert assembly.add(b"STOP", logprobs[3]) == ("", ())


def test_piece_is_plain_data() -> None:
    assert Piece("a") == Piece("a", (), None)


@pytest.mark.parametrize("n_parallel", [0, -1, 100000])
def test_impossible_number_of_sequences_is_refused(model_path: Path, n_parallel: int) -> None:
    with pytest.raises(OptionError, match="n_parallel"):
        Llama(model_path, n_parallel=n_parallel, verbose=False)
