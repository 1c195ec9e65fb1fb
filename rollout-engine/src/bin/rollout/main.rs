//! The `rollout` command: all of it is in [`rollout_engine::cli`].

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    rollout_engine::cli::run(std::env::args_os())
}
