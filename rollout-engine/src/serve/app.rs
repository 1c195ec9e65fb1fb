//! What all handlers share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use qwen3_model::Qwen3Config;

use super::answer::PolicyReport;
use super::command::{JobEvent, PromptJob};
use super::error::ApiError;
use super::handle::{EngineHandle, RunningJob};
use super::logprobs::TokenWriter;
use super::metrics::Metrics;
use super::names::TokenNames;
use super::params::Params;
use super::policy::{Policies, Policy};
use super::settings::ServeSettings;
use super::snapshot::Shared;
use crate::Error;
use crate::completion::Completion;
use crate::request::Prompt;
use crate::text::TextPipeline;

/// What the engine serves, as far as handlers need to know.
#[derive(Clone, Debug)]
pub(super) struct ModelInfo {
    pub(super) text: Option<Arc<TextPipeline>>,
    /// Most tokens of prompt and completion together.
    pub(super) max_tokens: usize,
    /// Geometry, where the engine was built from a folder.
    pub(super) config: Option<Qwen3Config>,
    /// As `config.json` has it, such as `bfloat16`.
    pub(super) dtype: String,
    pub(super) device: String,
}

/// What all handlers share.
#[derive(Debug)]
pub(super) struct App {
    pub(super) settings: ServeSettings,
    pub(super) model: ModelInfo,
    pub(super) policies: Arc<Policies>,
    pub(super) engine: EngineHandle,
    pub(super) shared: Arc<Shared>,
    pub(super) metrics: Metrics,
    names: TokenNames,
    /// Seconds since 1970 at the start.
    pub(super) created: u64,
    next_id: AtomicU64,
}

/// The completions of one request, in order, and the policy that they were sampled under.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) completions: Vec<Completion>,
    pub(super) policy: PolicyReport,
}

impl Answer {
    pub(super) fn completion_tokens(&self) -> usize {
        self.completions
            .iter()
            .map(|completion| completion.token_ids.len())
            .sum()
    }
}

impl App {
    pub(super) fn new(
        settings: ServeSettings,
        model: ModelInfo,
        policies: Arc<Policies>,
        engine: EngineHandle,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            settings,
            names: TokenNames::new(model.text.clone()),
            model,
            policies,
            engine,
            shared,
            metrics: Metrics::default(),
            created: now(),
            next_id: AtomicU64::new(0),
        }
    }

    /// An id for an answer that no other answer of any server has.
    pub(super) fn answer_id(&self, prefix: &str) -> String {
        let number = self.next_id.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}-{:x}-{:x}-{number:x}", std::process::id(), self.created)
    }

    /// Writes the tokens of a request's answers.
    pub(super) fn token_writer(&self, params: &Params) -> TokenWriter<'_> {
        TokenWriter::new(&self.names, params, self.settings.logprobs_mode)
    }

    /// The token ids of prompts, on a thread where that may take long.
    pub(super) async fn encode(self: &Arc<Self>, prompts: Vec<Prompt>) -> Result<Vec<Vec<u32>>, ApiError> {
        let all_ids = prompts.iter().all(|prompt| matches!(prompt, Prompt::TokenIds(_)));
        let Some(text) = self.model.text.clone().filter(|_| !all_ids) else {
            return prompts
                .into_iter()
                .map(|prompt| match prompt {
                    Prompt::TokenIds(ids) => Ok(ids),
                    _ => Err(ApiError::from(&Error::NoTokenizer)),
                })
                .collect();
        };
        let max_tokens = self.model.max_tokens;
        let encode = move || {
            let prompts = prompts.iter();
            prompts
                .map(|prompt| text.encode_within(prompt, max_tokens))
                .collect::<Result<Vec<_>, _>>()
        };
        match tokio::task::spawn_blocking(encode).await {
            Ok(result) => result.map_err(|error| ApiError::from(&error)),
            Err(_) => Err(ApiError::internal("the tokenizer's thread ended")),
        }
    }

    /// Hands prompts to the engine, after the checks that need no engine.
    pub(super) fn submit(
        &self,
        policy: Arc<Policy>,
        prompts: Vec<Vec<u32>>,
        params: &Params,
    ) -> Result<RunningJob, ApiError> {
        let max_tokens = self.model.max_tokens;
        if let Some(prompt) = prompts.iter().find(|prompt| prompt.len() >= max_tokens) {
            return Err(ApiError::from(&Error::PromptTooLong {
                tokens: prompt.len(),
                max_seq_length: max_tokens,
            }));
        }
        if prompts.iter().any(Vec::is_empty) {
            return Err(ApiError::from(&Error::EmptyPrompt));
        }
        let mut sampling = params.sampling.clone();
        sampling.max_new_tokens = params.max_tokens.unwrap_or(max_tokens).min(max_tokens);
        let sampling = Arc::new(sampling);
        let jobs = prompts.into_iter().map(|token_ids| PromptJob {
            token_ids,
            sampling: sampling.clone(),
            n: params.n,
        });
        let result = self.engine.submit(policy, jobs.collect(), params.stream);
        if let Err(error) = &result {
            self.metrics.rejected(error);
        }
        result
    }

    /// Waits for the job's first event, which tells the policy.
    pub(super) async fn started(&self, job: &mut RunningJob) -> Result<PolicyReport, ApiError> {
        match job.next().await {
            Some(JobEvent::Started { version }) => Ok(PolicyReport {
                name: job.policy.name.clone(),
                version: job.policy.version,
                sha256: version.sha256_hex(),
            }),
            Some(JobEvent::Failed(error)) => Err(error),
            _ => Err(ApiError::internal("a job gave results before it started")),
        }
    }

    /// Waits for all completions.
    pub(super) async fn finished(&self, mut job: RunningJob) -> Result<Answer, ApiError> {
        let begin = std::time::Instant::now();
        let policy = self.started(&mut job).await?;
        let mut completions: Vec<Option<Completion>> = (0..job.completions).map(|_| None).collect();
        while let Some(event) = job.next().await {
            match event {
                JobEvent::Finished { index, completion } => completions[index] = Some(*completion),
                JobEvent::Failed(error) => return Err(error),
                JobEvent::Started { .. } | JobEvent::Token { .. } => {}
            }
        }
        self.metrics.finished(begin.elapsed());
        Ok(Answer {
            completions: completions.into_iter().flatten().collect(),
            policy,
        })
    }
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}
