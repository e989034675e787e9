"""The console command `powerinfer`: a table of verbs, each in a module that is imported when it is asked for."""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import os
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from powerinfer_py.errors import OptionError, PowerInferError


@dataclass(frozen=True)
class Verb:
    """Where a verb lives: `add_arguments(parser)` and `run(args) -> exit code`."""

    module: str
    help: str
    add_arguments: str = "add_arguments"
    run: str = "run"


VERBS = {
    "run": Verb("powerinfer_py.cli", "generate text", "add_run_arguments", "run_model"),
    "serve": Verb("powerinfer_py.serving.serve", "an HTTP server with OpenAI's interface, for many requests at once"),
    "chat": Verb("powerinfer_py.chat", "a conversation in the terminal"),
    "bench": Verb("powerinfer_py.bench", "speed of the sparsity modes against stock llama.cpp, or of each kernel"),
    "convert": Verb(
        "powerinfer_py.tools.convert_hf_to_powerinfer_gguf", "a Hugging Face checkpoint to an extended GGUF"
    ),
    "profile": Verb("powerinfer_py.tools.profile_activations", "run text through a model and write its plan"),
    "train": Verb("powerinfer_py.tools.train_predictors", "predictors of active neurons for a model and its plan"),
    "reluify": Verb(
        "powerinfer_py.tools.reluify_model", "make a model sparse: exact zeros by distillation, on your text"
    ),
    "prune": Verb("powerinfer_py.tools.prune_model", "a smaller model: the neurons that matter least are left out"),
    "perplexity": Verb("powerinfer_py.tools.perplexity", "quality of the sparsity modes against dense on a text"),
    "pack": Verb("powerinfer_py.tools.pack_plan", "one file from base and sidecar", "add_pack_arguments", "run_pack"),
    "rebind": Verb(
        "powerinfer_py.tools.pack_plan",
        "move a plan to another quantization of the same weights",
        "add_rebind_arguments",
        "run_rebind",
    ),
    "import": Verb("powerinfer_py.tools.import_powerinfer", "take over a model of the original PowerInfer"),
    "measure-hardware": Verb(
        "powerinfer_py.tools.measure_hardware", "rates of the CPU and of GPUs, for placement and simulation"
    ),
    "inspect": Verb("powerinfer_py.tools.inspect_model", "what a GGUF or a plan says"),
    "place": Verb("powerinfer_py.tools.place_model", "which neurons go to the GPU, for a budget of its memory"),
    "simulate": Verb("powerinfer_py.tools.simulate", "tokens per second on a machine that needn't be at hand"),
    "synthetic": Verb("powerinfer_py.tools.synthetic_model", "write a sparse model of any shape, with its plan"),
}


@dataclass(frozen=True)
class RunOptions:
    """Options of `powerinfer run`, with their defaults."""

    n_predict: int = 128
    n_ctx: int = 2048
    temperature: float = 0.8
    n_compare: int = 32  # tokens per timed run of --compare
    repeats: int = 5  # timed runs per engine of --compare


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line like every other error."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see {self.prog} --help.")


