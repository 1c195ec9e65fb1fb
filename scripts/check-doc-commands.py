#!/usr/bin/env python3
"""Every command in the documentation is run, or has a reason why not here.

Collects the lines of all `sh` blocks, and code spans that start with a program's name, from every README and page. Each
must be in COMMANDS below, with what is done about it:

    run      it is run here, in a folder with a model, an adapter and prompts of the names that the pages use, in the
             order of the pages; so is every command of `rollout` in a block that is not in the table,
             but for `rollout serve`, which does not end: tests talk to the server, here its flags must exist
    ci TEXT  CI runs it elsewhere: TEXT stands in .ci/run or in a script that it calls
    just     a recipe of the justfile: it must be there, its line is run by CI
    gpu      needs an NVIDIA GPU
    else     the reason in words

A code span such as `rollout bench --plot` need not be in it: the command and the flag must exist.

    scripts/check-doc-commands.py [--list]      needs target/release/rollout; --list only checks that all are known
"""
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PUBLISHED = "once the crates are published"
COMMANDS = {
    "cargo run --release --bin rollout -- generate": "ci newcomer.sh --here",
    "cargo run --release --bin rollout -- serve --adapter policy=fixtures/adapters/mult-r32": "ci newcomer.sh --here",
    "cargo test --release --workspace": "ci newcomer.sh --here",
    "cargo run --release -p examples --example generate": "ci run-examples.sh",
    "cargo bench -p benches -- page_table": "ci cargo bench -p benches -- page_table/4096_tokens --quick",
    "cargo bench -p benches -- page_table/4096_tokens/fork": "a part of the former",
    "cargo bench -p benches --bench model": "takes minutes; built by clippy and tests",
    "cargo bench -p benches --bench on_gpu": "gpu",
    "cargo add paged-kv": PUBLISHED,
    "cargo add block-mask paged-kv": PUBLISHED,
    "cargo add cuda-graphs --features cuda": PUBLISHED,
    "cargo add lora-merge half": PUBLISHED,
    "cargo add qwen3-model paged-kv": PUBLISHED,
    "cargo add rollout-engine": PUBLISHED,
    "cargo add --path ../rollout/paged-kv": "is for another package, beside a clone",
    "cargo install --path rollout-engine --locked": "installs into the user's folder; `cargo build --release` builds the same",
    "cargo run --release --bin rollout --": "the beginning of the commands of README.md",
    "pip install -r examples/trl/requirements.txt": "installs TRL and torch; scripts/trl-smoke.sh runs it",
    "mkdir -p /tmp/policies": "for the server of the next line",
    "scripts/setup-nvrtc.sh": "ci scripts/setup-nvrtc.sh",
    "ROLLOUT_REQUIRE_NVRTC=1 cargo test -p cuda-graphs --features cuda": "ci ROLLOUT_REQUIRE_NVRTC=1",
    "scripts/gpu-tests.sh": "gpu",
    "scripts/gpu-tests.sh --sanitizer": "gpu",
    "scripts/gpu-tests.sh --sanitizer --runs FILE": "gpu",
    "scripts/gpu-tests.sh --collect bin": "gpu",
    "scripts/gpu-tests.sh --bin bin": "gpu",
    "scripts/gpu-tests.sh --profile FILE": "gpu",
    "scripts/run-examples.sh": "ci run-examples.sh",
    "scripts/compare_transformers.py": "gpu",
    "rollout bench --model random:qwen3-4b --arrival-rate 60 --n-prompts 96 --max-new-tokens 64 --max-batch-size 64"
    " --n-rounds 1": "gpu",
    "python3 scripts/compare_transformers.py --tiny --rollout target/release/rollout": "needs PyTorch and transformers",
    "python3 scripts/compare_transformers.py --tiny --device cuda:0 --rollout target/release/rollout": "needs PyTorch, transformers and a GPU",
    "python3 scripts/compare_transformers.py --shape 0.6b --rollout target/release/rollout": "needs PyTorch, transformers and a GPU",
    "cargo +nightly fuzz run page_table -- -max_total_time=60": "ci scripts/fuzz.sh",
    "cargo +nightly fuzz run TARGET FILE": "needs an input that fails",
    "cargo +nightly fuzz fmt TARGET FILE": "needs an input that fails",
    "cargo install cargo-fuzz --locked": "ci cargo install --locked --quiet cargo-fuzz",
    "cargo install cargo-fuzz": "ci cargo install --locked --quiet cargo-fuzz",
    "cargo install cargo-deny": "ci cargo install --locked --quiet cargo-deny",
    "bash .ci/run": "this is it",
    "cargo build --release": "ci newcomer.sh --here",
    "scripts/check-versions.sh": "ci scripts/check-versions.sh",
    "scripts/check-semver.sh": "ci scripts/check-semver.sh",
    "scripts/newcomer.sh": "builds everything in a fresh clone, before a release; CI runs the README where it is",
    "scripts/check-packages.sh --verify": "builds every crate anew; CI does the same without the builds",
    "scripts/check-doc-commands.py": "ci scripts/check-doc-commands.py",
    "scripts/check-doc-examples.py": "ci scripts/check-doc-examples.py",
    "scripts/trl-smoke.sh": "installs TRL and torch, and trains for minutes",
    "python examples/trl/grpo.py --adapters /tmp/policies": "needs TRL; scripts/trl-smoke.sh runs it",
    "just fmt lint doc": "just",
    "just deny": "just",
    "just kernels": "just",
    "just fuzz 20": "just",
    "just gpu-tests": "just",
    "cargo bench -p benches --bench lora_merge": "takes minutes; built by clippy and tests",
    "cargo bench -p benches --bench page_table": "ci cargo bench -p benches -- page_table/4096_tokens --quick",
    "rollout bench --model random:qwen3-4b --batches 1,8,16,32,64,128,256 --n-rounds 2": "gpu",
    "rollout bench --model random:qwen3-4b --context-lengths 1024,4096,16384,32768 --batches 1,16,64 --n-pages 11500": "gpu",
    "rollout bench --model random:qwen3-4b --batches 1,8,64 --stats-path kept.json": "gpu",
    "rollout bench --model random:qwen3-4b --batches 1,8,64 --compare kept.json": "gpu",
    "rollout tune --model random:qwen3-4b --n-prompts 64 --time-limit 10m --state sweep.json": "gpu",
}
SPAN = re.compile(r"`((?:cargo|rollout|just|bash|scripts/[^\s`]+)(?: [^`]+)?)`")
NOT_COMMANDS = re.compile(r"^(cargo|rollout|just|bash|scripts/\S+\.md)$")


