//! Completions as they finish, under a progress bar that counts tokens.
//!
//! `cargo run --release -p examples --example stream_progress`

use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use rollout_engine::{DeviceChoice, Engine, Event, Request};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut engine = Engine::builder()
        .max_batch_size(8)
        .device(DeviceChoice::Auto)
        .build()?;
    let requests: Vec<Request> = (1..=12)
        .map(|step| Request::user(format!("Count from 5 to 60 by {step}.")).max_new_tokens(40))
        .collect();

    // The bar goes to standard error, and only to a terminal; standard output has the completions alone.
    let bar = ProgressBar::new(requests.iter().map(|r| r.sampling.max_new_tokens as u64).sum());
    bar.set_style(ProgressStyle::with_template("{wide_bar} {pos} tokens {msg}")?);

    let start = Instant::now();
    let mut index_of = std::collections::HashMap::new();
    for (index, request) in requests.iter().enumerate() {
        index_of.insert(engine.submit(request)?, index);
    }
    let mut finished = 0;
    // One step at a time: tokens as they are sampled, and completions as they end.
    while engine.has_unfinished() {
        for event in engine.step()? {
            match event {
                Event::Token { .. } => bar.inc(1),
                Event::Finished { request, result, .. } => {
                    let completion = result?;
                    finished += 1;
                    // Requests that stop early do not use all the tokens that the bar expects.
                    let unused = 40 - completion.token_ids.len() as u64;
                    bar.set_length(bar.length().unwrap_or_default() - unused);
                    bar.suspend(|| println!("{:>2}: {}", index_of[&request], completion.text));
                }
                _ => {}
            }
        }
        let rate = engine.statistics().new_tokens as f64 / start.elapsed().as_secs_f64();
        bar.set_message(format!("{finished}/{} done, {rate:.0} tok/s", requests.len()));
    }
    bar.finish_and_clear();
    assert_eq!(finished, requests.len());
    Ok(())
}
