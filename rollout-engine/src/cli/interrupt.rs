//! Ctrl-C, and the signals by which a system asks a program to end.
//!
//! ```text
//!   reading, loading, tokenizing ──▶ steps ──▶ end of the command
//!   ends at once: nothing to keep    ends after the step, with what is complete written; at once by a second signal
//! ```
//!
//! Either way the exit code is 130.

use std::sync::atomic::{AtomicU8, Ordering};

use super::report;

const BEFORE_STEPS: u8 = 0;
const STEPPING: u8 = 1;
const REQUESTED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(BEFORE_STEPS);

/// Takes the signals over. That no handler can be set only takes the grace away.
pub(super) fn install() {
    let _ = ctrlc::set_handler(|| match STATE.load(Ordering::SeqCst) {
        STEPPING => STATE.store(REQUESTED, Ordering::SeqCst),
        REQUESTED => std::process::exit(130),
        // The main thread may be within a call that takes long or never returns, such as opening a pipe.
        _ => {
            report("interrupted before the first step: there is nothing to write");
            std::process::exit(130);
        }
    });
}

/// From now on a signal lets the step under way end.
pub(super) fn finish_steps() {
    STATE.store(STEPPING, Ordering::SeqCst);
}

/// Whether a signal has asked for the end.
pub(super) fn requested() -> bool {
    STATE.load(Ordering::SeqCst) == REQUESTED
}
