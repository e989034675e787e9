"""`powerinfer chat`: commands with a model that follows a script, the view on a small terminal, and real chats in one."""

from __future__ import annotations

import fcntl
import importlib.util
import io
import json
import os
import pty
import random
import re
import select
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from powerinfer_py import cli
from powerinfer_py.chat import (
    COMMANDS,
    Chat,
    ChatModel,
    ChatOptions,
    Speed,
    is_unfinished,
    make_prompt,
    read_message,
    read_messages,
)
from powerinfer_py.chat_view import MarkdownView, PlainView, split_blocks
from powerinfer_py.errors import FormatError, OptionError
from powerinfer_py.llama import Llama, Stats

PLAN = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct.Q4_1.powerinfer.gguf"


class ScriptedModel:
    """Answers with the number of messages it was sent; a token is a character."""

    n_ctx = 1000

    def __init__(self) -> None:
        self.sent: list[list[dict[str, str]]] = []
        self.options: list[tuple[float, int, int]] = []
        self.answer: Callable[[], Iterator[tuple[str, str | None]]] | None = None
        self.llama = SimpleNamespace(
            sparsity="auto",
            n_tokens=12,
            stats=lambda: Stats("powerinfer", density=0.25, read_bytes=2_000_000, dense_bytes=5_000_000),
            memory=lambda: SimpleNamespace(table=""),
        )

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [0] * sum(len(message["content"]) for message in messages)

    def stream(
        self, messages: Sequence[dict[str, str]], temperature: float, max_tokens: int, seed: int
    ) -> Iterator[tuple[str, str | None]]:
        self.sent.append(list(messages))
        self.options.append((temperature, max_tokens, seed))
        if self.answer is not None:
            yield from self.answer()
            return
        yield "sent ", None
        yield str(len(messages)), "stop"

    def speed(self) -> Speed:
        return Speed(n_prompt=10, n_cached=4, n_generated=2, tok_s=20.0)


class Session:
    """A chat with the scripted model, and what it showed."""

    def __init__(self, **options: Any) -> None:
        self.model = ScriptedModel()
        self.said: list[str] = []
        self.shown = io.StringIO()
        self.chat = Chat(self.model, ChatOptions(**options), lambda: PlainView(self.shown), self.said.append)

    def do(self, *lines: str) -> str:
        """Handle inputs; what the last one said."""
        for line in lines:
            self.said.clear()
            assert self.chat.handle(line)
        return "\n".join(self.said)

    @property
    def contents(self) -> list[str]:
        return [message["content"] for message in self.chat.messages]


# ---- Commands ------------------------------------------------------------------------------------------------------


def test_answers_are_remembered_and_followed_by_their_figures() -> None:
    session = Session(system="Be brief.")
    said = session.do("hello", " /etc is a folder")
    assert session.contents == ["Be brief.", "hello", "sent 2", "/etc is a folder", "sent 4"]
    assert [message["role"] for message in session.chat.messages] == ["system"] + ["user", "assistant"] * 2
    assert session.shown.getvalue() == "sent 2\nsent 4\n"
    assert said == "20.0 tokens/s, 2 tokens, density 0.250, 3 of 5 MB of FFN weights skipped"


def test_help_lists_every_command() -> None:
    said = Session().do("/help")
    assert all(f"{name} " in said for name in COMMANDS) and "Alt+Enter" in said


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("/stat", "did you mean /stats"),
        ("/xyzzy", "see /help"),
        ("/do_help", "no such command"),
        ("/sparsity exakt", "did you mean exact"),
        ("/temp warm", "expected a number of at least 0"),
        ("/temp nan", "expected a number"),
        ("/max -1", "expected a number"),
        ("/retry", "there is no message yet"),
        ("/undo", "there is no message yet"),
        ("/save", "no file was named"),
        ("/save missing/folder/x.json", "No such file"),
        ("/load missing.json", "No such file"),
    ],
)
def test_wrong_command_is_an_error_with_a_hint(line: str, text: str) -> None:
    with pytest.raises((OptionError, FormatError), match=re.escape(text)):
        Session().do(line)


