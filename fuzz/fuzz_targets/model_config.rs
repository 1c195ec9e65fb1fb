//! The loaders of a model folder on arbitrary bytes: the first byte chooses which. Whatever they
//! are, the answer is a value or an error, quickly and without much memory.
#![no_main]

use libfuzzer_sys::fuzz_target;
use qwen3_model::{GenerationConfig, Projection, Qwen3Config, fuzzing};

fuzz_target!(|data: &[u8]| {
    let Some((&choice, bytes)) = data.split_first() else {
        return;
    };
    match choice % 4 {
        0 => {
            let Ok(config) = Qwen3Config::from_json(bytes) else {
                return;
            };
            // Nothing that follows from an accepted configuration overflows.
            assert!(config.n_parameters() > 0 && config.max_positions() > 0);
            assert_eq!(config.n_heads % config.n_kv_heads, 0);
            assert!(Projection::ALL.iter().all(|&p| config.projection_shape(p).iter().all(|&n| n > 0)));
            let rope = config.rope.frequencies(config.head_dim);
            assert_eq!(rope.inv_freq.len(), config.head_dim / 2);
            assert!(rope.inv_freq.iter().all(|f| !f.is_nan()), "{:?}", config.rope);
        }
        1 => drop(GenerationConfig::from_json(bytes)),
        2 => {
            // Accepted tensors lie inside the file and do not overlap.
            if let Ok(tensors) = fuzzing::header(bytes) {
                assert!(tensors.iter().sum::<usize>() <= bytes.len());
            }
        }
        _ => {
            if let Ok(shards) = fuzzing::index(bytes) {
                assert!(shards.iter().all(|name| !name.contains(['/', '\\']) && name != ".."));
            }
        }
    }
});
