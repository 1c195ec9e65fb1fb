//! Dispatch to the processor's vector instructions.

use pulp::{Arch, Scalar256b, Simd, WithSimd};

/// Runs `op` with the widest vectors the processor has. Without any it runs on plain arrays of
/// eight lanes, so that code may rely on vectors of more than one lane.
#[inline(always)]
pub(crate) fn dispatch<Op: WithSimd>(op: Op) -> Op::Output {
    match Arch::new() {
        Arch::Scalar => Scalar256b.vectorize(op),
        arch => arch.dispatch(op),
    }
}
