//! A whole GRPO loop on the CPU: groups of rollouts, a verifiable reward, group-relative advantages, a new adapter, a
//! refresh, and again.
//!
//! ```sh
//! cargo run --release -p examples --example grpo            # about a minute
//! cargo run --release -p examples --example grpo -- --short # a few seconds, as CI runs it
//! ```
//!
//! The task is one that the bundled model was not trained for: products of a digit and a three-digit number. It gets most of
//! the written form right and few of the results, so that there is something to gain.
//!
//! What a trainer with a GPU does by back-propagation is done here without gradients, by evolution strategies over few
//! numbers: how strongly each kind of matrix of a LoRA adapter applies, 0 at the start. Each iteration draws antithetic
//! perturbations of these strengths, samples a group of completions per prompt under each, and moves the strengths towards
//! the perturbations whose completions have the greater advantage. The adapter's directions were trained beforehand
//! (`fixtures/adapters/mult-r32`); the loop finds by reward alone that they help, and which of them. Everything around the
//! update is as in a real trainer: the engine, the groups, the reward, the advantages, the merge and the refresh.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use lora_merge::Adapter;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rollout_engine::{DeviceChoice, Engine, Request};

/// The kinds of matrices whose strengths are learned.
const KINDS: [&str; 7] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
];

type Strengths = [f64; KINDS.len()];

/// How long and how wide to search.
struct Plan {
    iterations: usize,
    /// Antithetic pairs of perturbed strengths per iteration.
    pairs: usize,
    prompts: usize,
    /// Completions per prompt and perturbation.
    group: usize,
    noise: f64,
    rate: f64,
}

const LONG: Plan = Plan {
    iterations: 16,
    pairs: 4,
    prompts: 12,
    group: 4,
    noise: 0.15,
    rate: 0.5,
};

const SHORT: Plan = Plan {
    iterations: 5,
    pairs: 3,
    prompts: 8,
    group: 2,
    noise: 0.25,
    rate: 0.8,
};

/// A problem: `digit` times `number`.
#[derive(Clone, Copy)]
struct Problem {
    digit: u32,
    number: u32,
}

impl Problem {
    fn draw(random: &mut ChaCha8Rng) -> Self {
        Self {
            digit: random.random_range(3..10),
            number: random.random_range(100..1000),
        }
    }

    fn prompt(self) -> String {
        format!("What is {} times {}?", self.number, self.digit)
    }

    /// From 0 to 1: half for the share of correct lines, half for the answer; part of the latter for each leading digit.
    fn reward(self, text: &str) -> f64 {
        let Some((work, answer)) = text.rsplit_once("####") else {
            return 0.0;
        };
        let lines: Vec<_> = work.lines().filter(|line| line.contains('=')).collect();
        let correct = lines.iter().filter(|line| holds(line)).count();
        let share = correct as f64 / lines.len().max(1) as f64;
        let (answer, wanted) = (answer.trim(), (self.digit * self.number).to_string());
        let same = answer.bytes().zip(wanted.bytes()).take_while(|(a, b)| a == b);
        let digits = match answer.len() == wanted.len() {
            true => same.count() as f64 / wanted.len() as f64,
            false => 0.0,
        };
        0.5 * share + 0.5 * digits
    }
}

/// Whether a line `a op b = c` is true.
fn holds(line: &str) -> bool {
    let words: Vec<_> = line.split_whitespace().collect();
    let [a, op, b, "=", c] = words.as_slice() else {
        return false;
    };
    let (Ok(a), Ok(b), Ok(c)) = (a.parse::<i64>(), b.parse::<i64>(), c.parse::<i64>()) else {
        return false;
    };
    match *op {
        "+" => a + b == c,
        "-" => a - b == c,
        "*" => a * b == c,
        _ => false,
    }
}

/// The adapter's two files, to build it anew with other strengths.
struct Base {
    config: serde_json::Value,
    alpha: f64,
    safetensors: Vec<u8>,
}

impl Base {
    fn read(folder: &Path) -> Result<Self, Box<dyn Error>> {
        let config = std::fs::read_to_string(folder.join("adapter_config.json"))?;
        let config: serde_json::Value = serde_json::from_str(&config)?;
        let alpha = config["lora_alpha"]
            .as_f64()
            .ok_or("the adapter has no lora_alpha")?;
        let safetensors = std::fs::read(folder.join("adapter_model.safetensors"))?;
        Ok(Self {
            config,
            alpha,
            safetensors,
        })
    }

    /// The adapter with each kind of matrix scaled: its `alpha_pattern` says how strongly which module applies.
    fn with(&self, strengths: &Strengths) -> Result<Adapter, lora_merge::Error> {
        let mut config = self.config.clone();
        let alphas = KINDS.iter().zip(strengths);
        config["alpha_pattern"] = alphas
            .map(|(kind, strength)| (kind.to_string(), (self.alpha * strength).into()))
            .collect::<serde_json::Map<_, _>>()
            .into();
        Adapter::from_bytes(&config.to_string(), &self.safetensors)
    }
}

