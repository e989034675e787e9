"""`ServedModel`: what llama_cpp's chat handlers take for a `llama_cpp.Llama`, on the engine's running batch.

Answers are upstream's dicts. Of a request, nothing is ignored: what upstream's handlers drop is put back or refused here.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import jinja2
import llama_cpp
from llama_cpp import llama_chat_format
from llama_cpp.llama_grammar import JSON_GBNF, LlamaGrammar

from powerinfer_py.errors import CancelledError, OptionError, PowerInferError, RequestTimeoutError
from powerinfer_py.serving.requests import Piece, Request, Sampling, TokenLogprob

if TYPE_CHECKING:
    from powerinfer_py.serving.engine import Embedding, Engine, Generation

Running = TypeVar("Running", "Generation", "Embedding")

_logger = logging.getLogger("powerinfer_py")

# llama.cpp's parser of grammars recurses at each parenthesis: 5000 fit into a thread's 8 MiB of stack, 30000 don't.
MAX_GRAMMAR_DEPTH = 2000
# Of a logarithm in an answer, as OpenAI's: JSON has no infinity.
LEAST_LOGPROB = -9999.0
# Of the chat formats that aren't a template from the model, those that know tools.
_FUNCTION_FORMATS = ("chatml-function-calling", "functionary")
# These need a Hugging Face tokenizer beside the model.
_TOKENIZER_FORMATS = ("functionary-v1", "functionary-v2")


@dataclass(frozen=True)
class Timing:
    """How long a generation took."""

    first_s: float  # from submission to the first piece
    per_token_s: float | None  # mean of the others; None: there was one token


@dataclass(frozen=True)
class Usage:
    """Tokens of one generation, or of those that one answer took."""

    n_prompt: int = 0
    n_cached: int = 0  # of the prompt, taken from an earlier one
    n_generated: int = 0

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's names."""
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_generated,
            "total_tokens": self.n_prompt + self.n_generated,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
        }


class Call:
    """One HTTP request as the engine sees it: one client's generations, which end together.

    Args:
        engine: where they run.
        client: whose they are, for the fair queue.
    """

    def __init__(self, engine: Engine, client: str = "") -> None:
        self.id = f"cmpl-{uuid.uuid4()}"
        self.created = int(time.time())
        self.timings: list[Timing] = []
        self._engine = engine
        self._client = client
        self._running: list[Generation | Embedding] = []
        self._is_cancelled = False
        self._lock = threading.Lock()

    @property
    def client(self) -> str:
        """Whose request it is."""
        return self._client

    def submit(self, request: Request) -> Generation:
        """Put a request into the engine's queue.

        Raises:
            CancelledError: the call was cancelled before.
            QueueFullError, OptionError: as Engine.submit.
        """
        return self._start(lambda: self._engine.submit(request))

    def submit_embedding(self, prompt: Sequence[int]) -> Embedding:
        """Put a text whose embedding is wanted into the engine's queue.

        Raises:
            As submit.
        """
        return self._start(lambda: self._engine.submit_embedding(prompt, self._client))

    def _start(self, start: Callable[[], Running]) -> Running:
        with self._lock:
            if self._is_cancelled:
                raise CancelledError("request: it was cancelled before it began; send it again.")
            running = start()
            self._running.append(running)
            return running

    def read_pieces(self, generation: Generation) -> Iterator[Piece]:
        """The pieces of a generation, timed.

        Raises:
            RequestTimeoutError: time was up.
            CancelledError: the call was cancelled.
            PowerInferError: the engine failed.
        """
        start_s = first_s = time.monotonic()
        for i, piece in enumerate(generation):
            if i == 0:
                first_s = time.monotonic()
            if piece.finish_reason == "timeout":
                raise RequestTimeoutError(
                    f"request: time was up after {generation.n_generated} tokens; expected an end before; ask for fewer "
                    "tokens, or start the server with a longer --timeout."
                )
            if piece.finish_reason == "cancelled":
                raise CancelledError("request: it was cancelled; send it again.")
            yield piece
        n_later = generation.n_generated - 1
        per_token_s = (time.monotonic() - first_s) / n_later if n_later > 0 else None
        self.timings.append(Timing(first_s - start_s, per_token_s))

    def cancel(self) -> None:
        """End all generations, and let none begin. From any thread, also twice."""
        with self._lock:
            self._is_cancelled = True
            for running in self._running:
                running.cancel()


