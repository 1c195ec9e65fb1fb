"""The `openai` package and TRL's own HTTP clients against `rollout serve` with the bundled model.

    python examples/trl/check_clients.py --url http://127.0.0.1:8000 --adapter <PEFT folder that the server may load>
"""

import argparse
import math

import openai
import requests

USER = [{"role": "user", "content": "Uma has 31 tickets. Uma sells 25 tickets. Uma finds 74 more tickets. "
                                    "How many tickets are left with Uma?"}]


def with_openai(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id

    chat = client.chat.completions.create(model=model, messages=USER, temperature=0, max_tokens=60,
                                          logprobs=True, top_logprobs=3)
    text = chat.choices[0].message.content
    assert text.endswith("#### 80") and chat.choices[0].finish_reason == "stop", chat
    entries = chat.choices[0].logprobs.content
    assert len(entries) == chat.usage.completion_tokens
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in entries)
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries), "greedy takes the best"

    pieces = client.chat.completions.create(model=model, messages=USER, temperature=0, max_tokens=60, stream=True,
                                            stream_options={"include_usage": True})
    streamed, usage = "", None
    for piece in pieces:
        streamed += "".join(choice.delta.content or "" for choice in piece.choices)
        usage = piece.usage or usage
    assert streamed == text and usage.completion_tokens == chat.usage.completion_tokens

    whole = client.completions.create(model=model, prompt=["Count from 1", "Count from 2"], n=2, seed=5, max_tokens=12,
                                      logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for choice in whole.choices:
        lists = choice.logprobs
        assert 0 < len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) <= 12
    pieces = client.completions.create(model=model, prompt="Count from 1", seed=5, max_tokens=12, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert whole.model_extra["policy"]["version"] == 0

    for wrong, kind, status in [
        ({"extra_body": {"mirostat": 2}}, openai.BadRequestError, 400),
        ({"model": "nobody"}, openai.NotFoundError, 404),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, 400),
    ]:
        try:
            client.completions.create(**{"model": model, "prompt": "x", **wrong})
        except kind as error:
            assert error.status_code == status and error.body["message"], error
        else:
            raise AssertionError(f"{wrong} was accepted")
    print(f"openai {openai.__version__}: completions, chat, streams, log-probabilities, errors")


def with_trl(url, adapter):
    import trl
    from accelerate import PartialState
    from trl.experimental.async_grpo import vllm_client as asynchronous
    from trl.generation import vllm_client as synchronous

    # Both clients speak HTTP only; the first asks for the vLLM package all the same.
    synchronous.is_vllm_available = lambda *_, **__: True
    client = synchronous.VLLMClient(base_url=url)
    info = client.get_server_info()
    assert info["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert client.get_world_size() == 1
    prompts = [[4, 5, 6, 7], [8, 9]]
    result = client.generate(prompts, n=3, max_tokens=10, logprobs=0, temperature=0.8,
                             generation_kwargs={"seed": 3})
    assert result["prompt_ids"] == prompts and len(result["completion_ids"]) == 6
    for ids, logprobs, names in zip(result["completion_ids"], result["logprobs"], result["logprob_token_ids"]):
        assert len(ids) == len(logprobs) == len(names) > 0
        assert all(name == [token] and len(row) == 1 and math.isfinite(row[0])
                   for token, row, name in zip(ids, logprobs, names))
    chats = client.chat([USER, USER], n=2, max_tokens=6, logprobs=0, generation_kwargs={"seed": 3})
    assert len(chats["prompt_ids"]) == 2 and len(chats["completion_ids"]) == len(chats["logprobs"]) == 4, chats
    more = client.generate(prompts, n=1, max_tokens=5, logprobs=4)
    assert all(len(row) in (4, 5) for rows in more["logprobs"] for row in rows)

    client = next(kind for kind in vars(asynchronous).values()
                  if isinstance(kind, type) and hasattr(kind, "load_lora_adapter"))(url)
    PartialState()  # TRL's logger wants it
    client.wait_for_server_ready()
    assert client.get_max_model_len() > 0 and client.get_dtype().startswith("torch.")
    for version in (1, 2):
        client.pause()
        client.load_lora_adapter(f"trl-policy-v{version}", adapter)
        client.load_lora_adapter(f"trl-policy-v{version}", adapter)
        client.resume()
    body = {"model": "trl-policy-v2", "prompt": [4, 5, 6], "n": 1, "max_tokens": 8, "temperature": 1.0, "top_p": 1.0,
            "top_k": 0, "repetition_penalty": 1.0, "return_token_ids": True, "logprobs": 0, "seed": 2**62 + 1}
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert answer["policy"]["name"] == "trl-policy-v2", answer
    choice = answer["choices"][0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
    for _ in range(2):
        client.unload_lora_adapter("trl-policy-v1")
    assert [m["id"] for m in requests.get(f"{url}/v1/models", timeout=60).json()["data"]][1:] == ["trl-policy-v2"]
    client.unload_lora_adapter("trl-policy-v2")
    print(f"trl {trl.__version__}: VLLMClient.generate and chat, pause, load, resume, unload")


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--url", default="http://127.0.0.1:8000")
    options.add_argument("--adapter", required=True)
    args = options.parse_args()
    with_openai(args.url)
    with_trl(args.url, args.adapter)
