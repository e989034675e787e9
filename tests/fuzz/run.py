"""Runs the fuzz targets for a while each, some at a time, and says what they reached. A finding is kept, and the exit code is 1.

`python tests/fuzz/run.py --plan-read build/fuzz/tests/fuzz/fuzz-plan-read`: the C++ target, and all of fuzz_python.py.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PYTHON_TARGETS = ("plan", "original", "weights", "checkpoint", "sentencepiece", "hardware")
# An input may take so long, in seconds, even where many programs share the processor.
INPUT_TIMEOUT_S = 20
# Beyond the fuzzing itself: imports, the corpus, the last input.
SPARE_S = 240
C_FLAGS = ("-rss_limit_mb=512", "-malloc_limit_mb=64", "-max_len=16384")
PYTHON_FLAGS = ("-rss_limit_mb=2048",)  # torch alone takes a quarter; fuzz_python.py limits what readers add


@dataclass(frozen=True)
class Result:
    """What became of one target: `text` is its last line, or how it ended."""

    name: str
    failed: bool
    text: str


def _last_line(log: str) -> str:
    done = re.search(r"#(\d+)\s+DONE\s+cov: (\d+) ft: (\d+) corp: (\d+)", log)
    rate = re.search(r"average_exec_per_sec:\s+(\d+)", log)
    if done is None or rate is None:
        return "ended without a summary"
    return f"{done[1]} inputs, {rate[1]}/s, {done[2]} edges, {done[3]} features, {done[4]} inputs kept"


def run_target(name: str, command: list[str], corpus: Path, seconds: int, seed: int, out: Path) -> Result:
    """Fuzzes one target.

    Args:
        name: for messages and files.
        command: the program and its own arguments.
        corpus: the inputs to start from; it stays as it is.
        seconds: of fuzzing.
        seed: of the changes; 0: another one each time.
        out: gets the log, and the input of a finding.

    Returns:
        What became of it.
    """
    log = out / f"{name}.log"
    limits = [f"-max_total_time={seconds}", f"-seed={seed}", f"-timeout={INPUT_TIMEOUT_S}", "-print_final_stats=1"]
    with tempfile.TemporaryDirectory() as work, log.open("w") as file:
        flags = [*limits, f"-dict={FOLDER / 'names.dict'}", f"-artifact_prefix={out / name}-", work, str(corpus)]
        try:
            done = subprocess.run(
                [*command, *flags],
                env={**os.environ, "PYTHONHASHSEED": "0"},
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds + SPARE_S,
                check=False,
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = -1
    text = log.read_text(errors="replace")
    if code == 0:
        return Result(name, False, _last_line(text))
    kept = re.findall(r"Test unit written to (.*)", text)
    how = "it didn't end" if code == -1 else f"exit code {code}"
    return Result(name, True, f"{how}; input: {', '.join(kept) or 'none kept'}; log: {log}\n{_excerpt(text)}")


def _excerpt(log: str) -> str:
    """The traceback or the sanitizer's report."""
    start = re.search(r"Uncaught Python exception|ERROR: |runtime error", log)
    return log[start.start() :][:3000] if start else log[-1500:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="of fuzzing per target")
    parser.add_argument("--seed", type=int, default=1, help="of the changes; 0: another one each time")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz/out"), help="folder for logs and findings")
    parser.add_argument(
        "--plan-read", type=Path, help="the program fuzz-plan-read; without it the Python targets run alone"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    targets = [
        (name, [sys.executable, str(FOLDER / "fuzz_python.py"), name, *PYTHON_FLAGS], name) for name in PYTHON_TARGETS
    ]
    if args.plan_read is not None:
        targets.insert(0, ("plan-read", [str(args.plan_read.resolve()), *C_FLAGS], "plan"))
    start = time.monotonic()

    def run(target: tuple[str, list[str], str]) -> Result:
        name, command, corpus = target
        result = run_target(name, command, FOLDER / "corpus" / corpus, args.seconds, args.seed, args.out.resolve())
        print(f"fuzz {name}: {'FOUND: ' if result.failed else ''}{result.text}", flush=True)
        return result

    with ThreadPoolExecutor(args.jobs) as pool:
        failed = [result.name for result in pool.map(run, targets) if result.failed]
    print(f"fuzz: {len(targets)} targets in {time.monotonic() - start:.0f} s; {', '.join(failed) or 'nothing'} found")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
