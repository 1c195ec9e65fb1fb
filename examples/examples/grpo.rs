//! A whole GRPO loop on the CPU: groups of rollouts, a verifiable reward, group-relative advantages, a new adapter, a
//! refresh, and again.
//!
//! ```sh
//! cargo run --release -p examples --example grpo            # about a minute
//! cargo run --release -p examples --example grpo -- --short # a few seconds, as CI runs it
//! ```
//!
//! The task: a number of three digits times a small one, in the form that the bundled model knows from training. Sampled at
//! temperature 1.6 it gets a good part of the results wrong, so that there is something to gain.
//!
//! What a trainer with a GPU does by back-propagation is done here without gradients, by evolution strategies over few
//! numbers: a gain for some matrices of the model, 0 at the start. A LoRA adapter of full rank, `A = W` and `B = 1`, applies
//! them as `W + gain·W`. Each iteration draws antithetic perturbations of the gains, samples a group of completions per prompt
//! under each, and moves the gains towards the perturbations whose completions have the greater advantage. Three numbers can
//! make the model surer of what it knows, which is what it gains here, and teach it nothing new. Everything around the update
//! is as in a real trainer: the engine, the groups, the reward, the advantages, the merge and the refresh.

use std::error::Error;
use std::time::Instant;

use half::bf16;
use lora_merge::{Adapter, AdapterConfig, TensorSlice, TensorValues};
use qwen3_model::{Projection, Qwen3Config, Weights};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rollout_engine::{DeviceChoice, Engine, Request, bundled};

/// At which completions are sampled and rewarded.
const TEMPERATURE: f32 = 1.6;

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
    iterations: 12,
    pairs: 4,
    prompts: 16,
    group: 4,
    noise: 0.2,
    rate: 1.5,
};

const SHORT: Plan = Plan {
    iterations: 4,
    pairs: 4,
    prompts: 8,
    group: 2,
    noise: 0.2,
    rate: 2.0,
};

/// A problem: `number` times `factor`.
#[derive(Clone, Copy)]
struct Problem {
    number: u32,
    factor: u32,
}

impl Problem {
    fn draw(random: &mut ChaCha8Rng) -> Self {
        Self {
            number: random.random_range(100..400),
            factor: random.random_range(3..6),
        }
    }

    fn prompt(self) -> String {
        let Self { number, factor } = self;
        format!(
            "Tina has {number} tickets. A friend has {factor} times as many, and Tina takes that amount instead. What is \
             the number of tickets now?"
        )
    }

    /// From 0 to 1: a quarter for writing the right product down, a quarter by how many leading digits of the answer are
    /// right, half for the answer.
    fn reward(self, text: &str) -> f64 {
        let Self { number, factor } = self;
        let wanted = (number * factor).to_string();
        let answer = text.rsplit_once("####").map_or("", |(_, answer)| answer.trim());
        let same = answer.bytes().zip(wanted.bytes()).take_while(|(a, b)| a == b);
        let digits = match answer.len() == wanted.len() {
            true => same.count() as f64 / wanted.len() as f64,
            false => 0.0,
        };
        let product = text.starts_with(&format!("{number} * {factor} = "));
        0.25 * f64::from(product) + 0.25 * digits + 0.5 * f64::from(answer == wanted)
    }
}

/// The matrices that have a gain, with what an adapter needs to apply it.
struct Gained {
    weights: Weights,
    hidden: usize,
    /// The identity `[hidden, hidden]`.
    identity: Vec<bf16>,
    /// Module, and its layer and projection; the head has none.
    modules: Vec<(String, Option<(usize, Projection)>)>,
}

impl Gained {
    /// The last layer's two outputs and the head: what is added to the residual last, and what reads it.
    fn of_bundled_model() -> Result<Self, Box<dyn Error>> {
        let folder = bundled::model_dir()?;
        let config = Qwen3Config::from_dir(&folder)?;
        let hidden = config.hidden_size;
        let last = config.n_layers - 1;
        let outputs = [Projection::O, Projection::Down];
        let outputs = outputs.map(|output| (output.module(last), Some((last, output))));
        let one = |i| bf16::from_f32(if i % (hidden + 1) == 0 { 1.0 } else { 0.0 });
        Ok(Self {
            modules: outputs.into_iter().chain([("lm_head".into(), None)]).collect(),
            weights: Weights::open(&folder, &config)?,
            identity: (0..hidden * hidden).map(one).collect(),
            hidden,
        })
    }

