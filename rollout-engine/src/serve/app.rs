//! What all handlers share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use qwen3_model::Qwen3Config;
use tokio::sync::oneshot;

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

    /// The token ids of prompts that are to be completed.
    pub(super) async fn encode_prompts(&self, prompts: Vec<Prompt>) -> Result<Vec<Vec<u32>>, ApiError> {
        self.encode(prompts, self.model.max_tokens).await
    }

    /// The token ids of prompts, each of fewer than `most` tokens.
    pub(super) async fn encode(&self, prompts: Vec<Prompt>, most: usize) -> Result<Vec<Vec<u32>>, ApiError> {
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
        encode(text, prompts, self.model.max_tokens, most).await
    }

    /// Hands prompts to the engine, after the checks that need no engine.
    pub(super) fn submit(
        &self,
        policy: Arc<Policy>,
        prompts: Vec<Vec<u32>>,
        params: &Params,
    ) -> Result<RunningJob, ApiError> {
        let max_tokens = self.model.max_tokens;
        prompts
            .iter()
            .try_for_each(|prompt| fits(prompt, max_tokens))
            .map_err(|error| ApiError::from(&error))?;
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

/// The token ids of prompts, on a thread where that may take long. Whoever drops this, as happens when the client goes away, ends
/// it after the prompt that is being tokenized, and so does the first prompt of `most` tokens or more.
async fn encode(
    text: Arc<TextPipeline>,
    prompts: Vec<Prompt>,
    max_tokens: usize,
    most: usize,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let (wanted, is_wanted) = oneshot::channel::<()>();
    let encode = move || {
        let mut all = Vec::with_capacity(prompts.len());
        for prompt in &prompts {
            if wanted.is_closed() {
                break;
            }
            let ids = text.encode_within(prompt, max_tokens)?;
            fits(&ids, most)?;
            all.push(ids);
        }
        Ok(all)
    };
    let result = blocking(move || encode().map_err(|error: Error| ApiError::from(&error))).await;
    drop(is_wanted);
    result
}

/// Does what may take long on a thread of its own: those of connections go on with others meanwhile.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(_) => Err(ApiError::internal(
            "the thread of this request has ended by a fault",
        )),
    }
}

/// Whether a prompt leaves room for a token in a sequence of `max_tokens`.
fn fits(prompt: &[u32], max_tokens: usize) -> Result<(), Error> {
    match prompt.len() {
        tokens if tokens >= max_tokens => Err(Error::PromptTooLong {
            tokens,
            max_seq_length: max_tokens,
        }),
        _ => Ok(()),
    }
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::text::bundled_pipeline as pipeline;

    fn prompts(n: usize) -> Vec<Prompt> {
        vec![Prompt::Text("count ".repeat(2000)); n]
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime")
    }

    #[test]
    fn nothing_is_tokenized_for_a_client_that_went_away() {
        let text = pipeline();
        runtime().block_on(async {
            let begin = Instant::now();
            let all = encode(text.clone(), prompts(20), usize::MAX, usize::MAX).await;
            assert_eq!(all.map(|all| all.len()), Ok(20));
            let time_of_20 = begin.elapsed().max(Duration::from_millis(10));
            let abandoned = encode(text.clone(), prompts(100_000), usize::MAX, usize::MAX);
            assert!(tokio::time::timeout(time_of_20, abandoned).await.is_err());
            let begin = Instant::now();
            while Arc::strong_count(&text) > 1 {
                assert!(begin.elapsed() < 500 * time_of_20, "still at it");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
    }

    #[test]
    fn a_prompt_that_is_too_long_ends_the_tokenizing_of_those_after_it() {
        // The second would be refused for another reason.
        let texts = ["count ".repeat(20), "count ".repeat(1000)]
            .map(Prompt::Text)
            .to_vec();
        let error = runtime()
            .block_on(encode(pipeline(), texts, 10, 10))
            .expect_err("20 words");
        assert!(error.message.starts_with("the prompt has 2"), "{}", error.message);
    }
}
