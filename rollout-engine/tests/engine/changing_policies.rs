//! Policies that come, go and are replaced while groups run, are cancelled, preempted and taken from the prefix cache.

use std::collections::HashMap;
use std::sync::LazyLock;

use lora_merge::{ActiveAdapter, Adapter, PolicyVersion};
use proptest::prelude::*;
use rollout_engine::{
    Error, Event, FakeRunner, RequestId, RunnerShape, SamplingParams, Scheduler, TokenCompletion,
};

use crate::support::adapter;

const NAMES: [&str; 3] = ["a", "b", "c"];

static ADAPTERS: LazyLock<[Vec<ActiveAdapter>; 4]> = LazyLock::new(|| {
    ["qv-r8", "mult-r32", "rslora-r8", "layers13-r4"].map(|name| {
        let adapter = Adapter::load(adapter(name)).expect("loads");
        vec![ActiveAdapter::new(adapter)]
    })
});

#[derive(Clone, Debug)]
enum Operation {
    Submit {
        prompt: Vec<u32>,
        new: usize,
        n: usize,
        /// Of [`NAMES`]; none is the base.
        name: Option<usize>,
    },
    Step(usize),
    /// The how manieth of the requests.
    Cancel(usize),
    /// Which adapter each name has from now on, if any.
    Serve([Option<usize>; 3]),
    Forget,
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let submit = (
        0usize..3,
        1usize..14,
        1usize..14,
        1usize..4,
        prop::option::of(0usize..3),
    );
    let submit = submit.prop_map(|(start, len, new, n, name)| Operation::Submit {
        // Few different ones, so that prefixes are shared.
        prompt: (0..len).map(|i| (start + i / 6) as u32).collect(),
        new,
        n,
        name,
    });
    // No adapter under two names: the runner would tell them apart, and the scheduler need not.
    let set = Just([0usize, 1, 2, 3]).prop_shuffle();
    let serve = (set, any::<[bool; 3]>())
        .prop_map(|(of, given)| Operation::Serve([0, 1, 2].map(|i| given[i].then_some(of[i]))));
    let operation = prop_oneof![
        5 => submit,
        5 => (1usize..6).prop_map(Operation::Step),
        1 => (0usize..20).prop_map(Operation::Cancel),
        2 => serve,
        1 => Just(Operation::Forget),
    ];
    prop::collection::vec(operation, 1..40)
}

fn shape() -> impl Strategy<Value = RunnerShape> {
    (1usize..6, 8usize..24, 1usize..6, 1usize..3, 1usize..20).prop_map(
        |(max_batch_size, n_pages, page_size, max_in_flight, max_prefill_tokens)| RunnerShape {
            max_batch_size,
            // The longest request fits.
            n_pages: n_pages.max(2 + 28usize.div_ceil(page_size)),
            page_size,
            max_in_flight,
            max_prefill_tokens,
            ..FakeRunner::small_shape()
        },
    )
}

/// A scheduler, and what the fake runner's tokens depend on under each version that was ever in force.
struct Subject {
    scheduler: Scheduler<FakeRunner>,
    keys: HashMap<PolicyVersion, u64>,
    by_digest: HashMap<[u8; 32], u64>,
    events: Vec<Event<TokenCompletion>>,
}

impl Subject {
    fn serve(&mut self, set: [Option<usize>; 3]) {
        let named = NAMES.iter().zip(set);
        let policies: Vec<_> = named
            .filter_map(|(name, adapter)| Some((name.to_string(), ADAPTERS[adapter?].clone())))
            .collect();
        let before = self.scheduler.named_policies().to_vec();
        match self.scheduler.serve_policies(&policies, &mut self.events) {
            Ok(update) => {
                let digests = update.policies.iter().enumerate();
                let by_digest = digests.map(|(i, digest)| {
                    let fresh = update.version.number + FakeRunner::named(i);
                    (*digest, self.by_digest.get(digest).copied().unwrap_or(fresh))
                });
                self.by_digest = by_digest.collect();
                for policy in self.scheduler.named_policies() {
                    self.keys
                        .insert(policy.version, self.by_digest[&policy.version.sha256]);
                }
            }
            Err(Error::PolicyInUse { .. }) => assert_eq!(self.scheduler.named_policies(), before),
            Err(other) => panic!("unexpected: {other}"),
        }
    }