def collect():
    """(place, command, whether it stands in a block) of every command in the pages."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
    for page in sorted(page for page in pages if page.name != "CHANGELOG.md"):
        language, unfinished = None, ""
        for number, line in enumerate(page.read_text().splitlines(), 1):
            place = f"{page.relative_to(ROOT)}:{number}"
            if line.startswith("```"):
                language = (line[3:].strip() or "sh") if language is None else None
            elif language == "sh":
                # A command may go on after a backslash, and inside quotes.
                unfinished = f"{unfinished} {line.strip()}" if unfinished else line
                if unfinished.endswith("\\"):
                    unfinished = unfinished[:-1].rstrip()
                    continue
                try:
                    shlex.split(unfinished, comments=True)
                except ValueError:
                    continue
                command, unfinished = re.sub(r"(^|\s+)#.*", "", unfinished).strip(), ""
                if command:
                    yield place, command, True
            elif language is None:
                for command in SPAN.findall(line.replace("\\|", "|")):
                    if not NOT_COMMANDS.match(command):
                        yield place, re.sub(r"\s+#.*", "", command).strip(), False


def prepare(folder):
    """The names that the pages use."""
    (folder / "Qwen3-0.6B").symlink_to(ROOT / "rollout-engine/models/tiny-qwen3-math")
    (folder / "my-adapter").symlink_to(ROOT / "fixtures/adapters/mult-r32")
    (folder / "stats.json").write_text((ROOT / "docs/data/h200-qwen3-4b.json").read_text())
    (folder / "in.jsonl").write_text('{"id": 1, "prompt": "Count"}\n')


def missing_flag(command, environment):
    """What a span such as `rollout bench --plot` names and the command does not have, if anything."""
    words = command.split(" | ")[0].split()
    if len(words) == 1 or words[1].startswith("-"):
        words.insert(1, "--help")
    known = subprocess.run(["rollout", words[1], "--help"], env=environment, capture_output=True, text=True)
    if known.returncode != 0:
        return words[1]
    flags = [word for word in words[2:] if word.startswith("--")]
    return next((flag for flag in flags if not re.search(re.escape(flag) + r"\b", known.stdout)), None)


def main():
    listed_only = "--list" in sys.argv
    binary = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release"
    environment = {**os.environ, "PATH": f"{binary}:{os.environ['PATH']}"}
    problems, blocks, spans = [], {}, {}
    for place, command, in_block in collect():
        (blocks if in_block else spans).setdefault(command, place)
    found = {**spans, **blocks}
    ci = (ROOT / ".ci/run").read_text() + "".join(path.read_text() for path in (ROOT / "scripts").glob("*.sh"))
    recipes = set(re.findall(r"^([a-z-]+)(?: [^:\n]*)?:(?!=)", (ROOT / "justfile").read_text(), re.M))
    runs = []
    for command, place in found.items():
        what = COMMANDS.get(command)
        endless = command.startswith("rollout serve")
        if what == "run" or (what is None and command.startswith("rollout ") and command in blocks and not endless):
            runs.append((place, command))
        elif what is None and command.startswith(("curl ", "cargo test ")):
            continue  # To the server; a part of the tests that CI runs, or that need a GPU.
        elif what is None and command.startswith("rollout "):
            missing = None if listed_only else missing_flag(command, environment)
            if missing:
                problems.append(f"{place}: `{command}`: there is no {missing}")
        elif what is None:
            problems.append(f"{place}: `{command}` is not known to {pathlib.Path(__file__).name}")
        elif what.startswith("ci ") and what[3:] not in ci:
            problems.append(f"{place}: `{command}`: CI does not run `{what[3:]}`")
        elif what == "just":
            missing = [name for name in command.split()[1:] if not name.isdigit() and name not in recipes]
            problems += [f"{place}: `{command}`: the justfile has no {name}" for name in missing]
    problems += [f"`{command}` is in no page any more" for command in COMMANDS if command not in found]
    if not listed_only:
        with tempfile.TemporaryDirectory() as folder:
            prepare(pathlib.Path(folder))
            for place, command in runs:
                print(f"$ {command}", flush=True)
                done = subprocess.run(
                    command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
                )
                if done.returncode != 0:
                    problems.append(f"{place}: `{command}` exits with {done.returncode}: {done.stderr.strip()}")
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(found)} commands in the documentation, {len(runs)} of them to be run here, {len(problems)} problems")
    sys.exit(1 if problems else 0)


main()
