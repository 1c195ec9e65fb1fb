//! The flags that say how tokens are chosen and when a completion ends.

use std::path::Path;

use clap::Args;
use qwen3_model::GenerationConfig;

use super::CliError;
use crate::Error;
use crate::request::SamplingParams;

/// Flags that say how each token is chosen, which `rollout bench` has as well.
#[derive(Debug, Default, Args)]
pub(super) struct DrawArgs {
    /// Softmax temperature: 0 is greedy, or from 0.001. Default: 0.
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,

    /// Draw from the K most likely tokens; 0 or -1 draws from all. Needs a temperature above 0. Default: 0.
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<i64>,

    /// Draw from the most likely tokens that together reach probability P. Needs a temperature above 0. Default: 1.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,

    /// Draw from tokens with at least P times the most likely token's probability. Needs a temperature above 0.
    /// Default: 0.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,

    /// Divide the positive and multiply the negative logits of tokens that occurred, in prompt or completion. Default: 1.
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,

    /// Subtract from the logits of tokens that occurred in the completion, from -2 to 2. Default: 0.
    #[arg(long, value_name = "A", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,

    /// Subtract from the logits of tokens once for each time that they occurred in the completion, from -2 to 2.
    /// Default: 0.
    #[arg(long, value_name = "A", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
}

impl DrawArgs {
    /// These parameters, with `recommended` ones and then the defaults where no flag gives them.
    fn params(&self, recommended: Option<&GenerationConfig>) -> SamplingParams {
        let default = SamplingParams::default();
        // As transformers does: without `do_sample` decoding is greedy whatever else the file says, and with it the
        // temperature is 1 unless the file names one.
        let drawn = recommended.filter(|config| config.do_sample == Some(true));
        let from_file = |field: fn(&GenerationConfig) -> Option<f64>| drawn.and_then(field).map(|x| x as f32);
        let temperature = drawn.map(|config| config.temperature.unwrap_or(1.0) as f32);
        let top_k = drawn.and_then(|config| config.top_k).map(|k| k as i64);
        let repetition_penalty = recommended.and_then(|config| config.repetition_penalty);
        SamplingParams {
            temperature: self.temperature.or(temperature).unwrap_or(default.temperature),
            top_k: self.top_k.or(top_k).unwrap_or(default.top_k),
            top_p: (self.top_p.or(from_file(|config| config.top_p))).unwrap_or(default.top_p),
            min_p: (self.min_p.or(from_file(|config| config.min_p))).unwrap_or(default.min_p),
            repetition_penalty: self
                .repetition_penalty
                .or(repetition_penalty.map(|x| x as f32))
                .unwrap_or(default.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(default.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(default.frequency_penalty),
            ..default
        }
    }

    /// Refuses parameters that cannot work, and flags without effect.
    fn check(&self, params: &SamplingParams) -> Result<(), CliError> {
        params
            .validate()
            .map_err(|error| CliError::Usage(error.to_string()))?;
        let without_effect = [
            ("--top-k", self.top_k.is_some()),
            ("--top-p", self.top_p.is_some()),
            ("--min-p", self.min_p.is_some()),
        ];
        match without_effect.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) if params.temperature == 0.0 => Err(CliError::Usage(format!(
                "{flag} has no effect at temperature 0: give --temperature as well"
            ))),
            _ => Ok(()),
        }
    }

    /// Parameters of a workload in which every completion has `max_new_tokens` tokens.
    #[cfg(feature = "cuda")]
    pub(super) fn workload(&self, max_new_tokens: usize) -> Result<SamplingParams, CliError> {
        let params = SamplingParams {
            max_new_tokens,
            ignore_eos: true,
            ..self.params(None)
        };
        self.check(&params).map(|()| params)
    }
}

/// Flags of `rollout generate` that become [`SamplingParams`].
#[derive(Debug, Default, Args)]
pub(super) struct SamplingArgs {
    /// Fewest new tokens per completion, in tokens: before, ids and texts that end a completion do not.
    #[arg(long, visible_alias = "min-tokens", value_name = "N", default_value_t = 0)]
    min_new_tokens: usize,

    #[command(flatten)]
    draw: DrawArgs,

    /// Take temperature, top-k, top-p, min-p and repetition penalty from the model's generation_config.json where no flag
    /// gives them. Without this flag the file's recommendations are not applied.
    #[arg(long)]
    use_generation_config: bool,

    /// Text that ends a completion where it first occurs, and is not part of its text. May be given several times.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,

    /// Leave the stop text at the end of the completion's text.
    #[arg(long, requires = "stop")]
    include_stop_str_in_output: bool,

    /// Token id that ends a completion, besides the model's own. May be given several times.
    #[arg(long, value_name = "ID")]
    stop_token_id: Vec<u32>,

    /// Go on past the model's end-of-sequence ids.
    #[arg(long)]
    ignore_eos: bool,

    /// With --output: for every new token, the N most likely ones, at most 20, with their log-probabilities.
    #[arg(long, value_name = "N", default_value_t = 0, requires = "output")]
    top_logprobs: usize,
}

impl SamplingArgs {
    /// The parameters that the flags ask for, with what `model_dir` recommends if that was asked for.
    pub(super) fn params(&self, max_new_tokens: usize, model_dir: &Path) -> Result<SamplingParams, CliError> {
        let recommended = match self.use_generation_config {
            false => None,
            true => match GenerationConfig::from_dir(model_dir).map_err(Error::from)? {
                Some(config) => Some(config),
                None => {
                    return Err(CliError::Usage(format!(
                        "--use-generation-config: {} has no generation_config.json",
                        model_dir.display()
                    )));
                }
            },
        };
        let params = SamplingParams {
            max_new_tokens,
            min_new_tokens: self.min_new_tokens,
            seed: None,
            stop_token_ids: self.stop_token_id.clone(),
            stop: self.stop.clone(),
            include_stop_str_in_output: self.include_stop_str_in_output,
            ignore_eos: self.ignore_eos,
            top_logprobs: self.top_logprobs,
            ..self.draw.params(recommended.as_ref())
        };
        self.draw.check(&params).map(|()| params)
    }
}
