//! A whole GRPO loop on the CPU: groups of rollouts, a verifiable reward, group-relative advantages, a new adapter, a
//! refresh, and again.
//!
//! ```sh
//! cargo run --release -p examples --example grpo            # about a minute
//! cargo run --release -p examples --example grpo -- --short # a few seconds, as CI runs it
//! ```
//!
//! What a trainer with a GPU does by back-propagation is done here without gradients, by evolution strategies over three
//! numbers (`examples::gains`). Each iteration draws antithetic perturbations of them, samples a group of completions per
//! prompt under each, and moves the gains towards the perturbations whose completions have the greater advantage. That can
//! make the model surer of what it knows, which is what it gains here, and teach it nothing new. Everything around the update
//! is as in a real trainer: the engine, the groups, the reward, the advantages, the merge and the refresh.

use std::error::Error;

use examples::{arithmetic::Problem, gains::Gained};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rollout_engine::{DeviceChoice, Engine, Request, group_advantages};

/// How far gains are perturbed.
const NOISE: f64 = 0.2;
/// Antithetic pairs of perturbations per iteration.
const PAIRS: usize = 4;

/// Rewards of a group of completions for each problem, under the policy with these gains.
fn rollout(
    engine: &mut Engine,
    (model, gains): (&Gained, &[f64]),
    problems: &[Problem],
    group: usize,
    seed: u64,
) -> Result<Vec<Vec<f64>>, Box<dyn Error>> {
    // Merges into the weights; what was computed under the policy before is not used again.
    engine.load_adapter(model.adapter(gains)?)?;
    let request = |(i, problem): (usize, &Problem)| {
        let request = Request::user(problem.prompt()).max_new_tokens(40);
        request.temperature(1.6).seed(seed + i as u64).n(group)
    };
    let requests: Vec<_> = problems.iter().enumerate().map(request).collect();
    let mut rewards = Vec::new();
    for (problem, group) in problems.iter().zip(engine.generate_groups(&requests)?) {
        let completions = group?.all()?;
        rewards.push(completions.iter().map(|c| problem.reward(&c.text)).collect());
    }
    Ok(rewards)
}

fn mean(rewards: &[Vec<f64>]) -> f64 {
    let all = rewards.iter().flatten();
    all.clone().sum::<f64>() / all.count().max(1) as f64
}

fn main() -> Result<(), Box<dyn Error>> {
    let short = std::env::args().any(|argument| argument == "--short");
    let (iterations, prompts, group, rate) = if short { (4, 8, 2, 2.0) } else { (12, 16, 4, 1.5) };
    let model = Gained::of_bundled_model()?;
    let builder = Engine::builder().device(DeviceChoice::Cpu).max_batch_size(64);
    let mut engine = builder.max_seq_length(160).page_size(16).build()?;
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let held_out: Vec<_> = (0..32).map(|_| Problem::draw(&mut random)).collect();
    let mut gains = vec![0.0; model.modules().len()];
    let before = mean(&rollout(&mut engine, (&model, &gains), &held_out, 4, 0)?);
    println!("held-out reward before: {before:.3}");
    for iteration in 1..=iterations {
        let problems: Vec<_> = (0..prompts).map(|_| Problem::draw(&mut random)).collect();
        let mut perturbations: Vec<Vec<f64>> = Vec::new();
        // For each prompt the rewards of its group: all completions of the iteration.
        let mut groups: Vec<Vec<f64>> = vec![Vec::new(); prompts];
        for _ in 0..PAIRS {
            let direction = model.direction(&mut random);
            for sign in [1.0, -1.0] {
                let both = gains.iter().zip(&direction);
                let moved: Vec<_> = both.map(|(gain, d)| gain + sign * NOISE * d).collect();
                // The same random numbers for all: what differs is the policy.
                let rewards = rollout(&mut engine, (&model, &moved), &problems, group, 1000 * iteration)?;
                for (group, rewards) in groups.iter_mut().zip(rewards) {
                    group.extend(rewards);
                }
                perturbations.push(direction.iter().map(|d| sign * d).collect());
            }
        }
        // A perturbation is as good as its completions are better than others of the same prompts.
        let mut step = vec![0.0; gains.len()];
        for rewards in &groups {
            for (i, advantage) in group_advantages(rewards).into_iter().enumerate() {
                let weight = advantage / (group * prompts * perturbations.len()) as f64;
                for (step, direction) in step.iter_mut().zip(&perturbations[i / group]) {
                    *step += weight * direction;
                }
            }
        }
        for (gain, step) in gains.iter_mut().zip(&step) {
            *gain += rate * step;
        }
        let (reward, policy) = (mean(&groups), engine.policy().number);
        let bar = "#".repeat((40.0 * reward) as usize);
        println!("iteration {iteration:2}: reward {reward:.3} {bar:40}| policy {policy}");
    }
    let after = mean(&rollout(&mut engine, (&model, &gains), &held_out, 4, 0)?);
    println!("held-out reward after: {after:.3}, with gains");
    for (module, gain) in model.modules().zip(&gains) {
        println!("  {module:<32} {gain:+.2}");
    }
    let saved = engine.statistics().saved_prefill_tokens;
    println!("{saved} prompt tokens were not computed again thanks to groups");
    // The seeds are fixed, so that this cannot fail by chance.
    assert!(
        after > before + 0.03,
        "the reward did not rise: {before:.3} to {after:.3}"
    );
    Ok(())
}