    /// The adapter that adds to each matrix its gain times itself.
    fn adapter(&self, gains: &[f64]) -> Result<Adapter, lora_merge::Error> {
        let targets = self.modules.iter().map(|(name, _)| name.clone());
        let mut config = AdapterConfig::new(self.hidden, 0.0, targets.clone());
        // An adapter is scaled by alpha over rank.
        let alphas = gains.iter().map(|gain| gain * self.hidden as f64);
        config.alpha_pattern = targets.zip(alphas).collect();
        let mut names = Vec::new();
        for (name, _) in &self.modules {
            names.push([format!("{name}.lora_A.weight"), format!("{name}.lora_B.weight")]);
        }
        let mut tensors = Vec::new();
        let square = [self.hidden, self.hidden];
        let shapes = self.modules.iter().map(|(_, place)| match place {
            Some((layer, projection)) => {
                let matrix = self.weights.layers[*layer].projection(*projection);
                (matrix, [matrix.rows(), matrix.cols()])
            }
            None => {
                let head = &self.weights.lm_head;
                (head, [head.rows(), head.cols()])
            }
        });
        let shapes: Vec<_> = shapes.collect();
        for (([name_a, name_b], (matrix, shape)), (_, place)) in names.iter().zip(&shapes).zip(&self.modules)
        {
            // `W = 1·W` where the output has the rank's size, `W = W·1` for the head, whose input has.
            let (a, b) = match place {
                Some(_) => ((shape, matrix.data()), (&square, self.identity.as_slice())),
                None => ((&square, self.identity.as_slice()), (shape, matrix.data())),
            };
            for (name, (shape, values)) in [(name_a, a), (name_b, b)] {
                tensors.push(TensorSlice {
                    name,
                    shape,
                    values: TensorValues::Bf16(values),
                });
            }
        }
        Adapter::from_tensors(config, &tensors)
    }
}

/// Rewards of a group of completions for each problem, under an adapter.
fn rollout(
    engine: &mut Engine,
    adapter: Adapter,
    problems: &[Problem],
    group: usize,
    seed: u64,
) -> Result<Vec<Vec<f64>>, Box<dyn Error>> {
    // Merges into the weights; what was computed under the policy before is not used again.
    engine.load_adapter(adapter)?;
    let request = |(i, problem): (usize, &Problem)| {
        Request::user(problem.prompt())
            .max_new_tokens(40)
            .temperature(TEMPERATURE)
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

/// A draw from N(0, 1).
fn gaussian(random: &mut ChaCha8Rng) -> f64 {
    let (u, v): (f64, f64) = (random.random(), random.random());
    (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

fn main() -> Result<(), Box<dyn Error>> {
    let short = std::env::args().any(|argument| argument == "--short");
    let plan = if short { SHORT } else { LONG };
    let model = Gained::of_bundled_model()?;
    let mut engine = Engine::builder()
        .device(DeviceChoice::Cpu)
        .max_batch_size(64)
        .max_seq_length(160)
        .page_size(16)
        .build()?;
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let held_out: Vec<_> = (0..32).map(|_| Problem::draw(&mut random)).collect();
    let start = Instant::now();
    let mut gains = vec![0.0; model.modules.len()];
    let first = mean(&rollout(&mut engine, model.adapter(&gains)?, &held_out, 4, 0)?);
    println!("held-out reward before: {first:.3}");
    for iteration in 0..plan.iterations {
        let problems: Vec<_> = (0..plan.prompts).map(|_| Problem::draw(&mut random)).collect();
        let seed = 1000 * (1 + iteration as u64);
        let mut perturbations: Vec<Vec<f64>> = Vec::new();
        // For each prompt the rewards of its group: all completions of the iteration.
        let mut groups: Vec<Vec<f64>> = vec![Vec::new(); plan.prompts];
        for _ in 0..plan.pairs {
            let direction: Vec<_> = gains.iter().map(|_| gaussian(&mut random)).collect();
            for sign in [1.0, -1.0] {
                let perturbation: Vec<_> = direction.iter().map(|d| sign * d).collect();
                let moved = gains.iter().zip(&perturbation);
                let moved: Vec<_> = moved.map(|(gain, d)| gain + plan.noise * d).collect();
                // The same random numbers for all: what differs is the policy.
                let rewards = rollout(&mut engine, model.adapter(&moved)?, &problems, plan.group, seed)?;
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
            for (gain, direction) in gains.iter_mut().zip(perturbation) {
                *gain += plan.rate * fitness * direction / perturbations.len() as f64;
            }
        }
        let reward = mean(&groups);
        println!(
            "iteration {:2}: reward {reward:.3} {:40}| policy {}, {:.1} s",
            iteration + 1,
            "#".repeat((40.0 * reward) as usize),
            engine.policy().number,
            start.elapsed().as_secs_f64()
        );
    }
    let last = mean(&rollout(&mut engine, model.adapter(&gains)?, &held_out, 4, 0)?);
    println!("held-out reward after: {last:.3}");
    for ((module, _), gain) in model.modules.iter().zip(&gains) {
        println!("  {module:<32} {gain:+.2}");
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
        last > first + 0.03,
        "the reward did not rise: {first:.3} to {last:.3}"
    );
    Ok(())
}
