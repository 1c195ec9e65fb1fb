//! Everything that can go wrong, as one enum.

use std::path::PathBuf;

/// An error of this crate. Each message says in one line what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A prompt without tokens: there is no position to predict from.
    #[error("the prompt is empty: give it at least one token")]
    EmptyPrompt,

    /// The prompt leaves no room for a completion within the longest sequence allowed.
    #[error(
        "the prompt has {tokens} tokens, but a sequence may hold {max_seq_length} with at least one new token: shorten the prompt or raise the maximum sequence length"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Most tokens of prompt and completion together.
        max_seq_length: usize,
    },

    /// The text of a prompt is longer than any that could fit, so that it was not even tokenized.
    #[error(
        "the prompt's text has {bytes} bytes, but the {max_tokens} tokens that a sequence may hold come from at most {max_bytes}: shorten the prompt"
    )]
    PromptTextTooLong {
        /// Bytes of the text as the tokenizer would get it.
        bytes: usize,
        /// Most bytes that are tokenized.
        max_bytes: usize,
        /// Most tokens of prompt and completion together.
        max_tokens: usize,
    },

    /// The prompt with one new token needs more positions than all pages together hold.
    #[error(
        "the prompt has {tokens} tokens, but all pages together hold {pool_tokens} with at least one new token: shorten the prompt or raise the number of pages"
    )]
    PromptExceedsPool {
        /// Tokens of the prompt.
        tokens: usize,
        /// Token positions of the whole page pool.
        pool_tokens: usize,
    },

    /// A prompt token that the model has no embedding for.
    #[error(
        "prompt token {token} at position {position} is outside the model's vocabulary of {vocab_size}: use ids of this model's tokenizer"
    )]
    TokenOutOfVocabulary {
        /// The id.
        token: u32,
        /// Its index in the prompt.
        position: usize,
        /// Number of ids the model knows.
        vocab_size: usize,
    },

    /// A stop id that the model can never produce.
    #[error("stop token {token} is outside the model's vocabulary of {vocab_size}: remove it")]
    StopTokenOutOfVocabulary {
        /// The id.
        token: u32,
        /// Number of ids the model knows.
        vocab_size: usize,
    },

    /// `max_new_tokens` of 0.
    #[error("max_new_tokens is 0: ask for at least one token")]
    NoNewTokens,

    /// A sampling parameter that cannot work.
    #[error("{parameter} = {value} cannot work: {advice}")]
    InvalidParameter {
        /// Name of the field.
        parameter: &'static str,
        /// What was asked for.
        value: String,
        /// What would work.
        advice: &'static str,
    },

    /// A setting of the engine that cannot work.
    #[error("{setting} = {value} cannot work: {advice}")]
    InvalidSetting {
        /// Name of the setting.
        setting: &'static str,
        /// What was asked for.
        value: String,
        /// What would work.
        advice: String,
    },

    /// The device that was asked for cannot be used.
    #[error("device {device} cannot be used: {reason}; use the device `cpu` instead")]
    DeviceUnavailable {
        /// As given by the user.
        device: String,
        /// Why not.
        reason: String,
    },

    /// The row of logits of this request held NaN or no finite value at all.
    #[error(
        "the logits for new token {new_token} leave no token to choose: check the model's weights and adapters for NaN or overflow"
    )]
    NonFiniteLogits {
        /// Index of the new token within the completion.
        new_token: usize,
    },

    /// Every token that the model gives a probability would have ended the completion, and was banned for that.
    #[error(
        "every token that could be new token {new_token} would end the completion, which min_new_tokens = \
         {min_new_tokens} forbids: ask for fewer new tokens, or name fewer ids that end it"
    )]
    EveryTokenBanned {
        /// Index of the new token within the completion.
        new_token: usize,
        /// As the request has it.
        min_new_tokens: usize,
    },

    /// A model that is neither a folder nor an id that Hugging Face's cache on this machine knows.
    #[error(
        "{} is not a folder: give that of a model, or the id of one that was fetched, as by `hf download Qwen/Qwen3-0.6B`",
        path.display()
    )]
    NoModelFolder {
        /// What was given.
        path: PathBuf,
    },

    /// A file that cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },

    /// A file whose content is not what it should be.
    #[error("{}: {reason}", path.display())]
    InvalidFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// The thread of a server's engine has panicked.
    #[error("the engine has ended by a fault, which its own message describes: please report it")]
    EngineEnded,

    /// A server was to end, but its engine's thread is lost in something that does not return.
    #[error("the server ends without its engine's thread: {reason}")]
    EngineHangs {
        /// What it is at, and for how long.
        reason: String,
    },

    /// What a server's engine computes on has broken: [`Error::device_is_lost`].
    #[error("the device is lost, and only a new process can use it again: {reason}")]
    DeviceLost {
        /// The error that it gave first.
        reason: String,
    },

    /// Text was asked for, but the engine was built without a tokenizer.
    #[error(
        "this engine has no tokenizer: give prompts as token ids, or build it from a folder with a tokenizer.json"
    )]
    NoTokenizer,

    /// The tokenizer refused its input.
    #[error("the tokenizer failed: {reason}")]
    Tokenizer {
        /// The tokenizer's words.
        reason: String,
    },

    /// A conversation was given to a model without a chat template.
    #[error(
        "this model has no chat template: give the prompt as text or token ids, or add a chat_template.jinja to its folder"
    )]
    NoChatTemplate,

    /// The chat template refused the conversation or is not valid.
    #[error("the chat template failed: {reason}")]
    ChatTemplate {
        /// The message of `raise_exception`, or what the template engine says.
        reason: String,
    },

    /// The model could not be loaded or run.
    #[error(transparent)]
    Model(#[from] qwen3_model::Error),

    /// An adapter that cannot be read.
    #[error(transparent)]
    Adapter(#[from] lora_merge::Error),

    /// An adapter of one of several policies cannot be applied. The previous policies are in force.
    #[error("policy {name:?}: {source}")]
    Policy {
        /// The policy's name.
        name: String,
        /// What is wrong with its adapter.
        source: lora_merge::Error,
    },

    /// The device cannot apply adapters in this way. The previous policy is in force.
    #[error("the {device} runner cannot apply adapters in the mode {mode:?}")]
    AdaptersUnsupported {
        /// Device of the runner.
        device: String,
        /// The mode that was asked for.
        mode: qwen3_model::MergeMode,
    },

    /// A request names a policy that is not served.
    #[error("there is no policy {name:?}; {}", served(.known))]
    UnknownPolicy {
        /// As named by the request.
        name: String,
        /// The policies that are served by name.
        known: Vec<String>,
    },

    /// The policies were to change while an unfinished request names one that would be gone. The previous policies are in
    /// force.
    #[error(
        "the policy {name:?} is used by {request}: wait for it, cancel it, or serve a policy of that name"
    )]
    PolicyInUse {
        /// The policy.
        name: String,
        /// The oldest unfinished request that names it.
        request: crate::completion::RequestId,
    },

    /// The page table refused an operation.
    #[error("page table: {0}")]
    Pages(#[from] paged_kv::Error),

    /// A runner failed or was driven against its contract.
    #[error("the {device} runner failed: {reason}")]
    Runner {
        /// Device of the runner.
        device: String,
        /// What happened.
        reason: String,
    },

    /// No sequence can take a step although requests are unfinished. A defect, reported instead of waiting for ever.
    #[error(
        "no progress is possible with {waiting} requests waiting, {running} running and {free_pages} pages free: please report this"
    )]
    Stalled {
        /// Requests without a slot.
        waiting: usize,
        /// Requests with a slot.
        running: usize,
        /// Pages that no sequence owns.
        free_pages: usize,
    },
}

fn served(names: &[String]) -> String {
    match names {
        [] => "no policies are served by name: Engine::serve_policies does so".into(),
        names => format!("served are {}", names.join(", ")),
    }
}

impl Error {
    /// Whether the device's context is broken by a fault of a kernel or of the hardware: nothing on the device works in this
    /// process any more, and only a new one can use it again.
    pub fn device_is_lost(&self) -> bool {
        match self {
            Self::Model(error) => error.breaks_context(),
            #[cfg(feature = "cuda")]
            Self::Adapter(lora_merge::Error::Cuda(error))
            | Self::Policy {
                source: lora_merge::Error::Cuda(error),
                ..
            } => error.breaks_context(),
            _ => false,
        }
    }

    pub(crate) fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io {
            path: path.into(),
            source,
        }
    }

    pub(crate) fn invalid_file(path: impl Into<PathBuf>, reason: impl std::fmt::Display) -> Self {
        Self::InvalidFile {
            path: path.into(),
            reason: reason.to_string(),
        }
    }
}