def test_commands_change_the_next_answer() -> None:
    session = Session(seed=1)
    assert "exact" in session.do("/sparsity exact") and session.model.llama.sparsity == "exact"
    session.do("/temp 0.5", "/max 7", "/system Rhyme.", "hello", "/max 0", "hello")
    assert session.model.options[0][:2] == (0.5, 7)
    assert session.model.options[1][1] == 1000 - len("Rhyme.hellosent 2hello") - 8
    assert session.model.sent[0][0] == {"role": "system", "content": "Rhyme."}
    assert session.do("/system -", "/system") == "system message: none"


def test_retry_undo_and_clear() -> None:
    session = Session(seed=1, system="S")
    session.do("a", "b", "/retry")
    assert session.contents == ["S", "a", "sent 2", "b", "sent 4"]
    seeds = [seed for _, _, seed in session.model.options]
    assert len(set(seeds)) == 3
    again = Session(seed=1)
    again.do("a", "b", "/retry")
    assert [seed for _, _, seed in again.model.options] == seeds
    session.do("/undo")
    assert session.contents == ["S", "a", "sent 2"]
    session.do("/clear")
    assert session.contents == ["S"]
    assert not session.chat.handle("/exit")


def test_stats_sum_up_the_conversation() -> None:
    said = Session().do("a", "b", "/stats")
    assert "answers so far: 2, 4 tokens, 6 of 10 MB of FFN weights skipped" in said
    assert "prompt 10 tokens, 4 of them still in the context" in said and "context: 12 of 1000 tokens" in said
    assert re.search(r"this process took at most \d+ MiB", said)


def test_saved_conversation_can_be_loaded(tmp_path: Path) -> None:
    session = Session(system="S")
    session.do("gr\u00fc\u00dfe", f"/save {tmp_path / 'x.json'}")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    other = Session()
    other.do(f"/load {tmp_path / 'x.json'}", "b")
    assert other.contents == [*session.contents, "b", "sent 4"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '["a"]',
        '[{"role": "user"}]',
        '[{"role": "user", "content": "a"}]',
        '[{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]',
        '[{"role": "tool", "content": "a"}]',
    ],
)
def test_file_that_holds_no_conversation_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    session = Session()
    session.do("a")
    with pytest.raises(FormatError, match=r"x\.json: isn't"):
        session.do(f"/load {path}")
    assert session.contents == ["a", "sent 1"]
    path.write_text('[{"role": "system", "content": "S"}]')
    assert read_messages(path) == [{"role": "system", "content": "S"}]


# ---- Context -------------------------------------------------------------------------------------------------------


def test_oldest_turns_make_room_and_that_is_said_once() -> None:
    session = Session(system="S" * 100)
    notes = []
    for i in range(12):
        session.do(f"{i:02}" + "x" * 98)
        notes += [line for line in session.said if line.startswith("note:")]
    assert len(notes) == 1 and "the oldest messages are no longer sent" in notes[0]
    assert len(session.contents) == 25  # nothing is forgotten
    for messages in session.model.sent:
        assert messages[0]["role"] == "system" and messages[1]["role"] == "user"
        assert 1000 - len(session.model.prompt(messages)) >= 258
    # several at once, so that most answers find their prompt in the context
    starts = [messages[1]["content"][:2] for messages in session.model.sent]
    assert len(set(starts)) <= 3, starts
    session.do(*["/undo"] * 11)
    session.do("/retry")
    assert session.model.sent[-1][1]["content"].startswith("00")


def test_message_that_doesnt_fit_is_an_error_and_forgotten() -> None:
    session = Session(system="S" * 100)
    session.do("a")
    with pytest.raises(
        OptionError, match=r"it needs 1109 tokens with the system message and 8 to spare; expected fewer than .* 1000"
    ):
        session.do("x" * 1001)
    assert session.contents[1:] == ["a", "sent 2"]
    session.do("x" * 882)  # leaves 10 for the answer
    assert session.model.options[-1][1] == 10


