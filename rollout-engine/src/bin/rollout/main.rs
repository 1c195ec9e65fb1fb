//! The `rollout` command: all of it is in [`rollout_engine::cli`].

// Not `forbid`: what runs before `main` needs an exception, which `ctor` brings.
#![deny(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether standard output was closed when the process began, as by `>&-`.
static STDOUT_CLOSED: AtomicBool = AtomicBool::new(false);

// Before `main` the standard library opens the null device in place of standard streams that are closed, and every write
// to it succeeds: only now can it be seen.
#[cfg(unix)]
ctor::declarative::ctor! {
    /// The system gives out the lowest free descriptor.
    #[ctor(unsafe)]
    fn look_at_stdout() {
        use std::os::fd::AsRawFd;
        let mut held = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            let number = file.as_raw_fd();
            if number >= 1 {
                STDOUT_CLOSED.store(number == 1, Ordering::Relaxed);
                break;
            }
            held.push(file);
        }
    }
}

fn main() -> std::process::ExitCode {
    if STDOUT_CLOSED.load(Ordering::Relaxed) {
        rollout_engine::cli::stdout_was_closed();
    }
    rollout_engine::cli::run(std::env::args_os())
}
