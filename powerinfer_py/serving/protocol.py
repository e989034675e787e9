"""The bodies of HTTP requests: OpenAI's fields, llama.cpp's sampling beside them, and the limits of each.

A field that isn't here is refused with its nearest name: no option is ignored. Annotations are evaluated, so Python 3.9's.
"""

import difflib
import json
import re
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from powerinfer_py.serving.requests import Sampling

MAX_CHOICES = 64  # texts that one request may ask for: prompts x n
MAX_EMBEDDINGS = 256
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of a message
MAX_TOOLS = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_LOGIT_BIAS = 1024  # tokens
MAX_TOP_LOGPROBS = 20
MAX_NESTING = 64  # JSON levels
MAX_NAME_LENGTH = 256
MAX_GRAMMAR_LENGTH = 65536  # characters of GBNF, or of a JSON schema
# A count becomes as many repetitions in the grammar, of which llama.cpp takes fewer than 2000.
MAX_SCHEMA_COUNT = 1000

_DEFAULTS = Sampling()


def _nesting(value: Any) -> int:
    """JSON levels of a value, counted up to one above MAX_NESTING."""
    level, n_levels = [value], 0
    while level and n_levels <= MAX_NESTING:
        below: list[Any] = []
        for item in level:
            below += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        n_levels += 1
        level = [item for item in below if isinstance(item, (dict, list))]
    return n_levels


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse a JSON schema whose grammar would be too large."""
    if len(json.dumps(schema)) > MAX_GRAMMAR_LENGTH:
        raise PydanticCustomError("schema", "a schema longer than {limit} characters", {"limit": MAX_GRAMMAR_LENGTH})
    rest: list[Any] = [schema]
    while rest:
        item = rest.pop()
        if isinstance(item, list):
            rest += item
        elif isinstance(item, dict):
            rest += item.values()
            counts = [item.get(name) for name in ("minLength", "maxLength", "minItems", "maxItems")]
            counts += [int(text[:9]) for text in re.findall(r"\d+(?=[\d,]*\})", str(item.get("pattern", "")))]
            if any(isinstance(count, (int, float)) and not 0 <= count <= MAX_SCHEMA_COUNT for count in counts):
                raise PydanticCustomError(
                    "schema", "a schema with a count outside of 0 to {limit}", {"limit": MAX_SCHEMA_COUNT}
                )
    return schema


Schema = Annotated[dict[str, Any], AfterValidator(_check_schema)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
# The first error is enough: a million of them hold up everybody for 20 s.
Tokens = Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class Body(BaseModel):
    """JSON object that says what it doesn't know; null means the default."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if _nesting(values) > MAX_NESTING:
            raise PydanticCustomError("nesting", "nested deeper than {limit} levels", {"limit": MAX_NESTING})
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}."
                raise PydanticCustomError(
                    "unknown_field", "this server has no such field; {hint}", {"field": str(name), "hint": hint}
                )
        return {name: value for name, value in values.items() if value is not None or name == "max_tokens"}


class StreamOptions(Body):
    """What a stream holds beside the text."""

    include_usage: bool = False


class _GenerationBody(Body):
    """What completions and chat have in common."""

    model: Optional[Name] = None
    max_tokens: Optional[int] = Field(None, ge=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Union[Stop, Annotated[list[Stop], Field(max_length=MAX_STOPS)]] = []
    stream: bool = False
    stream_options: Optional[StreamOptions] = None
    user: Optional[Name] = None
    seed: Optional[int] = None
    temperature: float = Field(_DEFAULTS.temperature, ge=0, le=100)
    top_p: float = Field(_DEFAULTS.top_p, ge=0, le=1)
    frequency_penalty: float = Field(_DEFAULTS.frequency_penalty, ge=-2, le=2)
    presence_penalty: float = Field(_DEFAULTS.presence_penalty, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field({}, max_length=MAX_LOGIT_BIAS)
    # llama.cpp's
    top_k: int = Field(_DEFAULTS.top_k, ge=-1, le=2**31 - 1)
    min_p: float = Field(_DEFAULTS.min_p, ge=0, le=1)
    typical_p: float = Field(_DEFAULTS.typical_p, ge=0, le=1)
    repeat_penalty: float = Field(_DEFAULTS.repeat_penalty, gt=0, le=100)
    mirostat_mode: int = Field(_DEFAULTS.mirostat_mode, ge=0, le=2)
    mirostat_tau: float = Field(_DEFAULTS.mirostat_tau, ge=0, le=100)
    mirostat_eta: float = Field(_DEFAULTS.mirostat_eta, ge=0, le=1)
    grammar: Optional[str] = Field(None, min_length=1, max_length=MAX_GRAMMAR_LENGTH)

    @model_validator(mode="after")
    def _check_stream_options(self) -> "_GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "only for streams; expected stream true", {})
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def completion_options(self, i_choice: int) -> dict[str, Any]:
        """Arguments of `create_completion` and `create_chat_completion` that both have.

        Args:
            i_choice: which of the n texts; each has its own seed.
        """
        # One below 2**32, which is llama.cpp's word for "any seed".
        seed = None if self.seed is None else (self.seed + i_choice) % (2**32 - 1)
        names = (
            "stop", "stream", "temperature", "top_p", "top_k", "min_p", "typical_p", "repeat_penalty",
            "frequency_penalty", "presence_penalty", "mirostat_mode", "mirostat_tau", "mirostat_eta", "logit_bias",
            "grammar",
        )  # fmt: skip
        return {"seed": seed, **{name: getattr(self, name) for name in names}}


class CompletionBody(_GenerationBody):
    """`POST /v1/completions`."""

    prompt: Union[
        str,
        Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)],
        Tokens,
        Annotated[list[Tokens], Field(min_length=1, max_length=MAX_CHOICES)],
    ]
    max_tokens: Optional[int] = Field(16, ge=1)
    suffix: Optional[str] = None
    echo: bool = False
    logprobs: Optional[int] = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: Literal[1] = 1

    @property
    def prompts(self) -> list[Union[str, list[int]]]:
        """Each text to continue."""
        one = isinstance(self.prompt, str) or not self.prompt or not isinstance(self.prompt[0], (str, list))
        return [self.prompt] if one else list(self.prompt)  # type: ignore[list-item]

    @model_validator(mode="after")
    def _check_choices(self) -> "CompletionBody":
        if len(self.prompts) * self.n > MAX_CHOICES:
            raise PydanticCustomError(
                "choices",
                "{prompts} prompts x n {n}; expected at most {limit} texts of one request",
                {"prompts": len(self.prompts), "n": self.n, "limit": MAX_CHOICES},
            )
        return self