class ServedModel:
    """A model whose completions run in an engine's batch; the part of `llama_cpp.Llama` that its chat handlers use.

    Args:
        engine: where completions run; its model is open as long as this is used.
    """

    verbose = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._llama = engine.llama
        self.metadata: Mapping[str, str] = self._llama.metadata
        self.tokenizer_ = self._llama.tokenizer_
        self.chat_format = self._llama.chat_format
        handler = self._llama.chat_handler or self._llama._chat_handlers.get(self.chat_format)
        self._template = (
            self.metadata.get(f"tokenizer.{self.chat_format}".removesuffix(".default")) if handler else None
        )
        self._chat_handler = handler or llama_chat_format.get_chat_completion_handler(self.chat_format)
        if self._template is None and self.chat_format == "llama-2":
            _logger.warning(
                "%s: no chat template in it; chats are written in Llama 2's format; if that is not the model's, name one "
                "with --chat-format.",
                self._llama.model_path,
            )

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """As `llama_cpp.Llama.tokenize`."""
        return self._llama.tokenize(text, add_bos, special)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """As `llama_cpp.Llama.detokenize`."""
        return self._llama.detokenize(tokens, prev_tokens, special)

    def token_eos(self) -> int:
        """The token that ends a text; -1: none."""
        return self._llama.token_eos()

    def token_bos(self) -> int:
        """The token that begins a text; -1: none."""
        return self._llama.token_bos()

    def token_nl(self) -> int:
        """The token of a line break."""
        return self._llama.token_nl()

    def n_vocab(self) -> int:
        """Number of tokens that exist."""
        return self._llama.n_vocab()

    def n_ctx(self) -> int:
        """Tokens that one request may have."""
        return self._engine.n_ctx

    def prompt_tokens(self, prompt: str | Sequence[int], suffix: str | None = None) -> list[int]:
        """The tokens of a prompt, as `llama_cpp.Llama.create_completion` makes them.

        Args:
            prompt: text, or tokens, which are taken as they are.
            suffix: what comes after the text asked for.

        Raises:
            OptionError: it is empty without a BOS token, a token that doesn't exist, or a suffix that the model knows
                nothing of.
        """
        if suffix is not None:
            return self._infill_tokens(prompt, suffix)
        if isinstance(prompt, str):
            tokens = self.tokenize(prompt.encode("utf-8"), special=True)
        else:
            tokens = list(prompt)
            n_vocab = self.n_vocab()
            for token in tokens:
                if not 0 <= token < n_vocab:
                    raise OptionError(
                        f"prompt: token {token}; expected 0 to {n_vocab - 1}; send the model's own tokens."
                    )
        if tokens:
            return tokens
        if self.token_bos() == -1:
            raise OptionError("prompt: it is empty, and the model has no BOS token; expected text; send some.")
        return [self.token_bos()]

    def _infill_tokens(self, prompt: str | Sequence[int], suffix: str) -> list[int]:
        # Upstream's own way is switched off in 0.3.36: it takes token 0 for all three.
        vocab = self._llama._model.vocab
        marks = [
            get(vocab)
            for get in (llama_cpp.llama_vocab_fim_pre, llama_cpp.llama_vocab_fim_suf, llama_cpp.llama_vocab_fim_mid)
        ]
        if -1 in marks:
            raise OptionError("suffix: this model has no tokens for it; expected one made to fill in; leave it out.")
        if not isinstance(prompt, str):
            raise OptionError("suffix: the prompt is tokens; expected text; send text, or leave the suffix out.")
        before = self.tokenize(prompt.encode("utf-8"), add_bos=False)
        after = self.tokenize(suffix.encode("utf-8"), add_bos=False)
        bos = [self.token_bos()] if self._llama._model.add_bos_token() else []
        return [*bos, marks[0], *before, marks[1], *after, marks[2]]

    def create_completion(
        self,
        prompt: str | list[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: Any = None,
        logits_processor: Any = None,
        grammar: LlamaGrammar | str | None = None,
        logit_bias: Mapping[int, float] | None = None,
        *,
        call: Call | None = None,
    ) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """As `llama_cpp.Llama.create_completion`, in the engine's batch.

        Args:
            stopping_criteria: what upstream's handlers pass: the last token is EOS, which ends every generation here.
            call: the request that it belongs to; None: one of its own.

        Returns:
            The completion, or with stream an iterator of its parts; the request is in the engine's queue then.

        Raises:
            OptionError: an option that can't be used, a prompt longer than the context.
            QueueFullError: too many requests wait.
            RequestTimeoutError, CancelledError: it ended before its answer did; from the iterator with stream.
        """
        if logits_processor is not None or tfs_z != 1.0:
            raise OptionError("logits_processor, tfs_z: the engine has neither; expected none; leave them out.")
        if echo and logprobs is not None:
            raise OptionError("echo: with logprobs the prompt would need them too; expected one of the two; drop one.")
        tokens = self.prompt_tokens(prompt, suffix)
        call = call or Call(self._engine)
        generation = call.submit(
            Request(
                prompt=tuple(tokens),
                max_tokens=None if max_tokens is None or max_tokens <= 0 else max_tokens,
                stop=_stop_strings(stop),
                sampling=Sampling(
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    min_p=min_p,
                    typical_p=typical_p,
                    repeat_penalty=repeat_penalty,
                    frequency_penalty=frequency_penalty,
                    presence_penalty=presence_penalty,
                    mirostat_mode=mirostat_mode,
                    mirostat_tau=mirostat_tau,
                    mirostat_eta=mirostat_eta,
                    seed=seed,
                    logit_bias={} if logit_bias is None else logit_bias,
                    grammar=None if grammar is None else check_grammar(grammar),
                ),
                n_top_logprobs=logprobs,
                client=call.client,
            )
        )
        head = {
            "id": call.id,
            "object": "text_completion",
            "created": call.created,
            "model": self._llama.model_path if model is None else model,
        }
        text = ""
        if echo or logprobs is not None:
            text = prompt if isinstance(prompt, str) else self.detokenize(tokens).decode("utf-8", errors="ignore")
        parts = _read_parts(call.read_pieces(generation), text, echo)

        def answer(choice: dict[str, Any]) -> dict[str, Any]:
            if choice["finish_reason"] is None:
                return {**head, "choices": [choice]}
            usage = Usage(generation.n_prompt, generation.n_cached, generation.n_generated)
            return {**head, "choices": [choice], "usage": usage.as_dict()}

        return map(answer, parts) if stream else answer(_join_parts(parts))

    def create_chat_completion(
        self,
        messages: list[dict[str, Any]],
        *,
        call: Call,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        functions: list[dict[str, Any]] | None = None,
        function_call: str | dict[str, Any] | None = None,
        schema: str | None = None,
        logprobs: int | None = None,
        **options: Any,
    ) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """As `llama_cpp.Llama.create_chat_completion`: through the same handler, on the model's own template.

        Args:
            messages: the chat so far.
            call: the request that it belongs to.
            tools: what the model may call.
            tool_choice: `none`, `auto`, `required` or a tool by name.
            functions: older form of tools.
            function_call: older form of tool_choice.
            schema: JSON schema of the answer as text; "": any JSON; None: any text.
            logprobs: how many of the best tokens; None: no log-probabilities.
            **options: further ones of create_completion.

        Returns:
            The completion, or with stream an iterator of its chunks.

        Raises:
            OptionError: what the chat format can't do, and as create_completion.
            QueueFullError, RequestTimeoutError, CancelledError: as create_completion.
        """
        wanted = function_call if functions is not None else tool_choice
        if functions is not None:
            tools = [{"type": "function", "function": function} for function in functions]
        tools, wanted = self._check_tools(tools, wanted)
        messages = self._check_messages(messages, tools is not None)
        if isinstance(wanted, dict) and (schema is not None or options.get("grammar") is not None):
            raise OptionError("tool_choice: a tool's arguments have a schema already; expected no other; drop one.")
        if schema is not None:
            # Upstream's handlers take any JSON where they can't read a schema.
            options["grammar"] = _schema_grammar("response_format", schema) if schema else JSON_GBNF
        model = _HandlerModel(self, call, logprobs, options)
        try:
            answer = self._chat_handler(
                llama=model,
                messages=messages,
                tools=tools,
                tool_choice=wanted,
                logprobs=logprobs is not None,
                top_logprobs=logprobs,
                **options,
            )
        except PowerInferError:
            raise
        except (ValueError, TypeError, AssertionError, jinja2.TemplateError) as error:
            raise OptionError(
                f"messages: {str(error) or 'an option that it has not'}; expected what chat format {self.chat_format} offers; "
                "ask for less."
            ) from error
        tidy = _Tidy(model, is_legacy=functions is not None)
        return map(tidy.chunk, answer) if options.get("stream") else tidy.whole(answer)

    def _check_tools(
        self, tools: list[dict[str, Any]] | None, wanted: str | dict[str, Any] | None
    ) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
        """Tools and choice as upstream's handlers understand them.

        Raises:
            OptionError: the chat format would drop them.
        """
        if not tools:
            if wanted not in (None, "none", "auto"):
                raise OptionError("tool_choice: there are no tools; expected some; send them, or leave it out.")
            return None, None
        if wanted == "none":
            return None, None
        if wanted == "required":
            if len(tools) > 1:
                raise OptionError(
                    f"tool_choice: 'required' of {len(tools)} tools; llama_cpp can require one; name it in tool_choice."
                )
            wanted = tools[0]
        if isinstance(wanted, dict):
            # The name in either form: {"function": {"name": ...}} or the older {"name": ...}.
            name = wanted.get("function", wanted)["name"]
            named = [tool for tool in tools if tool["function"]["name"] == name]
            if not named:
                raise OptionError(f"tool_choice: {name!r} is none of the tools; expected one of them.")
            _schema_grammar(f"tool {name}", json.dumps(named[0]["function"]["parameters"]))
            return tools, {"type": "function", "function": {"name": name}}
        if self.chat_format in _FUNCTION_FORMATS:
            for tool in tools:
                _schema_grammar(f"tool {tool['function']['name']}", json.dumps(tool["function"]["parameters"]))
        elif "tools" not in (self._template or ""):
            raise OptionError(
                f"tools: chat format {self.chat_format} doesn't show them to the model; name one in tool_choice, or start the "
                "server with --chat-format chatml-function-calling."
            )
        return tools, "auto"

    def _check_messages(self, messages: list[dict[str, Any]], has_tools: bool) -> list[dict[str, Any]]:
        """Messages that the chat format writes all of.

        Raises:
            OptionError: it would drop some.
        """
        if self._template is not None or self.chat_format not in llama_chat_format_names():
            return messages
        roles = [message["role"] for message in messages]
        if self.chat_format == "functionary":
            return messages
        if "tool" in roles or "function" in roles:
            raise OptionError(
                f"messages: chat format {self.chat_format} doesn't show the results of tools to the model; expected system, "
                "user and assistant; put the result into a message of the user."
            )
        if self.chat_format == "chatml-function-calling":
            # It writes the tools into the system's message.
            return messages if "system" in roles or not has_tools else [{"role": "system", "content": ""}, *messages]
        if roles.count("system") > 1:
            raise OptionError(
                f"messages: chat format {self.chat_format} takes one of role system; there are {roles.count('system')}; "
                "join them."
            )
        return messages


class _HandlerModel:
    """What a chat handler gets as its `llama`, for one answer; puts back the options that the handler drops."""

    def __init__(self, served: ServedModel, call: Call, logprobs: int | None, options: dict[str, Any]) -> None:
        self._served = served
        self._call = call
        self._options = options
        self.logprobs = logprobs
        self.finish_reason: str | None = None
        self.usage = Usage()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._served, name)

    def create_completion(self, prompt: str | list[int], **options: Any) -> Any:
        wanted = self._options
        options["seed"] = wanted.get("seed")
        options["logit_bias"] = wanted.get("logit_bias")
        # chatml-function-calling asks for one of "functions.NAME:" and "message:" first, under a grammar: no option of the
        # request's text is for that.
        if options.get("stop") != [":"]:
            options["logprobs"] = self.logprobs
            options["max_tokens"] = wanted.get("max_tokens")
            options["stop"] = [*_stop_strings(options.get("stop")), *_stop_strings(wanted.get("stop"))]
            # And then holds a plain answer to names of functions (upstream 0.3.36).
            if isinstance(prompt, str) and prompt.endswith("message:\n"):
                options["grammar"] = wanted.get("grammar")
        answer = self._served.create_completion(prompt, **options, call=self._call)
        if options.get("stream"):
            return map(self._note, answer)
        return self._note(answer)

    def _note(self, part: dict[str, Any]) -> dict[str, Any]:
        """Remember how the generations ended: cut, if one of them was."""
        if "usage" in part:
            usage = part["usage"]
            self.usage = Usage(
                self.usage.n_prompt + usage["prompt_tokens"],
                self.usage.n_cached + usage["prompt_tokens_details"]["cached_tokens"],
                self.usage.n_generated + usage["completion_tokens"],
            )
            if self.finish_reason != "length":
                self.finish_reason = part["choices"][0]["finish_reason"]
        return part


