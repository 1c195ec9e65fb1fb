//! Operations of the page table, against the same model of plain maps as its property tests. The first four
//! bytes are the table's sizes, each following four an operation.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[allow(dead_code, reason = "the property tests also read the counts of outcomes")]
#[path = "../../paged-kv/tests/cpu/model/mod.rs"]
mod model;

fuzz_target!(|data: &[u8]| {
    let Some((sizes, ops)) = data.split_first_chunk::<4>() else {
        return;
    };
    let mut model = model::Model::new(model::config(*sizes));
    let (ops, _) = ops.as_chunks::<4>();
    for &op in ops {
        model.apply(&model::Op::decode(op));
    }
});