def test_end_at_a_limit_is_said() -> None:
    session = Session()
    session.model.answer = lambda: iter([("abc", "length")])
    assert session.do("a").startswith("the context is full; ")
    assert session.do("/max 3", "a").startswith("ended at /max 3; ")


def test_ctrl_c_keeps_what_was_answered() -> None:
    session = Session()

    def interrupted() -> Iterator[tuple[str, str | None]]:
        yield "some", None
        os.kill(os.getpid(), signal.SIGINT)
        yield "more", None

    session.model.answer = interrupted
    before = signal.getsignal(signal.SIGINT)
    assert session.do("a").startswith("stopped; ") and session.chat.stopped
    assert session.contents == ["a", "some"]
    assert signal.getsignal(signal.SIGINT) is before


# ---- Input ---------------------------------------------------------------------------------------------------------


def test_message_of_several_lines() -> None:
    text = 'one\ntwo\\\nlines\n"""\n/not a command\\\n\nb\n"""\n"""c"""\nlast\\'
    lines = io.StringIO(text)
    expected = ["one", "two\nlines", " /not a command\\\n\nb", " c", "last\\", None]
    assert [read_message(lines) for _ in expected] == expected
    assert is_unfinished('"""') and is_unfinished('"""a\nb') and not is_unfinished('"""a"""')


def test_line_editing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as keys:
        ask = make_prompt(print, input=keys, output=DummyOutput())
        for typed, message in (
            ("hello\r", "hello"),
            ("a\x1b\rb\r", "a\nb"),  # Alt+Enter
            ("a\\\rb\r", "a\nb"),
            ('"""\ra\r\rb\r"""\r', " a\n\nb"),
            ("/sp\t ex\t\r", "/sparsity exact"),
            ("\x1b[A\r", "/sparsity exact"),
            ("typed\x03again\r", "again"),
            ("\x04", None),
            ("\x03", None),
        ):
            keys.send_text(typed)
            assert ask() == message, typed
        history = tmp_path / "powerinfer" / "chat-history"
        assert stat.S_IMODE(history.stat().st_mode) == 0o600
        again = make_prompt(print, input=keys, output=DummyOutput())
        keys.send_text("\x1b[A\r")
        assert again() == "again"


def test_history_that_cant_be_kept_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "powerinfer").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    notes: list[str] = []
    with create_pipe_input() as keys:
        ask = make_prompt(notes.append, input=keys, output=DummyOutput())
        keys.send_text("a\r")
        assert ask() == "a" and "the history ends with this chat" in notes[0]


# ---- View ----------------------------------------------------------------------------------------------------------

ANSWER = """# A title

A paragraph that is long enough to be wrapped on every terminal here, with **bold**, `code`
and a line of its own, <think>tags</think> kept.

1. one

   still one
2. two
   - nested

```python
{code}
```

| a | b |
|---|--:|
| 1 | 22 |

> quoted

The end.
""".format(code="\n".join(f"x_{i} = {i}\n" for i in range(30)))


class Screen:
    """What a terminal shows of the few codes that are used, with all that scrolled away."""

    def __init__(self, height: int) -> None:
        self.lines = [""]
        self.row = self.column = 0
        self.height = height

    def feed(self, text: str) -> None:
        for code, count, final, char in re.findall(r"(\x1b\[\??([\d;]*)([A-Za-z]))|([^\x1b])", text, re.DOTALL):
            if char == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif char == "\r":
                self.column = 0
            elif char:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + char + line[self.column + 1 :]
                self.column += 1
            elif final == "A":  # not above the first line of the screen
                self.row = max(self.row - int(count), len(self.lines) - self.height, 0)
            elif final == "K":
                self.lines[self.row] = ""
            else:
                assert final in "mhl", code

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip()


