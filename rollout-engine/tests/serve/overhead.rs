//! What the server costs.

use std::time::Instant;

use rollout_engine::serve::Server;
use rollout_engine::{DeviceChoice, Engine, EngineBuilder, Request};
use serde_json::json;

use crate::support::{Gate, settings, start, start_on};

const PROMPTS: usize = 64;
const ROUNDS: usize = 5;

fn builder() -> EngineBuilder {
    Engine::builder().max_batch_size(PROMPTS).max_seq_length(512)
}

/// Prompt `i`, as in `rollout bench`.
fn prompt(i: usize, vocab: usize) -> Vec<u32> {
    (0..64 + 37 * i % 193)
        .map(|j| ((7919 * i + 104_729 * j) % vocab) as u32)
        .collect()
}

fn body(prompts: serde_json::Value, new_tokens: usize) -> serde_json::Value {
    json!({
        "model": "base", "prompt": prompts, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": true,
        "logprobs": 0, "return_token_ids": true,
    })
}

/// Tokens per second of the same prompts straight through the engine, as one HTTP request, and as 64 concurrent ones; in
/// turns, so that what else the machine does hits all alike. The best round of each counts.
fn rates(builder: &EngineBuilder, vocab: usize, new_tokens: usize) -> [f64; 3] {
    let prompt = |i| prompt(i, vocab);
    let body = |prompts| body(prompts, new_tokens);
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
    let all: Vec<_> = (0..PROMPTS).map(prompt).collect();
    let mut times = [const { Vec::new() }; 3];
    let mut time = |which: usize, run: &mut dyn FnMut()| {
        let begin = Instant::now();
        run();
        times[which].push(begin.elapsed().as_secs_f64());
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
    println!("seconds of the rounds: {times:.4?}");
    let rate = times.map(|times| {
        let best = times.into_iter().fold(f64::INFINITY, f64::min);
        (PROMPTS * new_tokens) as f64 / best
    });
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

/// Seconds that the threads of this process with a name have computed.
#[cfg(target_os = "linux")]
fn computed(name: &str) -> f64 {
    let mut nanoseconds = 0;
    for task in std::fs::read_dir("/proc/self/task").expect("threads") {
        let task = task.expect("a thread").path();
        // A thread may end meanwhile.
        let read = |file| std::fs::read_to_string(task.join(file)).unwrap_or_default();
        if read("comm").trim() == name {
            let ran = read("schedstat").split(' ').next().map_or(Ok(0), str::parse);
            nanoseconds += ran.unwrap_or(0u64);
        }
    }
    nanoseconds as f64 / 1e9
}

/// As parts of the time that the engine steps: what the engine's thread does between steps, and what the threads that speak
/// HTTP compute. Unlike tokens per second neither depends on what else the machine does.
#[test]
#[cfg(target_os = "linux")]
fn between_steps_and_beside_them_less_than_two_percent_is_computed() {
    let server = Server::from_builder(builder().device(DeviceChoice::Cpu), settings()).expect("loads");
    // Tests beside this one have servers, too.
    const HTTP: &str = "measured-http";
    let server = start_on(server, Gate::default(), HTTP);
    let all: Vec<_> = (0..PROMPTS).map(|i| prompt(i, 1000)).collect();
    let body = body(json!(all), 48);
    let cores = std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let before = (
            server.metric("rollout_busy_seconds_total"),
            server.metric("rollout_request_seconds_sum"),
            computed(HTTP),
        );
        assert_eq!(server.post("/v1/completions", &body).status, 200);
        let computed = computed(HTTP) - before.2;
        let stepped = server.metric("rollout_busy_seconds_total") - before.0;
        let whole = server.metric("rollout_request_seconds_sum") - before.1;
        assert!(computed > 0.0 && stepped > 0.0 && whole > 0.0);
        // Steps use all cores.
        let share = (whole - stepped) / stepped + computed / (cores * stepped);
        println!(
            "{whole:.3} s, of which {stepped:.3} s in steps; {computed:.4} s beside them: {:.2} %",
            100.0 * share
        );
        best = best.min(share);
        if best < 0.02 {
            break;
        }
    }
    assert!(best < 0.02, "{:.2} %", 100.0 * best);
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
