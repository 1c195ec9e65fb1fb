"""GRPO with TRL's GRPOTrainer as it is, completions from `rollout serve`.

    mkdir -p /tmp/policies
    rollout serve --device cpu --no-merge-lora --allow-root /tmp/policies &
    python examples/trl/grpo.py --adapters /tmp/policies

The trainer holds the base model and a LoRA adapter in f32. Before it samples under new weights, the adapter is written to
a folder that the server may read, loaded there under a name of its own (`policy-<step>`), and asked for by that name: the
server answers under exactly this adapter or refuses.

The task: a product of one digit and three digits. The bundled model, which has learned longer sums of smaller numbers, is
seldom right; the reward is the share of right digits.
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUNDLED = os.path.join(ROOT, "rollout-engine", "models", "tiny-qwen3-math")
SYSTEM = "Solve the problem step by step. End with #### and the answer."


class RolloutServer:
    """What `GRPOTrainer(rollout_func=...)` calls. `adapters` is a folder below one that the server may load from."""

    def __init__(self, url, adapters, check_every=1):
        self.url, self.adapters, self.check_every = url.rstrip("/"), adapters, check_every
        self.step, self.differences = None, []

    def post(self, path, body):
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("ROLLOUT_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=1800) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read().decode()}") from None

    def sync(self, trainer):
        """Brings the adapter to the server if the trainer has changed it. Gives the policy's name."""
        step = trainer.state.global_step
        if step != self.step:
            folder = os.path.join(self.adapters, f"policy-{step}")
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
            # In place: a trainer that was stopped and started anew may find its names of before.
            adapter = {"lora_name": f"policy-{step}", "lora_path": folder, "load_inplace": True}
            self.post("/v1/load_lora_adapter", adapter)
            if self.step is not None:
                self.post("/v1/unload_lora_adapter", {"lora_name": f"policy-{self.step}"})
                shutil.rmtree(os.path.join(self.adapters, f"policy-{self.step}"), ignore_errors=True)
            self.step = step
        return f"policy-{step}"

    def __call__(self, prompts, trainer):
        policy = self.sync(trainer)
        tokenizer = trainer.processing_class
        rendered = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in prompts]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]
        # The trainer repeats each prompt; asked for once with n, its prefill is shared.
        n = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        grouped = all(ids[i] == ids[i - i % n] for i in range(len(ids))) and len(ids) % n == 0
        n = n if grouped else 1
        args = trainer.args
        answer = self.post("/v1/completions", {
            "model": policy, "prompt": ids[::n], "n": n, "max_tokens": args.max_completion_length,
            "temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty, "logprobs": 0, "return_token_ids": True,
        })
        assert answer["policy"]["name"] == policy
        choices = answer["choices"]
        result = {
            "prompt_ids": ids,
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": [choice["logprobs"]["token_logprobs"] for choice in choices],
        }
        if self.check_every and trainer.state.global_step % self.check_every == 0:
            self.differences.append(difference(trainer, result))
        return result


def difference(trainer, rollouts):
    """(mean, largest) absolute difference between the server's log-probabilities and those of the trainer's model."""
    import torch

    rows = [p + c for p, c in zip(rollouts["prompt_ids"], rollouts["completion_ids"])]
    width = max(map(len, rows))
    pad = trainer.processing_class.pad_token_id
    batch = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        logits = trainer.model(input_ids=batch, attention_mask=mask).logits.float()
    logps = (logits / trainer.args.temperature).log_softmax(-1)
    ours, theirs = [], []
    for i, (prompt, completion) in enumerate(zip(rollouts["prompt_ids"], rollouts["completion_ids"])):
        at = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
        theirs.append(logps[i, at, torch.tensor(completion)])
        ours.append(torch.tensor(rollouts["logprobs"][i]))
    gap = (torch.cat(ours) - torch.cat(theirs)).abs()
    return gap.mean().item(), gap.max().item()


def problems(count, seed):
    draw = random.Random(seed)
    things = ["marbles", "tickets", "apples", "shells", "beads"]
    names = ["Ana", "Ben", "Eva", "Noah", "Uma", "Wendy"]
    for _ in range(count):
        a, b = draw.randint(3, 9), draw.randint(101, 399)
        name, thing = draw.choice(names), draw.choice(things)
        text = f"{name} buys {a} boxes with {b} {thing} in each box. How many {thing} are left with {name}?"
        yield {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
            "answer": str(a * b),
        }


def right_digits(completions, answer, **_):
    """The share of digits that are right; 1 only for the right answer."""
    rewards = []
    for completion, right in zip(completions, answer):
        found = re.search(r"####\s*(\d+)", completion[0]["content"])
        given = found.group(1) if found else ""
        same = sum(x == y for x, y in zip(given, right)) if len(given) == len(right) else 0
        rewards.append(same / len(right))
    return rewards


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--url", default="http://127.0.0.1:8000")
    options.add_argument("--model", default=BUNDLED, help="folder of the model that the server serves")
    options.add_argument("--adapters", required=True, help="folder for adapters, below one that the server may load from")
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--prompts", type=int, default=8, help="prompts per step")
    options.add_argument("--generations", type=int, default=16, help="completions per prompt")
    options.add_argument("--learning-rate", type=float, default=1e-3)
    args = options.parse_args()

    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Report(TrainerCallback):
        rewards = []

        def on_log(self, arguments, state, control, logs=None, **_):
            if "reward" in (logs or {}):
                self.rewards.append(logs["reward"])
                mean, largest = server.differences[-1]
                print(
                    f"step {state.global_step:3d}  reward {logs['reward']:.3f}  "
                    f"|log-prob difference| mean {mean:.1e} max {largest:.1e}",
                    flush=True,
                )

    server = RolloutServer(args.url, args.adapters)
    config = GRPOConfig(
        output_dir=os.path.join(args.adapters, "trainer"),
        per_device_train_batch_size=args.prompts * args.generations,
        num_generations=args.generations,
        max_completion_length=32,
        max_steps=args.steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        temperature=1.0,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=1,
        model_init_kwargs={"dtype": "float32"},
    )
    report = Report()
    trainer = GRPOTrainer(
        model=args.model,
        processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
        args=config,
        reward_funcs=right_digits,
        train_dataset=Dataset.from_list(list(problems(args.steps * args.prompts, seed=1))),
        peft_config=LoraConfig(
            r=16,
            lora_alpha=32,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            task_type="CAUSAL_LM",
        ),
        rollout_func=server,
        callbacks=[report],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()

    tenth = max(1, len(report.rewards) // 8)
    first = sum(report.rewards[:tenth]) / tenth
    last = sum(report.rewards[-tenth:]) / tenth
    mean = sum(mean for mean, _ in server.differences) / len(server.differences)
    largest = max(largest for _, largest in server.differences)
    print(f"mean reward of the first {tenth} steps {first:.3f}, of the last {tenth} {last:.3f}")
    print(f"|log-prob difference| over all rollouts: mean {mean:.2e}, max {largest:.2e}")
    if last < first + 0.05:
        sys.exit("the reward did not rise")
    if mean > 1e-3:
        sys.exit("the server's log-probabilities are not the trainer's")


if __name__ == "__main__":
    main()
