//! Completes a few problems and prints each completion as it finishes.
//!
//! `cargo run --release -p examples --example generate [MODEL_FOLDER]`

use rollout_engine::{Engine, Error, Finished, Request, bundled};

fn main() -> Result<(), Error> {
    let mut builder = Engine::builder().max_batch_size(8);
    if let Some(folder) = std::env::args_os().nth(1) {
        builder = builder.model(folder);
    }
    let mut engine = builder.build()?;

    let requests: Vec<Request> = bundled::PROMPTS
        .iter()
        .map(|problem| Request::user(*problem).max_new_tokens(200))
        .collect();

    // In the order in which they finish; `engine.generate(&requests)` gives them in the order of the requests.
    for finished in engine.stream(&requests) {
        let Finished { index, result, .. } = finished?;
        // A request that could not be completed has its own error and does not disturb the others.
        match result {
            Ok(completion) => {
                let mean = completion.logprobs.iter().sum::<f32>() / completion.logprobs.len() as f32;
                println!("problem {index}: {}", bundled::PROMPTS[index]);
                println!("{}\n(mean log-probability {mean:.4})\n", completion.text);
            }
            Err(error) => println!("problem {index}: {error}"),
        }
    }
    println!("{:?}", engine.statistics());
    Ok(())
}
