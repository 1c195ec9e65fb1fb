//! An HTTP server that speaks OpenAI's dialect and what trainers add to it.
//!
//! ```no_run
//! use rollout_engine::Engine;
//! use rollout_engine::serve::{ServeSettings, Server};
//!
//! # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
//! let server = Server::from_builder(Engine::builder().max_batch_size(64), ServeSettings::default())?;
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:8000").await?;
//! server.run(listener, async { /* resolves when the server is to end */ }).await?;
//! # Ok(()) }
//! ```
//!
//! The engine runs on a thread of its own and never waits for a client: commands reach it between two steps, results leave
//! it through one unbounded channel per request, bounded by what the request asked for.
//!
//! **Policies.** The base model and every adapter that is loaded is a policy with a name and a version. A request names its
//! policy in the field `model`, is bound to the version that the name has then, and is answered under that version or with
//! an error. To load an adapter is to give it a name: nothing that runs is disturbed.
//!
//! Where adapters are applied at run time (an engine in [`MergeMode::Unmerged`](crate::MergeMode::Unmerged), as always with
//! weights in 4 bits) the base model and all adapters are in force together, and requests under any of them share batches.
//! Where they are merged into the weights one policy is in force at a time. It changes when nothing runs, so whatever runs
//! finishes under its own version; requests under another policy wait for that, and those of the present policy cannot keep
//! them waiting for longer than [`ServeSettings::policy_patience`] before no more of them are admitted.
//!
//! **What may surprise.** With merged adapters a request that alternates between policies pays a merge and an idle batch per change. Weights
//! replaced by `/update_weights` are opened in place of the old ones when nothing runs, so they need no memory beside them,
//! but requests bound to the old ones that come to their turn later open those again.

mod admin;
mod answer;
mod app;
mod auth;
mod body;
mod chat;
mod command;
mod completions;
mod error;
mod fields;
mod fingerprint;
mod generate;
mod handle;
mod listener;
mod logprobs;
mod metrics;
mod names;
mod params;
mod paths;
mod policy;
mod queue;
mod reply;
mod router;
mod server;
mod settings;
mod side_by_side;
mod snapshot;
mod stream;
mod text;
mod tokens;
mod watchdog;
mod worker;

pub use server::Server;
pub use settings::{Limits, LogprobsMode, ServeSettings};

use answer::PolicyReport;
use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;

/// Request fields that are accepted with any value, because they cannot change a completion.
pub fn harmless_fields() -> &'static [&'static str] {
    &fields::HARMLESS
}

/// The policy's version as a header, for clients that do not read the body's field `policy`.
fn with_policy_header(mut response: Response, policy: &PolicyReport) -> Response {
    let name = HeaderName::from_static("x-policy-version");
    response
        .headers_mut()
        .insert(name, HeaderValue::from(policy.version));
    response
}