/// Rewards of a group of completions for each problem, under an adapter.
fn rollout(
    engine: &mut Engine,
    adapter: Adapter,
    problems: &[Problem],
    group: usize,
    temperature: f32,
    seed: u64,
) -> Result<Vec<Vec<f64>>, Box<dyn Error>> {
    // Merges into the weights; what was computed under the policy before is not used again.
    engine.load_adapter(adapter)?;
    let request = |(i, problem): (usize, &Problem)| {
        Request::user(problem.prompt())
            .max_new_tokens(60)
            .temperature(temperature)
            .seed(seed + i as u64)
            .n(group)
    };
    let requests: Vec<_> = problems.iter().enumerate().map(request).collect();
    let mut rewards = Vec::new();
    for (problem, group) in problems.iter().zip(engine.generate_groups(&requests)?) {
        let completions = group?.all()?;
        rewards.push(completions.iter().map(|c| problem.reward(&c.text)).collect());
    }
    Ok(rewards)
}

/// GRPO's advantage: how much better than the other completions of the same prompt, in standard deviations.
fn advantages(rewards: &[f64]) -> Vec<f64> {
    let n = rewards.len() as f64;
    let mean = rewards.iter().sum::<f64>() / n;
    let deviation = (rewards.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / n).sqrt();
    rewards.iter().map(|r| (r - mean) / (deviation + 1e-4)).collect()
}

fn mean(rewards: &[Vec<f64>]) -> f64 {
    let all = rewards.iter().flatten();
    all.clone().sum::<f64>() / all.count().max(1) as f64
}

/// A draw from N(0, 1) for each strength.
fn gaussian(random: &mut ChaCha8Rng) -> Strengths {
    std::array::from_fn(|_| {
        let (u, v): (f64, f64) = (random.random(), random.random());
        (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let short = std::env::args().any(|argument| argument == "--short");
    let plan = if short { SHORT } else { LONG };
    let base = Base::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/adapters/mult-r32"))?;
    let mut engine = Engine::builder()
        .device(DeviceChoice::Cpu)
        .max_batch_size(48)
        .max_seq_length(160)
        .page_size(16)
        .build()?;
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let held_out: Vec<_> = (0..if short { 24 } else { 64 })
        .map(|_| Problem::draw(&mut random))
        .collect();
    let evaluate = |engine: &mut Engine, strengths: &Strengths| -> Result<f64, Box<dyn Error>> {
        let rewards = rollout(engine, base.with(strengths)?, &held_out, 1, 0.0, 0)?;
        Ok(mean(&rewards))
    };

    let start = Instant::now();
    let mut strengths = [0.0; KINDS.len()];
    let first = evaluate(&mut engine, &strengths)?;
    println!("held-out reward before: {first:.3} (greedy)");
    let mut history = Vec::new();
    for iteration in 0..plan.iterations {
        let problems: Vec<_> = (0..plan.prompts).map(|_| Problem::draw(&mut random)).collect();
        let seed = 1000 * iteration as u64;
        let mut perturbations: Vec<Strengths> = Vec::new();
        // For each prompt the rewards of its group: all completions of the iteration.
        let mut groups: Vec<Vec<f64>> = vec![Vec::new(); plan.prompts];
        for _ in 0..plan.pairs {
            let direction = gaussian(&mut random);
            for sign in [1.0, -1.0] {
                let perturbation = direction.map(|d| sign * d);
                let moved = std::array::from_fn(|i| strengths[i] + plan.noise * perturbation[i]);
                // The same random numbers for both: what differs is the policy.
                let rewards = rollout(&mut engine, base.with(&moved)?, &problems, plan.group, 1.0, seed)?;
                for (group, rewards) in groups.iter_mut().zip(rewards) {
                    group.extend(rewards);
                }
                perturbations.push(perturbation);
            }
        }
        // A perturbation is as good as its completions are better than others of the same prompts.
        let mut fitness = vec![0.0; perturbations.len()];
        for group in &groups {
            for (i, advantage) in advantages(group).into_iter().enumerate() {
                fitness[i / plan.group] += advantage / (plan.group * plan.prompts) as f64;
            }
        }
        for (perturbation, fitness) in perturbations.iter().zip(&fitness) {
            for (strength, direction) in strengths.iter_mut().zip(perturbation) {
                *strength += plan.rate * fitness * direction / perturbations.len() as f64;
            }
        }
        let reward = mean(&groups);
        history.push(reward);
        println!(
            "iteration {:2}: reward {reward:.3} {:40}| policy {}, {:.1} s",
            iteration + 1,
            "#".repeat((40.0 * reward) as usize),
            engine.policy().number,
            start.elapsed().as_secs_f64()
        );
    }
    let last = evaluate(&mut engine, &strengths)?;
    println!("held-out reward after: {last:.3} (greedy)");
    for (kind, strength) in KINDS.iter().zip(strengths) {
        println!("  {kind:<10} {strength:+.2}");
    }
    let statistics = engine.statistics();
    println!(
        "{} completions, {} new tokens, {} prompt tokens computed, {} saved by groups",
        statistics.finished_completions,
        statistics.new_tokens,
        statistics.prefill_tokens,
        statistics.saved_prefill_tokens
    );
    // The seeds are fixed, so that this cannot fail by chance.
    assert!(
        last > first + 0.02,
        "the reward did not rise: {first:.3} to {last:.3}"
    );
    Ok(())
}
