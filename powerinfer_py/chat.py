"""`powerinfer chat`: a conversation in the terminal, or one message per line from a pipe.

Turns that the context has no room for aren't sent any more, the oldest first; they stay in what /save writes.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
from rich.console import Console
from rich.markup import escape

from powerinfer_py import bench, hub
from powerinfer_py.chat_view import MarkdownView, PlainView
from powerinfer_py.errors import FormatError, OptionError, PowerInferError
from powerinfer_py.format import atomic_path
from powerinfer_py.llama import SPARSITY_MODES, Llama, Stats

Message = dict[str, str]  # role: system, user or assistant; content

BLOCK = '"""'
# Past its limit, llama_cpp goes on until a character is complete.
_SPARE_TOKENS = 8
_ROLES = ("system", "user", "assistant")

COMMANDS = {
    "/help": "this list",
    "/stats": "speed, density, bytes skipped and memory",
    "/sparsity": "[MODE]  show or set: " + ", ".join(SPARSITY_MODES),
    "/system": "[TEXT]  show or set the system message; - takes it away",
    "/retry": "another answer to the last message",
    "/undo": "forget the last message and its answer",
    "/clear": "forget all messages",
    "/save": "FILE  write the messages as JSON",
    "/load": "FILE  go on with messages that /save wrote",
    "/temp": "[X]  show or set the temperature",
    "/max": "[N]  show or set the most tokens of an answer; 0: as the context has room",
    "/exit": "leave; as Ctrl-D",
}
HELP = (
    "Alt+Enter or a backslash at the end goes on in the next line; so does everything between lines of "
    f"{BLOCK}. Ctrl-C stops an answer. A message that begins with / needs a space before it."
)


@dataclass(frozen=True)
class ChatOptions:
    """Options of a conversation, with their defaults."""

    n_predict: int = 0  # most tokens of an answer; 0: as the context has room
    n_ctx: int = 4096
    temperature: float = 0.8
    seed: int | None = None
    system: str = ""
    chat_format: str | None = None  # one of llama_cpp's; None: the model's own template


@dataclass(frozen=True)
class Speed:
    """What one answer took."""

    n_prompt: int  # tokens
    n_cached: int  # of them, not computed again
    n_generated: int
    tok_s: float | None  # while generating


