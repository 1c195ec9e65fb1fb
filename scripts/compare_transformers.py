#!/usr/bin/env python3
"""Compares log-probabilities with transformers: of the CUDA backend on the same GPU, or on the CPU.

A Qwen3 model with random weights of a published shape is written as a Hugging Face folder. Two
sets of tokens are then scored by transformers in float32 (the reference) and in bfloat16, teacher
forced, and by this project:

  fixed     random token sequences, scored by the prefill path      (--hook, a test binary)
  decoded   greedy completions, scored while decoding with graphs   (--rollout, the command)
  sampled   completions sampled at temperature 1, in groups of four (--rollout), scored by transformers
            afterwards as a trainer would

With --tiny the bundled model is compared instead, on the --device given: completions sampled at
temperature 1, four of each of --tiny-prompts products in words that the model was not trained with (of
what it was trained with it is sure, which hides differences).

The claim that is checked: mean |log-prob - float32| of this project is no larger than that of
transformers in bfloat16. Exit status 1 if it is.

Needs torch (with CUDA, except for --tiny), transformers and safetensors. Examples:

  python3 scripts/compare_transformers.py --tiny --rollout target/release/rollout

  python3 scripts/compare_transformers.py --shape 0.6b --rollout target/release/rollout \
      --hook target/release/deps/gpu_compare-0123456789abcdef
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SHAPES = {
    "0.6b": dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072),
    "1.7b": dict(hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, intermediate_size=6144),
    "4b": dict(hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, intermediate_size=9728),
}


def write_model(shape: str, folder: pathlib.Path, seed: int) -> None:
    config = Qwen3Config(
        vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rms_norm_eps=1e-6,
        tie_word_embeddings=True, eos_token_id=[151645, 151643], **SHAPES[shape],
    )
    generator = torch.Generator("cuda").manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(default)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, device="cuda", dtype=torch.float32)
            norm = name.endswith("norm.weight")
            parameter.copy_(1.0 + 0.1 * values if norm else 0.02 * values)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer = pathlib.Path(__file__).resolve().parent.parent / "fixtures" / "qwen3-tokenizer"
    for file in tokenizer.iterdir():
        shutil.copy(file, folder / file.name)
    del model
    torch.cuda.empty_cache()


@torch.no_grad()
def score(
    folder: pathlib.Path, dtype: torch.dtype, sequences: list[dict], device: str = "cuda"
) -> list[torch.Tensor]:
    """Log-probability of every token after the prompt, teacher forced, from float32 logits."""
    # The reference spells attention out: a fused kernel may round float32 on the way.
    attention = "eager" if dtype == torch.float32 else "sdpa"
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    model = model.to(device).eval()
    out = []
    for sequence in sequences:
        ids = torch.tensor([sequence["prompt"] + sequence["completion"]], device=device)
        first = len(sequence["prompt"]) - 1
        logits = model(ids).logits[0, first:-1].float()
        chosen = ids[0, first + 1 :].unsqueeze(1)
        out.append(torch.log_softmax(logits, -1).gather(1, chosen).squeeze(1).double().cpu())
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return out


def report(name: str, values: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    difference = torch.cat(values) - torch.cat(reference)
    size = difference.abs()
    mean = size.mean().item()
    print(
        f"  {name:<22} mean |d| {mean:.2e}   p99 {size.quantile(0.99).item():.2e}   "
        f"max {size.max().item():.2e}   mean d {difference.mean().item():+.2e}   tokens {size.numel()}"
    )
    return mean


def compare(title: str, folder: pathlib.Path, sequences: list[dict], device: str = "cuda") -> bool:
    reference = score(folder, torch.float32, sequences, device)
    theirs = score(folder, torch.bfloat16, sequences, device)
    ours = [torch.tensor(sequence["logprobs"], dtype=torch.float64) for sequence in sequences]
    print(f"{title}, against transformers float32:")
    theirs_mean = report("transformers bfloat16", theirs, reference)
    ours_mean = report("this project", ours, reference)
    report("this - theirs bfloat16", ours, theirs)
    good = ours_mean <= theirs_mean
    print(f"  {'ok' if good else 'WORSE'}: ratio {ours_mean / theirs_mean:.3f}")
    return good


def sampled(options: argparse.Namespace, title: str, folder: pathlib.Path, prompts: list[dict], device: str) -> bool:
    """Four completions of each prompt, sampled at temperature 1."""
    source, target = options.work / "sampled-prompts.jsonl", options.work / "sampled-completions.jsonl"
    source.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    target.unlink(missing_ok=True)
    command = [
        str(options.rollout), "generate", "--model", str(folder), "--device", device, "--quiet",
        "--prompts", str(source), "--output", str(target), "--max-new-tokens", str(options.new_tokens),
        "--max-batch-size", "64", "--max-seq-length", "1024",
        "--temperature", "1", "-n", "4", "--seed", str(options.seed),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    sequences = []
    for line in target.read_text().splitlines():
        row = json.loads(line)
        sequences.append(dict(prompt=row["prompt_token_ids"], completion=row["token_ids"], logprobs=row["logprobs"]))
    return compare(f"{len(sequences)} {title}", folder, sequences, "cpu" if device == "cpu" else "cuda")


def tiny(options: argparse.Namespace) -> bool:
    """Sampled completions of the bundled model."""
    root = pathlib.Path(__file__).resolve().parent.parent
    options.work.mkdir(parents=True, exist_ok=True)
    problems = [f"What is {100 + i * 271 % 900} times {3 + i % 7}?" for i in range(options.tiny_prompts)]
    prompts = [dict(messages=[dict(role="user", content=problem)]) for problem in problems]
    folder = root / "rollout-engine" / "models" / "tiny-qwen3-math"
    title = f"sampled completions of the bundled model on {options.device}"
    return sampled(options, title, folder, prompts, options.device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--hook", type=pathlib.Path, help="test binary gpu_compare of qwen3-model")
    parser.add_argument("--rollout", type=pathlib.Path, help="the rollout command")
    parser.add_argument("--tiny", action="store_true", help="compare the bundled model; needs --rollout")
    parser.add_argument("--device", default="cpu", help="where --tiny computes: cpu or cuda:0")
    parser.add_argument("--tiny-prompts", type=int, default=16, help="prompts for --tiny, four completions each")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/compare-transformers"))
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not options.hook and not options.rollout:
        parser.error("give --hook, --rollout or both")
    # float32 means float32: no tf32 in the reference.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if options.tiny:
        if not options.rollout:
            parser.error("--tiny needs --rollout")
        return 0 if tiny(options) else 1

    folder = options.work / f"random-qwen3-{options.shape}"
    folder.mkdir(parents=True, exist_ok=True)
    write_model(options.shape, folder, options.seed)
    generator = torch.Generator().manual_seed(options.seed + 1)

    def tokens(n: int) -> list[int]:
        return torch.randint(1000, 141000, (n,), generator=generator).tolist()

    prompts = [tokens(16 + (i * 37) % 193) for i in range(options.sequences)]
    good = True

    if options.hook:
        fixed = [dict(prompt=prompt, completion=tokens(options.new_tokens)) for prompt in prompts]
        source, target = options.work / "fixed.json", options.work / "fixed-out.json"
        source.write_text(json.dumps(fixed))
        environment = os.environ | {
            "COMPARE_MODEL": str(folder),
            "COMPARE_INPUT": str(source),
            "COMPARE_OUTPUT": str(target),
        }
        command = [str(options.hook), "--include-ignored", "--nocapture", "score_the_sequences_of_a_file"]
        subprocess.run(command, env=environment, check=True)
        for sequence, logprobs in zip(fixed, json.loads(target.read_text()), strict=True):
            sequence["logprobs"] = logprobs
        good &= compare("fixed tokens, prefill path", folder, fixed)

    if options.rollout:
        source, target = options.work / "prompts.jsonl", options.work / "completions.jsonl"
        source.write_text("".join(json.dumps(dict(id=str(i), prompt_token_ids=p)) + "\n" for i, p in enumerate(prompts)))
        target.unlink(missing_ok=True)
        command = [
            str(options.rollout), "generate", "--model", str(folder), "--device", "cuda:0", "--quiet",
            "--prompts", str(source), "--output", str(target),
            "--max-new-tokens", str(options.new_tokens), "--max-batch-size", "8", "--max-seq-length", "1024",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        decoded = []
        for line in target.read_text().splitlines():
            row = json.loads(line)
            decoded.append(dict(prompt=row["prompt_token_ids"], completion=row["token_ids"], logprobs=row["logprobs"]))
        good &= compare("greedy completions, decode path", folder, decoded)
        lines = [dict(id=str(i), prompt_token_ids=prompt) for i, prompt in enumerate(prompts)]
        good &= sampled(options, "sampled completions of the random model", folder, lines, "cuda:0")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
