//! What the memory's rate allows.

use qwen3_model::Qwen3Config;

/// Bytes per second that a device was measured to read from its memory; the floor of a decode step follows from it.
const READ_RATES: [(&str, f64); 1] = [("H200", 4.39e12)];
/// The least time a decode step can take: all weights and the context read once.
pub(super) struct Floor {
    /// Bytes a second.
    pub(super) rate: Option<f64>,
    weight_bytes: f64,
    /// Of keys and values.
    pub(super) bytes_per_token: f64,
}

impl Floor {
    pub(super) fn new(device: &str, config: &Qwen3Config, weight_bytes: u64) -> Self {
        // Of an untied embedding only the rows of the batch are read.
        let unread = if config.tie_word_embeddings {
            0
        } else {
            2 * config.vocab_size * config.hidden_size
        };
        Self {
            rate: READ_RATES
                .iter()
                .find(|(name, _)| device.contains(name))
                .map(|(_, rate)| *rate),
            weight_bytes: weight_bytes as f64 - unread as f64,
            bytes_per_token: (4 * config.n_layers * config.kv_size()) as f64,
        }
    }

    /// Milliseconds of a step of `prompts` rows at mid-run.
    pub(super) fn step_ms(&self, prompts: usize, max_new_tokens: usize) -> Option<f64> {
        let context: usize = (0..prompts).map(|i| 64 + i * 37 % 193 + max_new_tokens / 2).sum();
        self.ms(context)
    }

    /// Milliseconds of a step that reads `context` tokens altogether.
    pub(super) fn ms(&self, context: usize) -> Option<f64> {
        let bytes = self.weight_bytes + self.bytes_per_token * context as f64;
        self.rate.map(|rate| bytes / rate * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_of_a_step_is_bytes_over_the_read_rate() {
        let config = Qwen3Config::qwen3_4b();
        let floor = Floor::new("cuda:0 (NVIDIA H200)", &config, 2 * config.n_parameters());
        assert_eq!(floor.bytes_per_token, 147_456.0);
        let one = floor.step_ms(1, 512).unwrap();
        assert!((one - 1.85).abs() < 0.02, "{one}");
        let many = floor.step_ms(64, 512).unwrap();
        assert!((many - 2.73).abs() < 0.05, "{many}");
        assert!(Floor::new("another device", &config, 1).step_ms(1, 1).is_none());
    }
}
