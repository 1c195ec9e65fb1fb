//! What the server costs.

use std::time::Instant;

use rollout_engine::serve::Server;
use rollout_engine::{DeviceChoice, Engine, EngineBuilder, Request};
use serde_json::json;

use crate::support::{Gate, settings, start};

const PROMPTS: usize = 64;
const ROUNDS: usize = 5;

fn builder() -> EngineBuilder {
    Engine::builder().max_batch_size(PROMPTS).max_seq_length(512)
}

/// Tokens per second of the same prompts straight through the engine, as one HTTP request, and as 64 concurrent ones; in
/// turns, so that what else the machine does hits all alike. The best round of each counts.
fn rates(builder: &EngineBuilder, vocab: usize, new_tokens: usize) -> [f64; 3] {
    // As in `rollout bench`.
    let prompt = |i: usize| -> Vec<u32> {
        (0..64 + 37 * i % 193)
            .map(|j| ((7919 * i + 104_729 * j) % vocab) as u32)
            .collect()
    };
    let mut engine = builder.clone().build().expect("loads");
    let server = Server::from_builder(builder.clone(), settings()).expect("loads");
    let server = start(server, Gate::default());
    let sampling = rollout_engine::SamplingParams {
        max_new_tokens: new_tokens,
        ignore_eos: true,
        ..Default::default()
    };
    let requests: Vec<_> = (0..PROMPTS)
        .map(|i| Request::token_ids(prompt(i)).sampling(sampling.clone()))
        .collect();
    let body = |prompts: serde_json::Value| {
        json!({
            "model": "base", "prompt": prompts, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": true,
            "logprobs": 0, "return_token_ids": true,
        })
    };
    let all: Vec<_> = (0..PROMPTS).map(prompt).collect();
    let mut best = [f64::INFINITY; 3];
    let mut time = |which: usize, run: &mut dyn FnMut()| {
        let begin = Instant::now();
        run();
        best[which] = best[which].min(begin.elapsed().as_secs_f64());
    };
    for _ in 0..ROUNDS {
        time(0, &mut || {
            engine.generate(&requests).expect("runs");
        });
        time(1, &mut || {
            assert_eq!(server.post("/v1/completions", &body(json!(all))).status, 200);
        });
        time(2, &mut || {
            std::thread::scope(|scope| {
                for prompt in &all {
                    let server = &server;
                    let body = body(json!(prompt));
                    scope.spawn(move || assert_eq!(server.post("/v1/completions", &body).status, 200));
                }
            });
        });
    }
    let rate = best.map(|seconds| (PROMPTS * new_tokens) as f64 / seconds);
    println!(
        "tokens/s: engine {:.0}, one request {:.0} ({:+.1} %), 64 requests {:.0} ({:+.1} %)",
        rate[0],
        rate[1],
        100.0 * (rate[1] / rate[0] - 1.0),
        rate[2],
        100.0 * (rate[2] / rate[0] - 1.0),
    );
    rate
}

#[test]
#[ignore = "takes minutes and wants a quiet machine"]
fn the_server_costs_little_throughput() {
    let rate = rates(&builder().device(DeviceChoice::Cpu), 1000, 192);
    assert!(
        rate[1] > 0.98 * rate[0] && rate[2] > 0.98 * rate[0],
        "more than 2 % are lost"
    );
}

/// With the model of the folder `ROLLOUT_TEST_MODEL`, such as one of the shape of Qwen3-0.6B; else with the bundled one.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn on_a_gpu_clients_get_nine_tenths_of_the_throughput() {
    let mut builder = builder().device(DeviceChoice::Cuda(0));
    // The bundled model's steps are so short that the clients, on the same machine, count.
    let mut share = 0.5;
    if let Some(dir) = std::env::var_os("ROLLOUT_TEST_MODEL") {
        builder = builder.model(dir);
        share = 0.9;
    }
    let rate = rates(&builder, 1000, 512);
    assert!(rate[2] > share * rate[0], "less than {share} is left");
}