class TextPart(Body):
    """A part of a message; this server has no other kind."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """A function that the assistant called."""

    name: Name
    arguments: str


class ToolCall(Body):
    """The same as a tool."""

    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One turn of a chat."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Union[str, Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)], None] = None
    name: Optional[Name] = None
    tool_calls: Optional[list[ToolCall]] = Field(None, max_length=MAX_TOOLS)
    tool_call_id: Optional[Name] = None
    function_call: Optional[FunctionCall] = None
    refusal: None = None  # what clients send back of an answer

    def as_dict(self) -> dict[str, Any]:
        """As chat templates read it: text in one piece, `developer` by its older name."""
        message = self.model_dump(exclude_none=True)
        message["role"] = "system" if self.role == "developer" else self.role
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        else:
            message["content"] = self.content or ""
        return message


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: Optional[str] = None
    parameters: Schema = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = True  # arguments are always held to the schema


class Tool(Body):
    """The same as a tool."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """Which function must be called."""

    name: Name


class ToolName(Body):
    """The same as a tool."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    """OpenAI's frame around a schema."""

    name: Optional[Name] = None
    description: Optional[str] = None
    strict: bool = True
    schema_: Schema = Field(default_factory=dict, alias="schema")


class ResponseFormat(Body):
    """What the text of an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Optional[Schema] = Field(None, alias="schema")  # llama.cpp's, with json_object
    json_schema: Optional[JsonSchema] = None

    @model_validator(mode="after")
    def _check_schema_place(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("response_format", "json_schema is for type json_schema, which needs it", {})
        if self.schema_ is not None and self.type != "json_object":
            raise PydanticCustomError("response_format", "schema is for type json_object", {})
        return self

    @property
    def schema_text(self) -> Optional[str]:
        """The schema as JSON; "" for any JSON, None for any text."""
        schema = self.json_schema.schema_ if self.json_schema is not None else self.schema_
        return None if self.type == "text" else json.dumps(schema) if schema else ""


class ChatBody(_GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Optional[int] = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: Optional[int] = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Optional[list[Tool]] = Field(None, min_length=1, max_length=MAX_TOOLS)
    tool_choice: Union[Literal["none", "auto", "required"], ToolName] = "auto"
    parallel_tool_calls: bool = True  # at most one call is made, which both values allow
    functions: Optional[list[Function]] = Field(None, min_length=1, max_length=MAX_TOOLS)
    function_call: Union[Literal["none", "auto"], FunctionName] = "auto"
    response_format: ResponseFormat = ResponseFormat(type="text")

    @model_validator(mode="after")
    def _check_together(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs true", {})
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ; expected one", {})
        if self.tools is not None and self.functions is not None:
            raise PydanticCustomError("tools", "tools and functions; expected one of them", {})
        if self.grammar is not None and self.response_format.type != "text":
            raise PydanticCustomError("grammar", "grammar and response_format; expected one of them", {})
        return self


class EmbeddingBody(Body):
    """`POST /v1/embeddings`."""

    model: Optional[Name] = None
    input: Union[
        str,
        Annotated[list[str], Field(min_length=1, max_length=MAX_EMBEDDINGS)],
        Annotated[Tokens, Field(min_length=1)],
        Annotated[list[Annotated[Tokens, Field(min_length=1)]], Field(min_length=1, max_length=MAX_EMBEDDINGS)],
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Optional[int] = None
    user: Optional[Name] = None

    @property
    def inputs(self) -> list[Union[str, list[int]]]:
        """Each text."""
        one = isinstance(self.input, str) or not isinstance(self.input[0], (str, list))
        return [self.input] if one else list(self.input)  # type: ignore[list-item]


class SparsityBody(Body):
    """`POST /powerinfer/sparsity`."""

    sparsity: Name
