//! How large batches, sequences and the page pool are: what the user set, completed by what fits.

use qwen3_model::Qwen3Config;

use crate::Error;
use crate::memory::{available_memory, format_bytes};
use crate::runner::RunnerShape;

/// Most sequences at once, and most positions per page: beyond this it is a mistake.
const MAX_BATCH: usize = 1 << 16;
const MAX_PAGE_SIZE: usize = 1 << 16;
/// Most bytes for the page table itself.
const MAX_TABLE_BYTES: u64 = 1 << 30;
/// Assumed where the system does not tell.
const MEMORY_FALLBACK: u64 = 4 << 30;

/// Sizes as set by the user; `None` leaves the choice to the engine.
///
/// ```
/// use qwen3_model::Qwen3Config;
/// use rollout_engine::PoolSettings;
/// use rollout_engine::pool::PoolLimits;
///
/// let settings = PoolSettings { max_batch_size: Some(32), max_seq_length: Some(1000), ..PoolSettings::default() };
/// let limits = PoolLimits {
///     bytes_per_token: 114_688,
///     available_bytes: Some(80 << 30),
///     max_prefill_tokens: 4096,
///     max_in_flight: 2,
/// };
/// let shape = settings.resolve(&Qwen3Config::qwen3_0_6b(), &limits)?;
/// // 16 pages of 64 for each of 32 sequences, and the reserved one.
/// assert_eq!((shape.page_size, shape.n_pages), (64, 513));
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolSettings {
    /// Most sequences at once. Default: 64.
    pub max_batch_size: Option<usize>,
    /// Most tokens of prompt and completion together. Default: what the model's positions allow.
    pub max_seq_length: Option<usize>,
    /// Pages of the KV cache, the reserved page 0 included. Default: enough for the largest batch of the longest
    /// sequences, but at most half of the memory available.
    pub n_pages: Option<usize>,
    /// Token positions per page. Default: 64.
    pub page_size: Option<usize>,
    /// Most prompt tokens per step. Default: the device's choice.
    pub max_prefill_tokens: Option<usize>,
}

/// What a device brings to the choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolLimits {
    /// KV bytes of one token position in all layers.
    pub bytes_per_token: u64,
    /// Bytes that the device can still give; `None` if it does not tell.
    pub available_bytes: Option<u64>,
    /// Prompt tokens per step unless set by the user.
    pub max_prefill_tokens: usize,
    /// Steps that the runner can have in flight.
    pub max_in_flight: usize,
}

impl PoolLimits {
    /// For a runner that works in this machine's main memory.
    pub fn of_this_machine(bytes_per_token: u64) -> Self {
        Self {
            bytes_per_token,
            available_bytes: available_memory(),
            // Larger prefill steps are no faster on a CPU, and their activations cost memory.
            max_prefill_tokens: 512,
            max_in_flight: 1,
        }
    }
}

impl PoolSettings {
    /// Checks the settings against model and device and fills in what was left open.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] names the setting and says what would work.
    pub fn resolve(&self, config: &Qwen3Config, limits: &PoolLimits) -> Result<RunnerShape, Error> {
        let max_batch_size = in_range("max_batch_size", self.max_batch_size.unwrap_or(64), 1, MAX_BATCH)?;
        let page_size = in_range("page_size", self.page_size.unwrap_or(64), 1, MAX_PAGE_SIZE)?;
        let max_prefill_tokens = self.max_prefill_tokens.unwrap_or(limits.max_prefill_tokens);
        let max_prefill_tokens = in_range("max_prefill_tokens", max_prefill_tokens, 1, 1 << 20)?;
        let model_limit = config.max_positions();
        let max_seq_length = in_range(
            "max_seq_length",
            self.max_seq_length.unwrap_or(model_limit),
            2,
            model_limit,
        )?;
        let pages_per_sequence = max_seq_length.div_ceil(page_size);
        let table_bytes = 4 * (max_batch_size as u64 + 1) * pages_per_sequence as u64;
        if table_bytes > MAX_TABLE_BYTES {
            let advice = format!(
                "the page table would take {}: use larger pages, shorter sequences or a smaller batch",
                format_bytes(table_bytes)
            );
            return Err(invalid("max_batch_size", max_batch_size, advice));
        }
        let wanted = max_batch_size
            .saturating_mul(pages_per_sequence)
            .saturating_add(1);
        let n_pages = self.choose_n_pages(wanted, page_size, limits)?;
        Ok(RunnerShape {
            vocab_size: config.vocab_size,
            max_seq_length,
            max_batch_size,
            n_pages,
            page_size,
            max_in_flight: limits.max_in_flight,
            max_prefill_tokens,
        })
    }

    fn choose_n_pages(&self, wanted: usize, page_size: usize, limits: &PoolLimits) -> Result<usize, Error> {
        let bytes_per_page = limits.bytes_per_token.max(1).saturating_mul(page_size as u64);
        let available = limits.available_bytes.unwrap_or(MEMORY_FALLBACK);
        let affordable = |bytes: u64| usize::try_from(bytes / bytes_per_page).unwrap_or(usize::MAX);
        match self.n_pages {
            Some(n_pages) if n_pages < 2 => Err(invalid(
                "n_pages",
                n_pages,
                "use at least 2: page 0 is reserved for padding".into(),
            )),
            Some(n_pages) if n_pages > affordable(available) => {
                let advice = format!(
                    "{} are available, which is {} pages of {page_size} tokens: use fewer pages",
                    format_bytes(available),
                    affordable(available)
                );
                Err(invalid("n_pages", n_pages, advice))
            }
            Some(n_pages) => Ok(n_pages),
            None => match wanted.min(affordable(available / 2)) {
                n_pages @ 2.. => Ok(n_pages),
                _ => {
                    let advice = format!(
                        "one page takes {} and {} are available: use smaller pages or free memory",
                        format_bytes(bytes_per_page),
                        format_bytes(available)
                    );
                    Err(invalid("page_size", page_size, advice))
                }
            },
        }
    }
}

fn in_range(setting: &'static str, value: usize, min: usize, max: usize) -> Result<usize, Error> {
    match value {
        _ if value < min => Err(invalid(setting, value, format!("use at least {min}"))),
        _ if value > max => Err(invalid(setting, value, format!("use at most {max}"))),
        _ => Ok(value),
    }
}

fn invalid(setting: &'static str, value: usize, advice: String) -> Error {
    Error::InvalidSetting {
        setting,
        value: value.to_string(),
        advice,
    }
}
