#!/usr/bin/env python3
"""Tokens per second on the CPU beside transformers `generate` in float32: the bundled model, the 48 golden prompts, greedy.

Both run in turns on the same cores, three rounds; the ratio of the best rounds is printed. Needs torch and transformers:

    cargo build --release --bin rollout && python3 scripts/compare_cpu_speed.py
"""

import json
import os
import pathlib
import re
import subprocess
import tempfile
import time

import torch
from transformers import Qwen3ForCausalLM

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ROOT / "rollout-engine/models/tiny-qwen3-math"
NEW_TOKENS = 400


def main() -> None:
    torch.set_num_threads(os.cpu_count())
    prompts = [case["prompt_ids"] for case in json.loads((ROOT / "fixtures/golden/greedy-base.json").read_text())]
    model = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    eos = model.generation_config.eos_token_id
    pad = model.generation_config.pad_token_id

    def transformers_rate(batch: int) -> float:
        tokens, start = 0, time.perf_counter()
        for first in range(0, len(prompts), batch):
            group = prompts[first:first + batch]
            longest = max(map(len, group))
            ids = torch.tensor([[pad] * (longest - len(p)) + p for p in group])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in group])
            with torch.no_grad():
                out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
            for row in out[:, longest:].tolist():
                ends = [i for i, token in enumerate(row) if token in eos]
                tokens += ends[0] + 1 if ends else len(row)
        return tokens / (time.perf_counter() - start)

    def rollout_rate(batch: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder)
            lines = "".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in prompts)
            (path / "in.jsonl").write_text(lines)
            run = subprocess.run(
                [ROOT / "target/release/rollout", "generate", "--device", "cpu", "--prompts", path / "in.jsonl",
                 "--output", path / "out.jsonl", "--max-batch-size", str(batch), "--max-new-tokens", str(NEW_TOKENS)],
                check=True, capture_output=True, text=True)
            return float(re.search(r"([\d.]+) tok/s", run.stderr)[1])

    for batch in (1, 16):
        rounds = [(rollout_rate(batch), transformers_rate(batch)) for _ in range(3)]
        ours, theirs = max(r[0] for r in rounds), max(r[1] for r in rounds)
        print(f"batch {batch}: rollout {ours:.0f} tok/s, transformers {theirs:.0f} tok/s, ratio {ours / theirs:.1f}", flush=True)


if __name__ == "__main__":
    main()
