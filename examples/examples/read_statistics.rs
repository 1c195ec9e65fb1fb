//! What an engine counts, and what the numbers tell: preemption under a small page pool, and rows that were wasted.
//!
//! `cargo run --release -p examples --example read_statistics`

use rollout_engine::{DeviceChoice, Engine, Error, Request, Statistics};

fn run(n_pages: usize) -> Result<(Statistics, Vec<Vec<u32>>), Error> {
    let mut engine = Engine::builder()
        .device(DeviceChoice::Cpu)
        .max_batch_size(8)
        .page_size(16)
        .n_pages(n_pages)
        .build()?;
    let requests: Vec<Request> = (0..8)
        .map(|i| Request::user(format!("Count from {i} to 90 by 1.")).max_new_tokens(60))
        .collect();
    let completions = engine.generate(&requests)?;
    let token_ids = completions
        .into_iter()
        .map(|completion| completion.map(|completion| completion.token_ids))
        .collect::<Result<_, _>>()?;
    Ok((*engine.statistics(), token_ids))
}

fn main() -> Result<(), Error> {
    let (ample, expected) = run(256)?;
    let (tight, token_ids) = run(16)?;
    // Whatever was preempted and computed anew, the completions are the same.
    assert_eq!(token_ids, expected);

    println!("{:<34}{:>12}{:>12}", "", "256 pages", "16 pages");
    let row = |name: &str, value: fn(&Statistics) -> u64| {
        println!("{name:<34}{:>12}{:>12}", value(&ample), value(&tight));
    };
    row("steps", |s| s.steps);
    row("tokens of completions", |s| s.new_tokens);
    row("prompt tokens computed", |s| s.prefill_tokens);
    row("  of which once more", |s| s.resumed_tokens);
    row("preemptions", |s| s.preemptions);
    row("most sequences at once", |s| s.max_running);
    row("rows of sequences that had ended", |s| s.wasted_rows);

    let per_step = |s: &Statistics| s.decode_rows as f64 / s.steps as f64;
    println!(
        "\ndecode rows per step: {:.1} and {:.1}",
        per_step(&ample),
        per_step(&tight)
    );
    println!(
        "A rising number of tokens computed once more says that the page pool is too small for the batch."
    );
    assert_eq!(ample.preemptions, 0);
    assert!(tight.preemptions > 0 && tight.resumed_tokens > 0);
    assert_eq!(ample.new_tokens, tight.new_tokens);
    Ok(())
}