def show(pieces: Sequence[str], width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is on the terminal after an answer, each piece of which was drawn."""
    ticks = iter(range(1_000_000))
    monkeypatch.setattr("powerinfer_py.chat_view.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    monkeypatch.setenv("TERM", "xterm-256color")
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=height, legacy_windows=False)
    with MarkdownView(console) as view:
        for piece in pieces:
            view.add(piece)
    screen = Screen(height)
    screen.feed(file.getvalue())
    return screen.text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (30, 10), (8, 4)])
def test_streamed_answer_ends_as_the_whole_one(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = show([ANSWER], width, 1000, monkeypatch)
    rng = random.Random(0)
    for most in (3, 40):
        cuts = sorted({0, len(ANSWER), *(rng.randrange(len(ANSWER)) for _ in range(2 * len(ANSWER) // most))})
        pieces = [ANSWER[begin:end] for begin, end in zip(cuts, cuts[1:])]
        assert show(pieces, width, height, monkeypatch) == whole
    if width == 80:
        for text in ("x_29 = 29", "<think>tags</think> kept.", "still one", " 1  22", "The end."):
            assert text in whole
        assert "\nand a line of its own" in whole
        assert "\n\n\n" not in whole.replace("\n\n x_", "")


def test_blocks_are_the_whole_text() -> None:
    for end in range(len(ANSWER) + 1):
        blocks = split_blocks(ANSWER[:end])
        assert "".join(blocks) == ANSWER[:end]
    assert len(blocks) == 7


def test_control_codes_of_an_answer_dont_reach_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show(["a\x1b]0;title\x07b\x9b2Jc\r\nd"], 80, 24, monkeypatch) == "a]0;titleb2Jc\nd"


# ---- Real models ---------------------------------------------------------------------------------------------------


def test_second_answer_computes_only_what_is_new(smollm2: Path) -> None:
    with Llama(smollm2, plan=PLAN, n_ctx=512, verbose=False) as llama:
        model = ChatModel(llama)
        shown = io.StringIO()
        chat = Chat(model, ChatOptions(temperature=0, n_predict=12), lambda: PlainView(shown), lambda _: None)
        chat.handle("What is the capital of France?")
        first = model.speed()
        assert first.n_cached == 0 and 0 < first.n_generated <= 12
        chat.handle("And of Italy?")
        second = model.speed()
        assert second.n_cached >= first.n_prompt + first.n_generated - 1
        assert second.n_prompt - second.n_cached < 20
        assert llama.stats().n_tokens == 30 * (second.n_generated - 1)  # layers x decoded tokens


def test_long_chat_never_leaves_the_context(tiny_model: Callable[..., Path]) -> None:
    with Llama(tiny_model(), n_ctx=256, chat_format="chatml", sparsity="dense", verbose=False) as llama:
        said: list[str] = []
        chat = Chat(ChatModel(llama), ChatOptions(seed=1), lambda: PlainView(io.StringIO()), said.append)
        for i in range(3):
            chat.handle("some text " + "more " * i)
        assert len(chat.turns) == 6
        assert sum("the oldest messages are no longer sent" in text for text in said) == 1
        assert llama.n_tokens <= 256


def test_template_that_refuses_the_messages_is_an_error(smollm2: Path) -> None:
    with Llama(smollm2, plan=PLAN, n_ctx=256, verbose=False) as llama:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        template = "{{ raise_exception('no system role here') }}"
        handler = Jinja2ChatFormatter(template, eos_token="", bos_token="").to_chat_handler()
        llama._chat_handlers[llama.chat_format] = handler
        with pytest.raises(OptionError, match=r"chat template: it refuses these messages .no system role here"):
            ChatModel(llama).prompt([{"role": "user", "content": "a"}])


def test_messages_from_a_pipe(smollm2: Path) -> None:
    command = [sys.executable, "-m", "powerinfer_py.cli", "chat", smollm2, "--plan", PLAN, "-n", "6", "--temp", "0"]
    text = "/temp\nWhat is two\\\nplus two?\n/nonsense\n/stats\n"
    done = subprocess.run(
        [*map(str, command), "-p", "hello"], input=text, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1  # for /nonsense
    assert len(done.stdout.splitlines()) == 2 and "\x1b" not in done.stdout + done.stderr
    for line in (
        "ended at /max 6; ",
        "temperature 0",
        "powerinfer: /nonsense: no such command",
        r"answers so far: 2, \d+ tokens",
    ):
        assert re.search(line, done.stderr), done.stderr


def test_model_without_a_template_is_noted(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    model = str(tiny_model())
    assert cli.main(["chat", model, "--sparsity", "dense"]) == 0
    assert "it has no chat template; expected one; the format llama-2 is used" in capsys.readouterr().err
    assert cli.main(["chat", model, "--sparsity", "dense", "--chat-format", "chatml", "--strict"]) == 0
    assert "template" not in capsys.readouterr().err
    assert cli.main(["chat", model, "--sparsity", "dense", "--strict"]) == 1
    assert cli.main(["chat", model, "--chat-format", "chatlm"]) == 1
    assert "--strict refuses that" in capsys.readouterr().err


def test_terminal_without_prompt_toolkit_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert cli.main(["chat", "model.gguf"]) == 1
    assert "pip install 'powerinfer_py[chat]'" in capsys.readouterr().err


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, *command: object, **environment: str) -> None:
        self._fd, other = pty.openpty()
        self.resize(24, 80)
        self.raw = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "powerinfer_py.cli", *map(str, command)],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
        )
        os.close(other)

    def resize(self, height: int, width: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def send(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, pattern: str, seconds: float = 30) -> str:
        """What was written since the last call, up to something; without codes."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\x1b[=>]|\r", "", self.raw)
            if found := re.search(pattern, text):
                self.raw = text[found.end() :]
                return text[: found.end()]
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    self.raw += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    break
        raise AssertionError(f"{pattern!r} isn't in {self.raw!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


def test_chat_in_a_terminal(smollm2: Path, tmp_path: Path) -> None:
    saved = tmp_path / "x.json"
    terminal = Terminal("chat", smollm2, "--plan", PLAN, "--temp", 0, XDG_STATE_HOME=str(tmp_path))
    try:
        terminal.wait_for(r"/help[^>]*>")
        terminal.send("/max 20\r")
        terminal.wait_for(r"at most 20 tokens[^>]*>")
        terminal.send("What is the capital of France?\r")
        terminal.wait_for(
            r"France\?\n[^>]*\w[^>]*\nended at /max 20; \d+\.\d tokens/s, 20 tokens, density 0\.\d+[^>]*>"
        )
        terminal.send("/max 0\r")
        terminal.wait_for(r"as the context has room for[^>]*>")
        terminal.send("Count from one to one thousand in words.\r")
        terminal.wait_for(r"words\.\n[^>]*\w+ \w+")
        terminal.resize(12, 30)
        terminal.wait_for(r"\w+ \w+[\s\S]*\w+ \w+")
        terminal.send("\x03")
        terminal.wait_for(r"stopped; [^>]*>")
        terminal.resize(24, 80)
        terminal.send("/sparsity exact\r")
        terminal.wait_for(r"sparsity exact: layers exact x 30[^>]*>")
        terminal.send("/stats\r")
        terminal.wait_for(
            r"this process took[\s\S]*layers exact x 30; rows[\s\S]*so far: 2, [\s\S]*of 4096 tokens[^>]*>"
        )
        terminal.send("/max 4\r")
        terminal.wait_for(r"at most 4 tokens[^>]*>")
        terminal.send("Say\x1b\r")
        terminal.send("hello.\r")
        terminal.wait_for(r"tokens/s, \d+ tokens, density 1\.000[^>]*>")
        terminal.send(f"/save {saved}\r")
        terminal.wait_for(r"6 messages[^>]*>")
        terminal.send("\x1b[A")
        terminal.wait_for("/save ")
        terminal.send("\x15\x04")  # Ctrl-U
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
    contents = [message["content"] for message in json.loads(saved.read_text())]
    assert contents[0] == "What is the capital of France?" and contents[4] == "Say\nhello."
    assert "What is the capital of France?" in (tmp_path / "powerinfer" / "chat-history").read_text()


def test_ctrl_c_at_an_empty_prompt_leaves(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    terminal = Terminal("chat", tiny_model(), "--sparsity", "dense", XDG_STATE_HOME=str(tmp_path))
    try:
        terminal.wait_for(r"/help[^>]*>")
        terminal.send("\x03")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