class ChatModel:
    """What a conversation needs of a model.

    Args:
        llama: the model; it isn't closed.
    """

    def __init__(self, llama: Llama) -> None:
        self.llama = llama
        self._n_prompt = self._n_cached = self._n_last = 0

    @property
    def n_ctx(self) -> int:
        """Tokens of the context."""
        return self.llama.n_ctx()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens that messages become.

        Args:
            messages: of a conversation.

        Raises:
            OptionError: the model's template refuses them.
        """
        from jinja2 import TemplateError

        llama, handlers = self.llama, importlib.import_module("llama_cpp.llama_chat_format")
        handler = llama._chat_handlers.get(llama.chat_format) or handlers.get_chat_completion_handler(llama.chat_format)
        probe = _Probe(llama)
        try:
            with contextlib.suppress(_PromptReady):
                handler(llama=probe, messages=list(messages))
        except (TemplateError, ValueError) as error:
            raise OptionError(
                f"chat template: it refuses these messages ({error}); expected ones that it knows; /undo, or /system -."
            ) from error
        return probe.tokens

    def stream(
        self, messages: Sequence[Message], temperature: float, max_tokens: int, seed: int
    ) -> Iterator[tuple[str, str | None]]:
        """Generate an answer.

        Args:
            messages: that fit the context.
            temperature: of the sampler.
            max_tokens: of the answer.
            seed: of the sampler.

        Yields:
            (piece of text, why it is the last one: stop or length, else None).
        """
        llama = self.llama
        tokens = self.prompt(messages)
        self._n_prompt, self._n_cached = len(tokens), _n_common(llama._input_ids, tokens)
        self._n_last = 0
        llama_cpp.llama_perf_context_reset(llama.ctx)
        options = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        chunks = llama.create_chat_completion(list(messages), stream=True, **options)
        is_prompt_done = False
        try:
            with contextlib.closing(chunks):
                for chunk in chunks:
                    choice = chunk["choices"][0]
                    piece = choice["delta"].get("content") or ""
                    if piece and not is_prompt_done:
                        llama.reset_stats()  # figures of decoding alone
                        is_prompt_done = True
                    # At a limit the last token isn't computed any more.
                    self._n_last = int(choice["finish_reason"] == "length")
                    yield piece, choice["finish_reason"]
        except RuntimeError:
            # A character longer than the spare tokens: the context has no slot left.
            if llama.n_tokens < self.n_ctx:
                raise
            yield "", "length"

    def speed(self) -> Speed:
        """What the last answer took, also when it was stopped."""
        times = llama_cpp.llama_perf_context(self.llama.ctx)
        n_generated = max(self.llama.n_tokens - self._n_prompt + self._n_last, 0)
        tok_s = times.n_eval * 1000 / times.t_eval_ms if times.t_eval_ms and n_generated else None
        return Speed(self._n_prompt, self._n_cached, n_generated, tok_s)


class _PromptReady(Exception):
    """Ends a chat handler when it has made the prompt."""


class _Probe:
    """Stands in for the model when a chat handler shall only make the prompt."""

    verbose = False

    def __init__(self, llama: Llama) -> None:
        self._llama = llama
        self.tokens: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llama, name)

    def create_completion(self, prompt: list[int], **_: Any) -> None:
        self.tokens = prompt
        raise _PromptReady


def _n_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n = 0
    for a, b in zip(left, right):
        if a != b:
            break
        n += 1
    return n


class Chat:
    """A conversation and its commands.

    Args:
        model: that answers.
        options: at its start; commands change some of them.
        show: makes what shows one answer: a context manager with add(piece).
        say: shows a line about the conversation.
    """

    def __init__(
        self,
        model: ChatModel,
        options: ChatOptions,
        show: Callable[[], MarkdownView | PlainView],
        say: Callable[[str], None],
    ) -> None:
        self.system = options.system
        self.turns: list[Message] = []
        self.temperature = options.temperature
        self.n_predict = options.n_predict
        self._model = model
        self._show = show
        self._say = say
        self.stopped = False  # the last answer, by Ctrl-C
        self._seeds = random.Random(options.seed)
        self._n_dropped = 0  # turns from the start that aren't sent any more
        self._totals = {"answers": 0, "tokens": 0, "read": 0, "dense": 0}
        self._last: Speed | None = None

    @property
    def messages(self) -> list[Message]:
        """The whole conversation."""
        return [*_system(self.system), *self.turns]

    def handle(self, line: str) -> bool:
        """Do what one input says: a command, or a message to answer.

        Args:
            line: as `read_message` or the prompt returned it.

        Returns:
            False when it says to leave.

        Raises:
            PowerInferError: the command or the message can't be used; the conversation is as before.
        """
        if not line.strip():
            return True
        if not line.startswith("/"):
            self.ask(line.strip())
            return True
        name, _, rest = line.strip().partition(" ")
        if name == "/exit":
            return False
        command = getattr(self, f"_do_{name[1:]}", None) if name in COMMANDS else None
        if command is None:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            raise OptionError(
                f"{name}: no such command; expected one of {', '.join(COMMANDS)}; "
                + (f"did you mean {near[0]}?" if near else "see /help.")
            )
        command(rest.strip())
        return True

    def ask(self, text: str) -> None:
        """Answer a message.

        Args:
            text: the message.

        Raises:
            PowerInferError: it doesn't fit the context, or the template refuses it; it isn't part of the conversation then.
        """
        self.turns.append({"role": "user", "content": text})
        n_dropped = self._n_dropped
        try:
            self._answer()
        except PowerInferError:
            self.turns.pop()
            self._n_dropped = n_dropped
            raise

    def _answer(self) -> None:
        """Generate the answer to the last turn, a user's, and append it."""
        messages, room = self._fit()
        max_tokens = min(self.n_predict or room, room)
        answer, reason = [], None
        with _Interrupts() as interrupts, self._show() as view:
            pieces = self._model.stream(messages, self.temperature, max_tokens, self._seeds.randrange(2**32))
            with contextlib.closing(pieces):
                for piece, reason in interrupts.watch(pieces):  # noqa: B007 (the last reason is used)
                    answer.append(piece)
                    view.add(piece)
        self.turns.append({"role": "assistant", "content": "".join(answer)})
        self.stopped = interrupts.stopped
        self._last = self._model.speed()
        stats = self._model.llama.stats()
        for name, n in (
            ("answers", 1),
            ("tokens", self._last.n_generated),
            ("read", stats.read_bytes),
            ("dense", stats.dense_bytes),
        ):
            self._totals[name] += n
        if self.stopped:
            end = "stopped; "
        elif reason != "length":
            end = ""
        else:
            end = "the context is full; " if max_tokens == room else f"ended at /max {self.n_predict}; "
        self._say(end + _figures(self._last, stats))

    def _fit(self) -> tuple[list[Message], int]:
        """The messages to send, and the tokens that are left for an answer; drops the oldest turns when it has to.

        Raises:
            OptionError: the last message alone is too long.
        """
        n_ctx = self._model.n_ctx
        wanted = min(self.n_predict or n_ctx, n_ctx // 4)
        dropped = self._n_dropped
        while True:
            messages = [*_system(self.system), *self.turns[dropped:]]
            room = n_ctx - len(self._model.prompt(messages)) - _SPARE_TOKENS
            if room >= wanted:
                break
            if dropped + 2 >= len(self.turns):
                if room > 0:
                    break
                raise OptionError(
                    f"message: it needs {n_ctx - room} tokens with the system message and {_SPARE_TOKENS} to spare; expected "
                    f"fewer than the context's {n_ctx}; shorten it, or start with a larger -c."
                )
            # Half of the context at once: every drop makes the model read the rest again.
            wanted = n_ctx // 2
            dropped += 2
        if dropped > self._n_dropped == 0:
            self._say(f"note: the context of {n_ctx} tokens is full: the oldest messages are no longer sent")
        self._n_dropped = dropped
        return messages, room

    def _forget(self, n: int) -> None:
        """Take the last n turns away."""
        del self.turns[len(self.turns) - n :]
        self._n_dropped = min(self._n_dropped, max(len(self.turns) - 1, 0) // 2 * 2)

    def _need_turns(self, name: str) -> None:
        if not self.turns:
            raise OptionError(f"{name}: there is no message yet; expected one; write one first.")

    # ---- Commands: _do_NAME(what stands behind the name) -----------------------------------------------------------

    def _do_help(self, _: str) -> None:
        for name, text in COMMANDS.items():
            self._say(f"{name:<10}{text}")
        self._say(HELP)

    def _do_stats(self, _: str) -> None:
        llama, last, totals = self._model.llama, self._last, self._totals
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._say(f"sparsity {llama.sparsity}; this process took at most {peak_bytes / 2**20:.0f} MiB")
        if last is not None:
            speed = f"{last.tok_s:.1f} tokens/s" if last.tok_s else "too short for a speed"
            self._say(
                f"last answer: {speed}, {last.n_generated} tokens; prompt {last.n_prompt} tokens, {last.n_cached} of them "
                "still in the context"
            )
        self._say(str(llama.stats()))
        if last is not None:
            skipped = f", {_skipped(totals['read'], totals['dense'])}" if totals["dense"] else ""
            self._say(f"answers so far: {totals['answers']}, {totals['tokens']} tokens{skipped}")
            self._say(f"context: {llama.n_tokens} of {self._model.n_ctx} tokens")
        if table := llama.memory().table:
            self._say(table.rstrip())

    def _do_sparsity(self, mode: str) -> None:
        llama = self._model.llama
        if mode:
            if mode not in SPARSITY_MODES:
                near = difflib.get_close_matches(mode, SPARSITY_MODES, n=1)
                raise OptionError(
                    f"/sparsity: {mode}; expected one of {', '.join(SPARSITY_MODES)}; "
                    + (f"did you mean {near[0]}?" if near else "choose one.")
                )
            llama.sparsity = mode
        runs = ", ".join(f"{name} x {n}" for name, n in llama.stats().modes)
        self._say(f"sparsity {llama.sparsity}" + (f": layers {runs}" if runs else ""))

    def _do_system(self, text: str) -> None:
        if text:
            self.system = "" if text == "-" else text
        self._say(f"system message: {self.system or 'none'}")

    def _do_retry(self, _: str) -> None:
        self._need_turns("/retry")
        answer = self.turns.pop()
        try:
            self._answer()
        except PowerInferError:
            self.turns.append(answer)
            raise

    def _do_undo(self, _: str) -> None:
        self._need_turns("/undo")
        self._forget(2)
        self._say(f"forgotten; {len(self.turns) // 2} messages are left")

    def _do_clear(self, _: str) -> None:
        self._forget(len(self.turns))
        self._say("forgotten")

    def _do_save(self, name: str) -> None:
        path = _path("/save", name)
        try:
            with atomic_path(path) as temporary:
                temporary.write_text(json.dumps(self.messages, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise OptionError(
                f"/save: {path} can't be written ({error.strerror}); expected a file in a folder of yours; name another."
            ) from error
        self._say(f"{len(self.messages)} messages: {path}")

    def _do_load(self, name: str) -> None:
        path = _path("/load", name)
        messages = read_messages(path)
        system = messages[:1] if messages and messages[0]["role"] == "system" else []
        self.system = system[0]["content"] if system else ""
        self.turns = messages[len(system) :]
        self._n_dropped = 0
        self._say(f"{len(messages)} messages from {path}")

    def _do_temp(self, text: str) -> None:
        if text:
            self.temperature = _number("/temp", text, float, 0.0)
        self._say(f"temperature {self.temperature:g}")

    def _do_max(self, text: str) -> None:
        if text:
            self.n_predict = _number("/max", text, int, 0)
        self._say(
            f"at most {self.n_predict} tokens" if self.n_predict else "as many tokens as the context has room for"
        )


class _Interrupts:
    """Ctrl-C while an answer is generated: stops it between two pieces, or while the model computes the next one."""

    def __init__(self) -> None:
        self.stopped = False
        self._is_computing = False
        self._before: Any = None

    def __enter__(self) -> _Interrupts:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, *_: object) -> None:
        self.stopped = True
        if self._is_computing:
            self._is_computing = False
            raise KeyboardInterrupt

    def watch(self, pieces: Iterator[Any]) -> Iterator[Any]:
        """The pieces, until Ctrl-C."""
        while not self.stopped:
            try:
                self._is_computing = True
                piece = next(pieces, None)
                self._is_computing = False
            except KeyboardInterrupt:
                return
            if piece is None:
                return
            yield piece


def _system(text: str) -> list[Message]:
    return [{"role": "system", "content": text}] if text else []


def _figures(speed: Speed, stats: Stats) -> str:
    parts = [f"{speed.tok_s:.1f} tokens/s"] if speed.tok_s else []
    parts.append(f"{speed.n_generated} tokens")
    if stats.density is not None:
        parts += [f"density {stats.density:.3f}", _skipped(stats.read_bytes, stats.dense_bytes)]
    return ", ".join(parts)


def _skipped(read_bytes: int, dense_bytes: int) -> str:
    return f"{(dense_bytes - read_bytes) / 1e6:.0f} of {dense_bytes / 1e6:.0f} MB of FFN weights skipped"


def _path(command: str, name: str) -> Path:
    if not name:
        raise OptionError(f"{command}: no file was named; expected one; write {command} FILE.")
    return Path(name).expanduser()


def _number(command: str, text: str, kind: Callable[[str], Any], least: float) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value < float("inf"):
        raise OptionError(f"{command}: {text}; expected a number of at least {least:g}; write {command} NUMBER.")
    return value


def read_messages(path: Path) -> list[Message]:
    """A conversation that /save wrote.

    Args:
        path: JSON, a list of {"role": ..., "content": ...}.

    Returns:
        The messages: perhaps one of the system, then users and assistants in turn.

    Raises:
        FormatError: it can't be read, or holds something else.
    """
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}; expected what /save wrote; check the path.") from error
    except ValueError as error:
        raise FormatError(f"{path}: isn't JSON ({error}); expected what /save wrote; name another file.") from error
    roles = []
    for message in messages if isinstance(messages, list) else [None]:
        is_message = isinstance(message, dict) and isinstance(message.get("content"), str)
        roles.append(message.get("role") if is_message else None)
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if turns != [_ROLES[1 + i % 2] for i in range(len(turns) // 2 * 2)]:
        raise FormatError(
            f"{path}: isn't a conversation; expected a list of messages of role {' or '.join(_ROLES)} with a content, users and "
            "assistants in turn; name another file."
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


# ---- Input ---------------------------------------------------------------------------------------------------------


def is_unfinished(text: str) -> bool:
    """Whether Enter goes on in the next line: behind a backslash, or inside of a block.

    Args:
        text: typed so far.
    """
    return text.endswith("\\") or (text.lstrip().startswith(BLOCK) and not _ends_block(text))


def _ends_block(text: str) -> bool:
    inner = text.strip()[len(BLOCK) :]
    return inner.endswith(BLOCK)


def whole_message(text: str) -> str:
    """What was meant by text with continued lines or in a block.

    Args:
        text: as typed.

    Returns:
        Without the marks of either.
    """
    stripped = text.strip()
    if stripped.startswith(BLOCK):
        # A space: what stands in a block is never a command.
        return " " + stripped[len(BLOCK) :].removesuffix(BLOCK).strip("\n")
    return text.replace("\\\n", "\n")


def read_message(lines: Iterator[str]) -> str | None:
    """The next message from a file or a pipe.

    Args:
        lines: of it.

    Returns:
        One line, or several that are continued or in a block; None at the end.
    """
    text = None
    for line in lines:
        text = line.rstrip("\r\n") if text is None else f"{text}\n{line.rstrip(chr(10))}"
        if not is_unfinished(text):
            break
    return None if text is None else whole_message(text)


def _history(say: Callable[[str], None]) -> Any:
    """Messages of earlier chats, in a file that only its owner can read."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "powerinfer" / "chat-history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError as error:
        say(f"note: {path} can't be written ({error.strerror}): the history ends with this chat")
        return InMemoryHistory()
    return FileHistory(str(path))


def make_prompt(say: Callable[[str], None], **streams: Any) -> Callable[[], str | None]:
    """Line editing on a terminal.

    Args:
        say: shows a note.
        **streams: input and output of prompt_toolkit's, in tests.

    Returns:
        What asks for one message: it gives its text, or None for Ctrl-D, and for Ctrl-C where nothing was typed.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.shortcuts import CompleteStyle

    class Commands(Completer):
        def get_completions(self, document: Any, _: Any) -> Iterator[Completion]:
            command, space, mode = document.text_before_cursor.partition(" ")
            typed, known = (mode, SPARSITY_MODES) if command == "/sparsity" and space else (command + space, COMMANDS)
            for word in known if command.startswith("/") else ():
                if word.startswith(typed):
                    yield Completion(word, -len(typed))

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: Any) -> None:
        if is_unfinished(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,
        prompt_continuation="  ",
        history=_history(say),
        key_bindings=keys,
        completer=Commands(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        **streams,
    )

    def ask() -> str | None:
        while True:
            try:
                return whole_message(session.prompt())
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not session.default_buffer.text:
                    return None

    return ask


@contextlib.contextmanager
def _no_echo() -> Iterator[None]:
    """What is typed while an answer is shown appears at the next prompt, not within the answer."""
    import termios

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    quiet = list(before)
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


# ---- Command line --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer chat`."""
    o = ChatOptions
    parser.description = (
        f"A conversation in the terminal. {HELP} /help lists the commands. Without a terminal every line of stdin is a message "
        "or a command, with the same means to write several lines; answers go to stdout as they are, all else to stderr."
    )
    parser.add_argument("model", nargs="?", help="a GGUF (its sidecar is found beside it), or an extended GGUF")
    hub.add_hub_arguments(parser)
    bench.add_load_arguments(parser)
    parser.add_argument("-t", "--threads", type=int, help="threads, for prompts too (default: physical cores allowed)")
    parser.add_argument("-p", "--prompt", help="the first message")
    parser.add_argument("--system", default=o.system, help="the system message")
    parser.add_argument("--sparsity", default="auto", help="auto, dense, exact, threshold or predicted (default: auto)")
    parser.add_argument(
        "-n",
        "--n-predict",
        type=int,
        default=o.n_predict,
        help="most tokens of an answer; 0: as the context has room (default: %(default)s)",
    )
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        default=o.n_ctx,
        help="context, at most what the model was trained with (default: %(default)s)",
    )
    parser.add_argument("--temp", type=float, default=o.temperature, help="temperature (default: %(default)s)")
    parser.add_argument("-s", "--seed", type=int, help="seed of the sampler")
    parser.add_argument(
        "--chat-format",
        metavar="NAME",
        help="one of llama_cpp's formats, such as chatml (default: the model's template)",
    )


def _options(args: argparse.Namespace) -> ChatOptions:
    """The options of a command line, checked."""
    for name, value, least in (
        ("n-predict", args.n_predict, 0),
        ("ctx-size", args.ctx_size, 16),
        ("temp", args.temp, 0),
    ):
        if value < least:
            raise OptionError(f"{name}: {value}; expected {least} or more; pass a larger one.")
    if args.chat_format is not None:
        from llama_cpp.llama_chat_format import LlamaChatCompletionHandlerRegistry

        known = sorted(LlamaChatCompletionHandlerRegistry()._chat_handlers)
        if args.chat_format not in known:
            near = difflib.get_close_matches(args.chat_format, known, n=1)
            raise OptionError(
                f"chat-format: {args.chat_format}; expected one of {', '.join(known)}; "
                + (f"did you mean {near[0]}?" if near else "pass one of them.")
            )
    return ChatOptions(args.n_predict, args.ctx_size, args.temp, args.seed, args.system, args.chat_format)


def run(args: argparse.Namespace) -> int:
    """`powerinfer chat`.

    Args:
        args: the parsed command line.

    Returns:
        The exit code; 1 when a line from a pipe couldn't be used.
    """
    options = _options(args)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        importlib.import_module("powerinfer_py.tools.arguments").need_packages("chat", "chat", "prompt_toolkit")
    model = hub.resolve_model(args)
    with Llama(model, verbose=False, chat_format=options.chat_format, **bench.load_options(args, model)) as llama:
        if options.chat_format is None and "tokenizer.chat_template" not in llama.metadata:
            text = f"{model}: it has no chat template; expected one; the format {llama.chat_format} is used, see --chat-format"
            if args.strict:
                raise FormatError(f"{text}; --strict refuses that.")
            print(f"powerinfer: note: {text}.", file=sys.stderr)
        return _converse(llama, options, args.prompt, is_terminal)


def _converse(llama: Llama, options: ChatOptions, first: str | None, is_terminal: bool) -> int:
    console = Console(highlight=False, soft_wrap=not is_terminal, stderr=not is_terminal)
    is_rendered = is_terminal and not console.is_dumb_terminal

    def say(text: str) -> None:
        console.print(escape(text), style="dim")

    chat = Chat(ChatModel(llama), options, (lambda: MarkdownView(console)) if is_rendered else PlainView, say)
    if is_terminal:
        ask = make_prompt(say)
        say(f"{os.path.basename(llama.model_path)}, sparsity {llama.sparsity}, {llama.n_ctx()} tokens; /help")
    else:
        sys.stdin.reconfigure(errors="replace")

        def ask() -> str | None:
            return read_message(sys.stdin)

    code = 0
    if first is not None and is_terminal:
        console.print(f"> {escape(first)}")
    text = ask() if first is None else f" {first}"
    while text is not None:
        try:
            with _no_echo() if is_terminal else contextlib.nullcontext():
                if not chat.handle(text):
                    break
        except PowerInferError as error:
            console.print(f"powerinfer: {escape(str(error))}", style="red")
            code = 0 if is_terminal else 1
        if is_terminal:
            console.print()
        elif chat.stopped:
            raise KeyboardInterrupt
        text = ask()
    return code
