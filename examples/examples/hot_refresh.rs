//! Refreshes an adapter between generations and in the middle of one, as a trainer does after an optimiser step. On a GPU
//! the graphs that were captured at the start are replayed throughout: merged weights stay at their addresses.
//!
//! ```sh
//! cargo run --release -p examples --example hot_refresh
//! ```

use std::path::Path;

use lora_merge::Adapter;
use rollout_engine::{Completion, Engine, Event, Request};

fn show(what: &str, completion: &Completion) {
    let policies: Vec<String> = completion
        .policies
        .iter()
        .map(|span| format!("policy {} from token {}", span.version, span.first_token))
        .collect();
    println!("{what}: {:?} ({})", completion.text, policies.join(", "));
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/adapters/mult-r32");
    let mut engine = Engine::builder().max_batch_size(4).build()?; // on a GPU, if there is one
    println!("on {}", engine.scheduler().device());
    let requests = [Request::user("What is 23 times 45?").max_new_tokens(60)];

    let base = engine.generate(&requests)?.remove(0)?;
    show("base", &base);

    // After an optimiser step: from a folder, from bytes, from tensors, or as here from memory.
    let adapter = Adapter::load(&folder)?;
    let update = engine.load_adapter(adapter.perturbed(0.02, 1))?;
    println!(
        "refresh took {:?}, {} matrices",
        update.elapsed, update.adapted_modules
    );
    let moved = engine.generate(&requests)?.remove(0)?;
    show("perturbed", &moved);
    engine.load_adapter(adapter)?;
    let trained = engine.generate(&requests)?.remove(0)?;
    show("trained", &trained);
    assert_eq!(trained.policies[0].version.number, 2);
    assert_ne!(trained.token_ids, base.token_ids);

    // In the middle of a generation: the request goes on under the new policy, and tells where that begins.
    engine.submit(&requests[0])?;
    for _ in 0..8 {
        engine.step()?;
    }
    let update = engine.unload_adapters()?;
    println!(
        "{} request goes on under the base model",
        update.continued_requests
    );
    while engine.has_unfinished() {
        for event in engine.step()? {
            if let Event::Finished { result, .. } = event {
                let mixed = result?;
                show("both", &mixed);
                assert_eq!(mixed.policies.len(), 2);
            }
        }
    }
    Ok(())
}
