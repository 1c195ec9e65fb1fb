//! Policies by name, and weights in 4 bits, through the engine on a GPU: in graphs, several policies in one batch.
#![cfg(feature = "cuda")]

mod gpu_support;

use cuda_graphs::few_cases;
use gpu_support::{CLOSE, Golden, adapter, pool, repository};
use rollout_engine::{Completion, DeviceChoice, Engine, MergeMode, Request};

const NAMES: [&str; 4] = ["mult-r32", "qv-r8", "lorabias-r4", "dora-r8"];

fn engine(model: &str, batch: usize) -> Engine {
    let batch = if cuda_graphs::few_cases() { 4 } else { batch };
    Engine::builder()
        .model(repository().join(model))
        .device(DeviceChoice::Cuda(0))
        .pool(pool(batch, 64, 1 + batch * 8, 1024))
        .merge_mode(MergeMode::Unmerged)
        .build()
        .expect("builds")
}

fn all(engine: &mut Engine, requests: &[Request]) -> Vec<Completion> {
    let results = engine.generate(requests).expect("runs");
    results
        .into_iter()
        .map(|result| result.expect("completes"))
        .collect()
}

/// Sure completions are equal, and most of all.
fn agree(name: &str, golden: &[Golden], completions: &[Completion]) {
    assert_eq!(golden.len(), completions.len(), "{name}");
    let mut equal = 0;
    for (case, completion) in golden.iter().zip(completions) {
        let same = completion.token_ids == case.completion;
        equal += usize::from(same);
        assert!(
            same || case.gap <= 2.0 * CLOSE,
            "{name}: a sure completion differs"
        );
    }
    eprintln!("{name}: {equal} of {} equal", golden.len());
    assert!(
        2 * equal > golden.len(),
        "{name}: only {equal} of {} are equal",
        golden.len()
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn policies_of_one_batch_are_those_of_being_alone() {
    let names = if few_cases() { &NAMES[..2] } else { &NAMES };
    let mut together = engine("rollout-engine/models/tiny-qwen3-math", 32);
    together
        .serve_policies(names.iter().map(|&name| (name, adapter(name))))
        .expect("serves");
    let goldens: Vec<_> = names.iter().map(|name| Golden::all(name)).collect();
    let most = if cuda_graphs::few_cases() { 1 } else { usize::MAX };
    let least = goldens.iter().map(Vec::len).min().expect("some").min(most);
    let mut requests = Vec::new();
    for i in 0..least {
        for (&name, golden) in names.iter().zip(&goldens) {
            let request = Request::token_ids(golden[i].prompt.clone()).max_new_tokens(400);
            requests.push(request.policy(name));
        }
        // And the base among them.
        requests.push(
            Request::token_ids(goldens[0][i].prompt.clone()).max_new_tokens(if few_cases() {
                12
            } else {
                60
            }),
        );
    }
    let got = all(&mut together, &requests);
    let of = |i: usize| -> Vec<Completion> { got.iter().skip(i).step_by(names.len() + 1).cloned().collect() };
    for (i, &name) in names.iter().enumerate() {
        let mine = of(i);
        agree(name, &goldens[i][..least], &mine);
        let version = together.named_policies()[i].version;
        assert!(
            mine.iter()
                .all(|c| c.policies.len() == 1 && c.policies[0].version == version)
        );
        let mut alone = engine("rollout-engine/models/tiny-qwen3-math", 32);
        alone.load_adapter(adapter(name)).expect("loads");
        let requests: Vec<_> = goldens[i][..least]
            .iter()
            .map(|case| Request::token_ids(case.prompt.clone()).max_new_tokens(400))
            .collect();
        let same = all(&mut alone, &requests);
        let equal = same
            .iter()
            .zip(&mine)
            .filter(|(a, b)| a.token_ids == b.token_ids)
            .count();
        eprintln!("{name}: {equal} of {least} as alone");
        assert!(10 * equal >= 8 * least, "{name}: {equal} of {least} as alone");
    }
    let base: Vec<_> = requests
        .iter()
        .skip(names.len())
        .step_by(names.len() + 1)
        .cloned()
        .collect();
    let alone = all(&mut engine("rollout-engine/models/tiny-qwen3-math", 32), &base);
    let same = alone
        .iter()
        .zip(&of(names.len()))
        .filter(|(a, b)| a.token_ids == b.token_ids)
        .count();
    assert!(10 * same >= 8 * least, "base: {same} of {least}");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn golden_completions_of_weights_in_4_bits() {
    for batch in if few_cases() {
        vec![8]
    } else {
        vec![1, 8, 16, 32, 64]
    } {
        let mut engine = engine("fixtures/tiny-qwen3-math-bnb-nf4", batch);
        let turns = ["nf4", "nf4+mult-r32", "nf4"];
        for name in &turns[if few_cases() { 1..2 } else { 0..3 }] {
            match name.split_once('+') {
                Some((_, name)) => drop(engine.load_adapter(adapter(name)).expect("loads")),
                None => drop(engine.unload_adapters().expect("unloads")),
            }
            let mut golden = Golden::all(name);
            golden.truncate(match few_cases() {
                true => 1,
                false if batch == 1 => 4,
                false => 64,
            });
            let requests: Vec<_> = golden
                .iter()
                .map(|case| Request::token_ids(case.prompt.clone()).max_new_tokens(400))
                .collect();
            let completions = all(&mut engine, &requests);
            agree(&format!("{name}, batch {batch}"), &golden, &completions);
        }
        if batch > 1 {
            engine
                .serve_policies([("mult", adapter("mult-r32")), ("qv", adapter("qv-r8"))])
                .expect("serves");
            let few = if few_cases() { 1 } else { usize::MAX };
            let (base, adapted) = (Golden::all("nf4"), Golden::all("nf4+mult-r32"));
            let prompt = |case: &Golden| Request::token_ids(case.prompt.clone()).max_new_tokens(400);
            let mut requests = Vec::new();
            for (base, adapted) in base.iter().zip(&adapted).take(few) {
                requests.extend([
                    prompt(base),
                    prompt(adapted).policy("mult"),
                    prompt(adapted).policy("qv"),
                ]);
            }
            let got = all(&mut engine, &requests);
            let of = |i: usize| -> Vec<Completion> { got.iter().skip(i).step_by(3).cloned().collect() };
            agree(
                &format!("base beside others, batch {batch}"),
                &base[..requests.len() / 3],
                &of(0),
            );
            agree(
                &format!("an adapter beside others, batch {batch}"),
                &adapted[..requests.len() / 3],
                &of(1),
            );
        }
    }
}
