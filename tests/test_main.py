"""The installed native program `powerinfer-main`, run as users run it. Models are tiny; no Python is inside it."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
import tiny_models
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

from powerinfer_py import _core

TIMEOUT_S = 120
FIRST_BYTE_TOKEN = 3  # tiny vocabularies: <unk>, <s>, </s>, then the 256 bytes
BOS, EOS = 1, 2
# Characters of two, three and four bytes; no byte occurs twice, so that one token decides the next.
UTF8_TEXT = "\u6b6a\u00e9\u266c\U0001f600"
CUE = "\u00a7"  # its tokens are its two bytes, which UTF8_TEXT lacks


def program() -> str:
    installed = Path(sysconfig.get_path("scripts")) / "powerinfer-main"
    found = str(installed) if installed.exists() else shutil.which("powerinfer-main")
    assert found, "powerinfer-main is not installed; run pip install ."
    return found


def run(*args: str | Path, stdin: bytes = b"", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """Runs the program to its end, on one thread where args don't say otherwise: on a busy machine that is faster."""
    command = [program(), "-t", "1", *map(str, args)]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=TIMEOUT_S, check=False, env=env)


def start(*args: str | Path) -> subprocess.Popen[bytes]:
    command = [program(), *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def text_of(*args: str | Path, stdin: bytes = b"") -> bytes:
    """What a successful run writes to stdout, without the newline that ends it."""
    result = run(*args, stdin=stdin)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.removesuffix(b"\n")


def assert_error(result: subprocess.CompletedProcess[bytes], *parts: str) -> None:
    """Exit code 1, nothing on stdout, one line on stderr that has all parts."""
    errors = result.stderr.decode()
    assert result.returncode == 1, errors
    assert result.stdout == b""
    assert errors.startswith("powerinfer-main: ") and errors.count("\n") == 1, errors
    for part in parts:
        assert part in errors, errors


def byte_tokens(text: bytes) -> list[int]:
    return [FIRST_BYTE_TOKEN + byte for byte in text]


def chain_model(path: Path, *chains: Sequence[int]) -> Path:
    """A model in which the last token alone decides the next one: each chain lists tokens that follow each other."""
    tiny_models.write_tiny_model(path, n_layer=1)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path, "r+").tensors}
    for name in ("blk.0.attn_output.weight", "blk.0.ffn_down.weight", "token_embd.weight", "output.weight"):
        tensors[name][:] = 0
    tensors["output_norm.weight"][:] = 1
    # Token t is the unit vector i; the output row of its successor is that vector.
    position = 0
    for chain in chains:
        for token, following in zip(chain, chain[1:]):
            tensors["token_embd.weight"][token, position] = 1
            tensors["output.weight"][following, position] = 1
            position += 1
    return path