    /// Every token is the one that follows if all before it was computed under the policy that it was sampled under.
    fn check(&self, completion: &TokenCompletion) {
        let mut known = completion.prompt_token_ids.clone();
        for (i, &token) in completion.token_ids.iter().enumerate() {
            let spans = completion.policies.iter();
            let span = spans.rev().find(|span| span.first_token <= i).expect("a policy");
            let key = self.keys[&span.version];
            let vocab = self.scheduler.shape().vocab_size;
            assert_eq!(
                [token][..],
                FakeRunner::expected_under(key, &known, 1, &[], vocab)
            );
            known.push(token);
        }
    }
}

fn run(shape: RunnerShape, prefix_cache: bool, operations: Vec<Operation>) {
    let mut scheduler = Scheduler::new(FakeRunner::new(shape), vec![]).expect("a valid shape");
    scheduler.set_prefix_cache(prefix_cache).expect("sets");
    let mut subject = Subject {
        keys: HashMap::from([(scheduler.policy(), 0)]),
        scheduler,
        by_digest: HashMap::new(),
        events: Vec::new(),
    };
    let mut open: HashMap<RequestId, (usize, usize)> = HashMap::new();
    let mut submitted = Vec::new();
    for operation in operations {
        match operation {
            Operation::Submit { prompt, new, n, name } => {
                let sampling = SamplingParams {
                    max_new_tokens: new,
                    ..SamplingParams::default()
                };
                let name = name.map(|name| NAMES[name]);
                match subject.scheduler.submit_under(prompt, &sampling, n, name) {
                    Ok(id) => {
                        submitted.push(id);
                        open.insert(id, (n, new));
                    }
                    Err(Error::UnknownPolicy { .. }) => assert!(name.is_some()),
                    Err(other) => panic!("unexpected: {other}"),
                }
            }
            Operation::Step(steps) => {
                for _ in 0..steps {
                    let step = subject.scheduler.step(&mut subject.events);
                    step.expect("no step fails");
                }
            }
            Operation::Cancel(which) => {
                if let Some(&id) = submitted.get(which)
                    && subject.scheduler.cancel(id)
                {
                    open.remove(&id);
                }
            }
            Operation::Serve(set) => subject.serve(set),
            Operation::Forget => subject.scheduler.clear_prefix_cache().expect("clears"),
        }
        let sound = subject.scheduler.pages().check_integrity();
        sound.expect("the page table is sound");
    }
    for steps in 0.. {
        if !subject.scheduler.has_unfinished() {
            break;
        }
        assert!(steps < 20_000, "no end");
        let step = subject.scheduler.step(&mut subject.events);
        step.expect("no step fails");
    }
    let mut finished: HashMap<RequestId, usize> = HashMap::new();
    for event in &subject.events {
        if let Event::Finished { request, result, .. } = event {
            let completion = result.as_ref().expect("completes");
            subject.check(completion);
            if let Some(&(_, new)) = open.get(request) {
                assert_eq!(completion.token_ids.len(), new);
                *finished.entry(*request).or_default() += 1;
            }
        }
    }
    for (id, (n, _)) in open {
        assert_eq!(finished.get(&id), Some(&n), "{id}");
    }
    subject.scheduler.clear_prefix_cache().expect("clears");
    let pages = subject.scheduler.pages();
    assert_eq!(
        (pages.free_pages(), pages.free_slots()),
        (shape.n_pages - 1, shape.max_batch_size)
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(600)
    ))]

    #[test]
    fn every_token_follows_from_what_its_policy_computed(
        shape in shape(),
        prefix_cache in any::<bool>(),
        operations in operations(),
    ) {
        run(shape, prefix_cache, operations);
    }
}