def main(argv: list[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: the command line without the program; None: sys.argv.

    Returns:
        The exit code: 0; 1 after an error, which is one line on stderr; 130 after Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("powerinfer: note: %(message)s"))
    logger = logging.getLogger("powerinfer_py")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        return _run_verb(argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output went away; keep the interpreter's last flush from failing too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (PowerInferError, OSError) as error:
        if os.environ.get("POWERINFER_DEBUG") == "1":
            raise
        print(f"powerinfer: {error}", file=sys.stderr)
        return 1
    finally:
        logger.removeHandler(handler)


def _run_verb(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: powerinfer VERB [options]; powerinfer VERB --help\n")
        for name, verb in VERBS.items():
            print(f"  {name:<16} {verb.help}")
        print(f"  {'--version':<16} version of the package, of its core and of llama_cpp")
        return 0
    if argv[0] == "--version":
        print(_version_text())
        return 0
    verb = VERBS.get(argv[0])
    if verb is None:
        near = difflib.get_close_matches(argv[0], VERBS, n=1)
        raise OptionError(
            f"{argv[0]}: no such verb; expected one of {', '.join(VERBS)}; "
            + (f"did you mean {near[0]}?" if near else "see powerinfer --help.")
        )
    module = importlib.import_module(verb.module)
    parser = _Parser(prog=f"powerinfer {argv[0]}", description=verb.help, allow_abbrev=False)
    getattr(module, verb.add_arguments)(parser)
    return getattr(module, verb.run)(parser.parse_args(argv[1:]))


def _version_text() -> str:
    import llama_cpp

    import powerinfer_py
    from powerinfer_py import _core

    return f"powerinfer {powerinfer_py.__version__} (core {_core.version()}, llama_cpp {llama_cpp.__version__})"


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer run`."""
    from powerinfer_py import bench, hub

    parser.add_argument("model", nargs="?", help="a GGUF (its sidecar is found beside it), or an extended GGUF")
    hub.add_hub_arguments(parser)
    bench.add_load_arguments(parser)
    parser.add_argument("-t", "--threads", type=int, help="threads, for prompts too (default: physical cores allowed)")
    parser.add_argument("-p", "--prompt", required=True, help="the prompt")
    parser.add_argument("--sparsity", default="auto", help="auto, dense, exact, threshold or predicted (default: auto)")
    parser.add_argument(
        "-n", "--n-predict", type=int, default=RunOptions.n_predict, help="tokens to generate (default: %(default)s)"
    )
    parser.add_argument("-c", "--ctx-size", type=int, default=RunOptions.n_ctx, help="context (default: %(default)s)")
    parser.add_argument("--temp", type=float, default=RunOptions.temperature, help="temperature (default: %(default)s)")
    parser.add_argument("-s", "--seed", type=int, help="seed of the sampler")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message; use the model's chat template")
    parser.add_argument(
        "--timeline", metavar="OUT.png", help="draw when CPU and devices worked on the last token (extra plot)"
    )
    parser.add_argument(
        "--compare", action="store_true", help="then time stock llama.cpp too, on the text that was generated"
    )
    parser.add_argument(
        "--compare-with",
        metavar="MODEL.gguf",
        help="the same with another model in stock llama.cpp: the original of one that was reluified",
    )


def run_model(args: argparse.Namespace) -> int:
    """`powerinfer run`: text to stdout, speed to stderr.

    Args:
        args: the parsed command line.

    Returns:
        The exit code.
    """
    import llama_cpp

    from powerinfer_py import bench, hub
    from powerinfer_py.llama import Llama

    trace: list[dict[str, Any]] = []
    if args.timeline:
        plot = importlib.import_module("powerinfer_py.tools.plot_timeline")
        plot.check_plot()
    model = hub.resolve_model(args)
    with Llama(model, verbose=False, **bench.load_options(args, model)) as llama:
        text = ""
        if args.timeline:
            llama.trace(trace.append)
        try:
            for piece in _generate(llama, args):
                text += piece
                sys.stdout.write(piece)
                sys.stdout.flush()
        finally:
            sys.stdout.write("\n")
        times = llama_cpp.llama_perf_context(llama.ctx)
        if times.t_eval_ms:
            print(f"{times.n_eval * 1000 / times.t_eval_ms:.2f} tokens/s, {times.n_eval} tokens", file=sys.stderr)
        print(llama.stats(), file=sys.stderr)
        if table := llama.memory().table:
            print(table, end="", file=sys.stderr)
        if args.timeline:
            llama.trace(None)
            plot.write_plot(args.timeline, trace, os.path.basename(model))
            print(f"timeline of the last token: {args.timeline}", file=sys.stderr)
        if args.compare or args.compare_with:
            tokens = llama.tokenize((args.prompt + text).encode("utf-8"))
            line = bench.compare_with_stock(llama, tokens, RunOptions.n_compare, RunOptions.repeats, args.compare_with)
            print(line, file=sys.stderr)
    return 0


def _generate(llama: Any, args: argparse.Namespace) -> Any:
    """Yield the pieces of the answer."""
    options = {"max_tokens": args.n_predict, "temperature": args.temp, "seed": args.seed, "stream": True}
    try:
        if args.chat:
            for chunk in llama.create_chat_completion([{"role": "user", "content": args.prompt}], **options):
                yield chunk["choices"][0]["delta"].get("content") or ""
        else:
            for chunk in llama.create_completion(args.prompt, **options):
                yield chunk["choices"][0]["text"]
    except PowerInferError:
        raise
    except ValueError as error:
        # Upstream's word for a prompt that doesn't fit.
        raise OptionError(f"prompt: {error}; expected one that fits; pass a shorter prompt or a larger -c.") from error


if __name__ == "__main__":
    sys.exit(main())