def with_metadata(path: Path, out: Path, key: str, kind: gguf.GGUFValueType, value: object) -> Path:
    """A copy of a model with one more key."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, "llama")
    copy_with_new_metadata(reader, writer, {key: MetadataDetails(kind, value)}, [])
    return out


def greedy_bytes(
    model: Path, prompt: bytes, n: int, cls: type[llama_cpp.Llama] = llama_cpp.Llama, **options: object
) -> bytes:
    """What llama_cpp generates at temperature 0, in bytes."""
    llm = cls(str(model), n_ctx=1024, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False, **options)
    out = b""
    for count, token in enumerate(llm.generate(llm.tokenize(prompt, special=True), temp=0.0)):
        if count == n or token == llm.token_eos():
            break
        out += llm.detokenize([token], prev_tokens=[BOS])
    llm.close()
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("main")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Path:
    return tiny_models.write_tiny_model(folder / "tiny.gguf")


@pytest.fixture(scope="module")
def utf8(folder: Path) -> Path:
    """Says UTF8_TEXT and ends, after BOS, after CUE and after a newline."""
    text = byte_tokens(UTF8_TEXT.encode())
    cues = [BOS, *byte_tokens(CUE.encode()[-1:] + b"\n")]
    return chain_model(folder / "utf8.gguf", [*text, EOS], *([cue, text[0]] for cue in cues))


@pytest.fixture(scope="module")
def endless(folder: Path) -> Path:
    """Says "abcabcabc..." without end; after CUE it starts with b."""
    a, b, c = byte_tokens(b"abc")
    return chain_model(folder / "endless.gguf", [BOS, a, b, c, a], [*byte_tokens(CUE.encode()[-1:]), b])


# --- the command line ---


def test_help_and_version_go_to_stdout() -> None:
    result = run("--help")
    assert result.returncode == 0
    flags = shlex.split(
        "-m --model -p --prompt -f --file -n --predict --n-predict -c --ctx-size -b --batch-size -ub "
        "--ubatch-size -t --threads -tb --threads-batch -s --seed --temp --top-k --top-p --min-p "
        "--repeat-penalty --repeat-last-n --ignore-eos -i --interactive -cnv --conversation -sys "
        "--system-prompt --no-display-prompt -ngl --gpu-layers --mlock --no-mmap --log-disable -v --verbose "
        "-h --help --version --sparsity --plan --strict --mapped --vram-budget --reset-gpu-index --disable-gpu-index "
        "--require-split -dev --device --rpc -ts --tensor-split"
    )
    for flag in flags:
        assert re.search(rf"(^|[ ,]){re.escape(flag)}([ ,\n]|$)", result.stdout.decode()), flag
    assert run("-h").stdout == result.stdout
    version = run("--version")
    assert version.returncode == 0 and version.stdout.startswith(b"powerinfer-main ") and b"ggml" in version.stdout


def test_every_flag_parses(utf8: Path) -> None:
    short = shlex.split(
        "-n 64 -c 512 -b 64 -ub 32 -t 1 -tb 2 -s 7 --temp 0 --top-k 40 --top-p 0.9 --min-p 0.1 --typical 1 -ngl 0 "
        "--repeat-penalty 1.0 --repeat-last-n 32 -no-cnv --no-display-prompt --no-mmap --log-disable --sparsity dense "
        "-e --no-escape --no-plan"
    )
    assert text_of("-m", utf8, "-p", CUE, *short) == UTF8_TEXT.encode()
    long = shlex.split(
        "--n-predict 64 --ctx-size 512 --batch-size 64 --ubatch-size 32 --threads 1 --threads-batch 2 --seed -1 "
        "--temperature 0 --top_k 0 --gpu-layers auto --log-disable --no-conversation --mapped --vram-budget 75% "
        "--reset-gpu-index --disable-gpu-index --device none --tensor-split 3,1"
    )
    assert text_of("--model", utf8, "--prompt", CUE, "--no-display-prompt", *long) == UTF8_TEXT.encode()
    assert text_of("-m", utf8, "--predict", "1", "--temp", "0", "-v").startswith(UTF8_TEXT.encode()[:1])


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--tmp", "1"], ["--tmp", "unknown flag", "did you mean --temp?"]),
        (["--no-display-promt"], ["did you mean --no-display-prompt?"]),
        (["--temp=1"], ["write '--temp 1'"]),
        (["--frobnicate-everything"], ["unknown flag", "see --help"]),
        (["--temp", "abc"], ["--temp: found 'abc'; expected a number"]),
        (["--temp", "nan"], ["--temp: found 'nan'"]),
        (["--temp", ""], ["--temp: found ''"]),
        (["-n", "1.5"], ["-n: found '1.5'; expected an integer"]),
        (["-n", "99999999999999999999"], ["expected an integer"]),
        (["-c", "-5"], ["-c: found '-5'", "at least 0"]),
        (["-b", "0"], ["at least 1"]),
        (["-t", "100000"], ["from -1 to 512"]),
        (["--top-p", "1.5"], ["from 0 to 1"]),
        (["--repeat-penalty", "0"], ["--repeat-penalty"]),
        (["-s", "4294967296"], ["-s: found '4294967296'"]),
        (["--sparsity", "fast"], ["auto, dense, exact, threshold or predicted"]),
        (["--vram-budget", "8 apples"], ["--vram-budget: found '8 apples'", "8GiB"]),
        (["--vram-budget", "-1"], ["--vram-budget: found '-1'"]),
        (["--vram-budget", "8,"], ["--vram-budget: found '8,'", "commas"]),
        (["--vram-budget", "101%"], ["--vram-budget: found '101%'"]),
        (["--tensor-split", "1,x"], ["--tensor-split: found '1,x'", "3,1"]),
        (["--tensor-split", "0,0"], ["--tensor-split: found '0,0'"]),
        (["-ngl", "many"], ["auto or all"]),
        (["--temp"], ["--temp: found no value"]),
        (["-f", "no-such-file"], ["-f: found 'no-such-file'", "No such file"]),
        (["word"], ["'word'", "belongs to no flag"]),
        ([], ["--model: found none"]),
        (["-m", "no-such-model.gguf"], ["no-such-model.gguf"]),
        (["-m", "x.gguf", "--no-plan", "--plan", "y.gguf"], ["--no-plan"]),
        (["-m", "x.gguf", "--no-plan", "--sparsity", "exact"], ["--no-plan"]),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_1(args: list[str], parts: list[str]) -> None:
    assert_error(run(*args), *parts)


def test_links_no_python_and_finds_its_libraries_by_itself() -> None:
    ldd = shutil.which("ldd")
    if ldd is None:
        pytest.skip("no ldd")
    env = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "LD_PRELOAD")}
    listing = subprocess.run([ldd, program()], capture_output=True, text=True, check=True, env=env).stdout
    assert "not found" not in listing and "libpython" not in listing
    assert str(Path(llama_cpp.__file__).parent / "lib" / "libllama.so.0") in [
        os.path.normpath(path) for path in re.findall(r"=> (\S+)", listing)
    ]
    assert run("--version", env=env).returncode == 0


# --- text ---


def test_same_text_as_llama_cpp_at_temperature_0(tiny: Path) -> None:
    for prompt in (b"Once upon a time", b"the", UTF8_TEXT.encode()):
        expected = greedy_bytes(tiny, prompt, 48)
        args = ["-m", tiny, "-p", prompt.decode(), "-n", 48, "--temp", 0]
        assert text_of(*args, "--no-display-prompt") == expected.removesuffix(b"\n")
        assert text_of(*args) == prompt + expected.removesuffix(b"\n")


def test_one_seed_gives_one_text(tiny: Path) -> None:
    args = ["-m", tiny, "-p", "x", "-n", 24, "--temp", 2, "--log-disable"]
    texts = [text_of(*args, "-s", seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_batch_size_does_not_change_the_text(tiny: Path) -> None:
    args = ["-m", tiny, "-p", "a long prompt " * 8, "-n", 12, "--temp", 0, "--log-disable"]
    assert len({text_of(*args, "-b", n, "-ub", n) for n in (1, 7, 512)}) == 1


def test_utf8_is_written_in_whole_characters(utf8: Path) -> None:
    with subprocess.Popen(
        [program(), "-m", str(utf8), "--temp", "0", "--log-disable"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        chunks = iter(lambda: os.read(process.stdout.fileno(), 4096), b"")
        # A cut character raises here.
        assert "".join(chunk.decode("utf-8") for chunk in chunks) == UTF8_TEXT + "\n"


def test_a_cut_character_at_the_end_is_written_all_the_same(folder: Path) -> None:
    cut = UTF8_TEXT.encode()[:2]
    model = chain_model(folder / "cut.gguf", [BOS, *byte_tokens(b"a" + cut), EOS])
    assert text_of("-m", model, "--temp", 0, "--log-disable") == b"a" + cut


def test_an_empty_prompt_starts_from_bos(utf8: Path, tiny: Path) -> None:
    for args in ([], ["-p", ""]):
        assert text_of("-m", utf8, "--temp", 0, *args) == UTF8_TEXT.encode()
    assert run("-m", tiny, "-p", "    ", "-n", 4).returncode == 0


def test_a_prompt_file_is_taken_byte_for_byte(utf8: Path, folder: Path) -> None:
    path = folder / "prompt.txt"
    any_bytes = b"\\n\0caf\xc3\xa9\xff\n"
    for content, echoed in ((any_bytes + b"\n", any_bytes), (CUE.encode(), CUE.encode()), (b"", b"")):
        path.write_bytes(content)
        assert text_of("-m", utf8, "-f", path, "--temp", 0) == echoed + UTF8_TEXT.encode()
        assert text_of("-m", utf8, "-f", "-", "--temp", 0, stdin=content) == echoed + UTF8_TEXT.encode()


def test_escapes_in_the_prompt(utf8: Path) -> None:
    assert text_of("-m", utf8, "-p", r"a\tb\\\n", "--temp", 0) == b"a\tb\\\n" + UTF8_TEXT.encode()
    verbatim = r"a\tb" + CUE
    assert text_of("-m", utf8, "-p", verbatim, "--no-escape", "--temp", 0) == (verbatim + UTF8_TEXT).encode()


def test_a_prompt_longer_than_the_context_is_an_error(tiny: Path, folder: Path) -> None:
    path = folder / "long.txt"
    path.write_bytes(b"a" * 1_000_000)
    result = run("-m", tiny, "-f", path, "-c", 256, "--no-plan")
    assert_error(result, "prompt: found 1000001 tokens", "at most 256", "larger -c")


def test_generation_stops_with_a_note_when_the_context_is_full(endless: Path) -> None:
    result = run("-m", endless, "-p", "", "-c", 256, "--temp", 0)
    assert result.returncode == 0
    # BOS and 255 bytes fill the context; what follows them is known.
    assert result.stdout == (b"abc" * 86)[:256] + b"\n"
    assert result.stderr.count(b"context: full with 256 tokens") == 1


def test_n_predict_and_ignore_eos(utf8: Path) -> None:
    assert text_of("-m", utf8, "--temp", 0, "-n", 3) == UTF8_TEXT.encode()[:3]
    assert text_of("-m", utf8, "-p", CUE, "-n", 0) == CUE.encode()
    n_text = len(UTF8_TEXT.encode())
    longer = text_of("-m", utf8, "--temp", 0, "-n", n_text + 5, "--ignore-eos")
    assert longer.startswith(UTF8_TEXT.encode())


def test_repeat_penalty_changes_the_choice(tiny: Path) -> None:
    args = ["-m", tiny, "-p", "x", "-n", 48, "--temp", 0]
    plain = text_of(*args)
    assert text_of(*args, "--repeat-penalty", 1e6) != plain
    assert text_of(*args, "--repeat-penalty", 1e6, "--repeat-last-n", 0) == plain


def test_sampling_values_in_the_model_replace_defaults_but_not_flags(endless: Path, folder: Path) -> None:
    model = with_metadata(endless, folder / "sampling.gguf", "general.sampling.temp", gguf.GGUFValueType.FLOAT32, 0.0)
    args = ["-m", model, "-n", 30, "--min-p", 0, "--top-p", 1, "--top-k", 0]
    assert text_of(*args) == b"abc" * 10
    assert text_of(*args, "--temp", 100, "-s", 1) != text_of(*args, "--temp", 100, "-s", 2)
    key = "general.sampling.penalty_repeat"
    model = with_metadata(endless, folder / "wrong-sampling.gguf", key, gguf.GGUFValueType.FLOAT32, -1.0)
    result = run("-m", model, "-n", 3, "--temp", 0)
    assert result.returncode == 0 and result.stdout == b"abc\n" and result.stderr.count(key.encode()) == 1


def test_output_that_cannot_be_written_is_an_error(endless: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with open("/dev/full", "wb") as full:
        command = [program(), "-m", str(endless), "--log-disable"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=TIMEOUT_S, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(b"powerinfer-main: stdout:") and result.stderr.count(b"\n") == 1


def test_a_reader_that_goes_away_ends_it_quietly(endless: Path) -> None:
    with start("-m", endless, "--log-disable") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == -signal.SIGPIPE
        assert process.stderr.read() == b""


# --- chat and interactive text ---


def n_prompt_tokens(result: subprocess.CompletedProcess[bytes]) -> int:
    found = re.search(rb"prompt eval time = +[\d.]+ ms / +(\d+) tokens", result.stderr)
    assert found, result.stderr.decode()
    return int(found[1])


def tokens_of(model: Path, text: str) -> int:
    llm = llama_cpp.Llama(str(model), vocab_only=True, verbose=False)
    n = len(llm.tokenize(text.encode(), special=True))
    llm.close()
    return n


def chatml(*messages: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages) + "<|im_start|>assistant\n"


def test_a_chat_on_stdin(utf8: Path) -> None:
    result = run("-m", utf8, "-cnv", "-sys", "be brief", "--temp", 0, stdin=b"hello\n\n  \\\nmore \\\nlines\nlast")
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout.decode() == f"{UTF8_TEXT}\n" * 3
    assert result.stderr.count(b"no chat template") == 1
    # Each token of the chat was computed once, the answers as they were generated.
    answer = ("assistant", UTF8_TEXT)
    users = [("user", text) for text in ("hello", "  \nmore \nlines", "last")]
    whole = chatml(("system", "be brief"), users[0], answer, users[1], answer, users[2])
    assert n_prompt_tokens(result) == tokens_of(utf8, whole) - 2 * len(UTF8_TEXT.encode())


def test_a_chat_starts_with_the_prompt(utf8: Path) -> None:
    result = run("-m", utf8, "-cnv", "-p", "hello", "--temp", 0)
    assert result.stdout.decode() == f"> hello\n{UTF8_TEXT}\n"
    assert n_prompt_tokens(result) == tokens_of(utf8, chatml(("user", "hello")))
    assert text_of("-m", utf8, "-cnv", "-p", "hello", "--temp", 0, "--no-display-prompt") == UTF8_TEXT.encode()


def test_a_chat_uses_the_models_template(utf8: Path, folder: Path) -> None:
    template = "{% for m in messages %}<|user|>{{ m.content }}<|end|><|assistant|>{% endfor %}"  # detected as Phi 3's
    string = gguf.GGUFValueType.STRING
    model = with_metadata(utf8, folder / "phi.gguf", "tokenizer.chat_template", string, template)
    result = run("-m", model, "-cnv", "-p", "hello", "--temp", 0, "-n", 4)
    assert result.returncode == 0 and b"ChatML" not in result.stderr
    assert n_prompt_tokens(result) == tokens_of(utf8, "<|user|>\nhello<|end|>\n<|assistant|>\n")
    odd = with_metadata(utf8, folder / "odd.gguf", "tokenizer.chat_template", string, "{{ nothing known }}")
    result = run("-m", odd, "-cnv", "-p", "hello", "-n", 1, "--no-plan")
    assert result.returncode == 0 and result.stderr.count(b"ChatML") == 1
    assert_error(run("-m", odd, "-cnv", "-p", "hello", "--strict", "--no-plan"), "ChatML")


def test_a_chat_that_fills_the_context_ends(endless: Path, utf8: Path) -> None:
    result = run("-m", utf8, "-cnv", "-c", 256, "--temp", 0, stdin=b"hello\n" + b"x" * 300 + b"\n")
    assert result.returncode == 1
    assert result.stdout.decode() == f"{UTF8_TEXT}\n"
    assert b"prompt: found" in result.stderr and b"at most 256" in result.stderr


def test_interactive_text_goes_on_after_each_line(endless: Path) -> None:
    args = ["-m", endless, "-i", "-n", 4, "--temp", 0]
    # An empty line goes on where the text stopped; any other is appended to it.
    assert text_of(*args, "-p", "", stdin=f"{CUE}\n\n{CUE}\n".encode()) == b"bcab\ncabc\nbcab"
    assert text_of(*args, "-p", CUE, stdin=b"") == CUE.encode() + b"bcab"


# --- Ctrl-C ---


def read_until(stream: int, what: bytes) -> bytes:
    """Reads a pipe until its text holds `what`."""
    text = b""
    end = time.monotonic() + TIMEOUT_S
    while what not in text and time.monotonic() < end:
        chunk = os.read(stream, 65536)
        assert chunk, text
        text += chunk
    return text


def test_ctrl_c_ends_the_text_and_prints_the_timing(endless: Path) -> None:
    with start("-m", endless, "-c", 65536, "--temp", 0) as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"abcabc")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert b"eval time" in errors and b"total time" in errors


def test_ctrl_c_ends_an_answer_and_at_the_prompt_the_chat(folder: Path) -> None:
    newline, a, b = byte_tokens(b"\nab")
    model = chain_model(folder / "chat.gguf", [newline, a, b, a])
    with start("-m", model, "-cnv", "-c", 65536, "--temp", 0) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        for _ in range(2):
            read_until(process.stderr.fileno(), b"> ")
            process.stdin.write(b"hello\n")
            process.stdin.flush()
            read_until(process.stdout.fileno(), b"abab")
            process.send_signal(signal.SIGINT)
        read_until(process.stderr.fileno(), b"> ")
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
        assert b"total time" in process.stderr.read()


def errors_on_terminal(*args: str) -> bytes:
    """stderr of a successful run, when that is a terminal."""
    terminal, end = pty.openpty()
    shown = b""
    with subprocess.Popen([program(), *args], stdout=subprocess.PIPE, stderr=end) as process:
        os.close(end)
        with contextlib.suppress(OSError):  # how a terminal says that nobody has it open any more
            while piece := os.read(terminal, 65536):
                shown += piece
    os.close(terminal)
    assert process.returncode == 0, shown
    return shown


@pytest.fixture(scope="module")
def long_load(folder: Path) -> Path:
    """A model of so many tensors, and so long a name, that its progress fills a terminal that nobody reads."""
    return tiny_models.write_tiny_model(folder / f"{'m' * 220}.gguf", n_layer=48, n_ff=64)


@pytest.mark.parametrize("plan", [True, False])
def test_ctrl_c_ends_a_load(long_load: Path, tmp_path: Path, plan: bool) -> None:
    words = ["--plan", tiny_models.write_tiny_plan(long_load, tmp_path / "plan.gguf")] if plan else ["--no-plan"]
    terminal, end = pty.openpty()
    command = [program(), "-m", str(long_load), "-p", "a", "-n", "1", "--sparsity", "dense", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end) as process:
        os.close(end)
        shown = read_until(terminal, b"loading")
        process.send_signal(signal.SIGINT)
        shown += read_until(terminal, b"interrupted while loading")
        assert process.wait(TIMEOUT_S) == 130
        assert process.stdout is not None and process.stdout.read() == b""
    os.close(terminal)
    assert b"100 %" not in shown and b"\x1b[K" in shown


def test_a_load_is_shown_on_a_terminal_or_when_verbose(planned: dict[str, Path]) -> None:
    args = ["-m", str(planned["base"]), "-p", "a", "-n", "1", "--sparsity", "exact"]
    assert b"loading" not in run(*args).stderr
    lines = [line for line in run(*args, "--verbose").stderr.splitlines() if line.startswith(b"loading base.gguf: ")]
    assert lines[0].endswith(b": 0 %") and lines[-1].endswith(b": 100 %") and len(lines) <= 11
    assert b"\rloading base.gguf: 100 %\r\x1b[K" in errors_on_terminal(*args)
    assert errors_on_terminal(*args, "--log-disable") == b""


# --- plans ---


@pytest.fixture(scope="module")
def planned(folder: Path) -> dict[str, Path]:
    """One model as base + sidecar, embedded, and without a plan beside it."""
    (folder / "planned").mkdir()
    base = tiny_models.write_tiny_model(folder / "planned" / "base.gguf", seed=3)
    options = {"activation": "relu", "order_seed": 5, "predictor": "linear", "rank": 64}
    sidecar = tiny_models.write_tiny_plan(base, **options)
    embedded = tiny_models.write_tiny_plan(base, folder / "planned" / "all.powerinfer.gguf", embedded=True, **options)
    elsewhere = Path(shutil.copy(sidecar, folder / "plan-elsewhere.gguf"))
    alone = Path(shutil.copy(base, folder / "alone.gguf"))
    return {"base": base, "embedded": embedded, "alone": alone, "plan": elsewhere}


@pytest.mark.parametrize("sparsity", ["auto", "dense", "exact", "predicted"])
def test_a_plan_computes_the_text_from_every_form_of_the_model(planned: dict[str, Path], sparsity: str) -> None:
    from powerinfer_py import Llama

    expected = greedy_bytes(planned["base"], b"Once upon", 32, Llama, sparsity=sparsity)
    assert expected != greedy_bytes(planned["alone"], b"Once upon", 32)  # relu, not the silu of the model's graph
    args = shlex.split(f"-p 'Once upon' -n 32 --temp 0 --sparsity {sparsity} --no-display-prompt --strict")
    models = [[planned["base"]], [planned["embedded"]], [planned["alone"], "--plan", planned["plan"]]]
    for model in (["-m", *words] for words in models):
        assert text_of(*model, *args) == expected.removesuffix(b"\n")
        assert text_of(*model, *args, "--mapped", "--mlock") == expected.removesuffix(b"\n")


def test_the_timing_block_has_the_densities(planned: dict[str, Path]) -> None:
    result = run("-m", planned["base"], "-p", "Once upon", "-n", 16, "--temp", 0, "--sparsity", "exact", "--ignore-eos")
    errors = result.stderr.decode()
    assert result.returncode == 0, errors
    for line in ("load time", "prompt eval time", "eval time", "total time"):
        assert f"{line} =" in errors
    assert "sparsity = exact: exact in 4 layers" in errors
    assert re.search(r"kernel set = (scalar|avx2|avx512|amx|neon), threads \d+", errors)
    found = re.search(r"density = (\S+), candidate_density (\S+), bytes_share (\S+) \(generation\)", errors)
    assert found
    density, candidates, share = map(float, found.groups())
    assert 0 < density < 0.9 and candidates == 1 and density < share < 1
    assert re.search(r"FFN read = +\d+\.\d+ MiB per token, overlap 0\.\d+", errors)
    assert "slow rows" not in errors


def test_kernel_set_from_the_environment(planned: dict[str, Path]) -> None:
    args = ["-m", planned["base"], "-p", "x", "-n", 1]
    result = run(*args, env={**os.environ, "POWERINFER_KERNELS": "scalar"})
    assert result.returncode == 0 and b"kernel set = scalar" in result.stderr
    assert_error(run(*args, env={**os.environ, "POWERINFER_KERNELS": "mmx"}), "mmx")


def test_without_a_plan_a_note_or_with_strict_an_error(planned: dict[str, Path]) -> None:
    args = ["-m", planned["alone"], "-p", "x", "-n", 1]
    for sparsity in ("auto", "exact"):
        result = run(*args, "--sparsity", sparsity)
        assert result.returncode == 0 and result.stderr.count(b"it has no plan") == 1
        assert_error(run(*args, "--sparsity", sparsity, "--strict"), "it has no plan", "powerinfer profile")
    assert b"it has no plan" not in run(*args, "--sparsity", "dense", "--strict").stderr
    stock = text_of("-m", planned["alone"], "--temp", 0, "-n", 16)
    assert text_of("-m", planned["base"], "--no-plan", "--temp", 0, "-n", 16) == stock


def test_a_plan_of_another_model_is_refused(planned: dict[str, Path], tiny: Path) -> None:
    assert_error(run("-m", tiny, "--plan", planned["plan"], "-p", "x"), "layer 0")
    assert_error(run("-m", planned["embedded"], "--plan", planned["plan"]), "extended GGUF")


def test_gpu_flags_are_answered(tiny: Path) -> None:
    if any(device["type"] in ("gpu", "igpu") for device in _core.devices()):
        pytest.skip("this llama.cpp has a GPU device")
    for flags, part in (
        ("--vram-budget 8GiB", "FFN split: none, because this llama.cpp has no GPU device"),
        ("-ngl 99", "no GPU device"),
        ("-ngl all", "no GPU device"),
    ):
        args = ["-m", tiny, "--sparsity", "dense", "-n", 1, *flags.split()]
        result = run(*args)
        assert result.returncode == 0 and result.stderr.count(part.encode()) == 1
        assert_error(run(*args, "--strict"), part)
    for flags, part in (
        ("--require-split", "no VRAM budget was given"),
        ("--vram-budget 8GiB --require-split", "no GPU device"),
        ("--vram-budget 0 --require-split", "the VRAM budget is 0"),
        ("--device CUDA7", "device: found 'CUDA7'; expected a GPU device of this llama.cpp, which has none"),
        ("--rpc 127.0.0.1:1", "127.0.0.1:1"),
    ):
        assert_error(run("-m", tiny, "--sparsity", "dense", *flags.split()), part)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_damaged_model_is_one_line(tiny: Path, folder: Path, share: float) -> None:
    content = tiny.read_bytes()
    path = folder / "damaged.gguf"
    path.write_bytes(content[: int(len(content) * share)])
    assert_error(run("-m", path, "-p", "x"), str(path))
    path.write_bytes(b"this is a text\n" * 100)
    assert_error(run("-m", path, "-p", "x"), str(path))


def test_loading_takes_what_the_log_flags_ask(tiny: Path) -> None:
    args = ["-m", tiny, "-p", "x", "-n", 2, "--temp", 0]
    assert run(*args, "--log-disable").stderr == b""
    assert b"llama_model_loader" not in run(*args).stderr
    assert b"llama_model_loader" in run(*args, "-v").stderr


def test_chain_models_are_what_the_tests_think(utf8: Path) -> None:
    assert greedy_bytes(utf8, CUE.encode(), 64) == UTF8_TEXT.encode()
    assert np.isfinite(gguf.GGUFReader(utf8).tensors[0].data).all()
