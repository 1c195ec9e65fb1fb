//! Random sequences of operations, on the table and on a model of plain maps.

use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::model::{Model, Op, config};
use proptest::prelude::*;
use proptest::test_runner::{TestError, TestRunner};

/// What the sequences must reach to mean anything.
const OUTCOMES: [&str; 26] = [
    "advance",
    "attach",
    "attach nothing",
    "erase",
    "fork",
    "fork within a page",
    "release",
    "release and free",
    "reserve",
    "reserve with a copy",
    "retain",
    "DeadSlot",
    "FreePage",
    "NoSuchPage",
    "NoSuchSlot",
    "NotReserved",
    "NotRetained",
    "OutOfPages",
    "OutOfSlots",
    "PageNotFull",
    "PageShared",
    "ReservedPage",
    "ReservedSlot",
    "SequenceTooLong",
    "SlotNotEmpty",
    "WrongLogicalPage",
];

/// 10,000 sequences, or `PROPTEST_CASES`.
#[test]
fn the_table_does_what_plain_maps_do() {
    let cases = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok())
        .unwrap_or(10_000);
    let mut runner = TestRunner::new(ProptestConfig {
        cases,
        failure_persistence: None,
        ..Default::default()
    });
    let ops = prop::collection::vec(any::<[u8; 4]>().prop_map(Op::decode), 1..160);
    let outcomes = RefCell::new(BTreeMap::<String, u64>::new());
    let result = runner.run(&(any::<[u8; 4]>(), ops), |(sizes, ops)| {
        let mut model = Model::new(config(sizes));
        for op in &ops {
            model.apply(op);
        }
        for (outcome, count) in &model.outcomes {
            *outcomes.borrow_mut().entry(outcome.clone()).or_default() += count;
        }
        Ok(())
    });
    if let Err(TestError::Fail(reason, (sizes, ops))) = &result {
        panic!("{reason}\n{:?}\n{ops:#?}", config(*sizes));
    }
    result.expect("the runner finishes");
    let outcomes = outcomes.into_inner();
    eprintln!("{outcomes:#?}");
    if cases >= 10_000 {
        for outcome in OUTCOMES {
            let count = outcomes.get(outcome).copied().unwrap_or(0);
            assert!(
                count >= 100,
                "{outcome}: reached {count} times in {cases} sequences"
            );
        }
    }
}