class _Tidy:
    """Upstream's chat answers as OpenAI's clients read them; of one answer.

    Upstream names a called function in both of OpenAI's forms and again in each chunk, where clients join the names, and says
    "tool_calls" also of a call that max_tokens cut.
    """

    def __init__(self, model: _HandlerModel, *, is_legacy: bool) -> None:
        self._model = model
        self._is_legacy = is_legacy
        self._is_named = False

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """An answer that wasn't streamed."""
        message = answer["choices"][0]["message"]
        if "tool_calls" in message:
            # Upstream's older form has a wrong name where the model chose the function.
            message["function_call"] = message["tool_calls"][0]["function"]
        self._tidy_choice(answer["choices"][0], message)
        answer["usage"] = self._model.usage.as_dict()
        return answer

    def chunk(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """The next part of one that is streamed."""
        choice = chunk["choices"][0]
        choice["delta"] = delta = {name: value for name, value in choice["delta"].items() if value is not None}
        self._tidy_choice(choice, delta)
        for called in (*delta.get("tool_calls", ()), delta.get("function_call")):
            if called is None:
                continue
            if self._is_named:
                called.pop("id", None)
                called.pop("type", None)
                called.get("function", called).pop("name")
            self._is_named = True
        if choice["finish_reason"] is not None:
            chunk["usage"] = self._model.usage.as_dict()
        return chunk

    def _tidy_choice(self, choice: dict[str, Any], message: dict[str, Any]) -> None:
        message.pop("tool_calls" if self._is_legacy else "function_call", None)
        if choice["finish_reason"] == "tool_calls":
            if self._model.finish_reason == "length":
                choice["finish_reason"] = "length"
            elif self._is_legacy:
                choice["finish_reason"] = "function_call"
        if choice["logprobs"] is not None:
            # Upstream adds the chosen token to the best ones, as OpenAI does for completions only.
            for token in choice["logprobs"]["content"]:
                token["top_logprobs"] = token["top_logprobs"][: self._model.logprobs]


def llama_chat_format_names() -> list[str]:
    """The chat formats that llama_cpp has by name, and that need nothing beside the model."""
    known = llama_chat_format.LlamaChatCompletionHandlerRegistry()._chat_handlers
    return sorted(name for name in known if name not in _TOKENIZER_FORMATS)


def check_grammar(grammar: LlamaGrammar | str) -> str:
    """A grammar as text, once it is clear that llama.cpp's parser doesn't run out of stack in it.

    Raises:
        OptionError: parentheses are nested too deep.
    """
    text = grammar if isinstance(grammar, str) else _without_control_characters(grammar._grammar)
    depth = deepest = 0
    for mark in re.sub(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[^()]', "", text):
        depth += 1 if mark == "(" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_GRAMMAR_DEPTH:
        raise OptionError(
            f"grammar: {deepest} nested parentheses; expected at most {MAX_GRAMMAR_DEPTH}; make it flatter."
        )
    return text


def _without_control_characters(grammar: str) -> str:
    """Upstream's grammar of a schema, with JSON's strings: it lets a line break stand in them (0.3.36), which no parser takes."""
    return re.sub(r'^char ::= \[\^"\\\\\]', lambda _: r'char ::= [^"\\\x7F\x00-\x1F]', grammar, flags=re.MULTILINE)


def _schema_grammar(where: str, schema: str) -> str:
    try:
        return _without_control_characters(LlamaGrammar.from_json_schema(schema, verbose=False)._grammar)
    except Exception as error:  # assertions, KeyError, RecursionError: all mean a schema it can't read
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise OptionError(f"{where}: no grammar can be made of its schema ({text}); expected JSON schema.") from error


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Each stop string once. Handlers pass the text of EOS, which is empty where there is none."""
    return tuple(dict.fromkeys(text for text in ([stop] if isinstance(stop, str) else stop or ()) if text))


def _token_text(text: bytes) -> str:
    """A token's text; a part of a character as OpenAI writes it, `bytes:\\xe6\\xad`."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _read_parts(pieces: Iterator[Piece], prompt: str, echo: bool) -> Iterator[dict[str, Any]]:
    """A generation as choices of upstream's chunks: text first, the reason of its end in a last one without text."""
    if echo:
        yield {"text": prompt, "index": 0, "logprobs": None, "finish_reason": None}
    offset = len(prompt)
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    finish_reason = None
    for piece in pieces:
        logprobs = None
        if piece.logprobs:
            logprobs = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
            for token in piece.logprobs:
                _append_logprob(logprobs, token, offset)
                offset += len(decoder.decode(token.text))
        if piece.text or logprobs:
            yield {"text": piece.text, "index": 0, "logprobs": logprobs, "finish_reason": None}
        finish_reason = piece.finish_reason
    yield {"text": "", "index": 0, "logprobs": None, "finish_reason": finish_reason}


def _append_logprob(logprobs: dict[str, list[Any]], token: TokenLogprob, offset: int) -> None:
    text = _token_text(token.text)
    logprob = max(token.logprob, LEAST_LOGPROB)
    logprobs["tokens"].append(text)
    logprobs["text_offset"].append(offset)
    logprobs["token_logprobs"].append(logprob)
    logprobs["top_logprobs"].append(
        {**{_token_text(top): max(value, LEAST_LOGPROB) for _, top, value in token.top}, text: logprob}
    )


def _join_parts(parts: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The one choice that the parts are."""
    text = []
    logprobs: dict[str, list[Any]] | None = None
    finish_reason = None
    for part in parts:
        text.append(part["text"])
        finish_reason = part["finish_reason"]
        if part["logprobs"] is not None:
            logprobs = logprobs or {name: [] for name in part["logprobs"]}
            for name, values in part["logprobs"].items():
                logprobs[name] += values
    return {"text": "".join(text), "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
