//! What a sweep tries.

use qwen3_model::{DecodeKernelOptions, MatrixKernelOptions, PrefillKernelOptions};
use serde::de::DeserializeOwned;

use crate::tuned::TunedOptions;

/// A choice that a sweep makes, and what there is to choose from; the first is the default.
pub(super) struct Dimension {
    pub(super) name: &'static str,
    choices: Vec<Choice>,
}

/// Writes one choice into a set of options.
struct Choice(Box<dyn Fn(&mut TunedOptions) + Send + Sync>);

impl Dimension {
    fn new<T: Copy + Send + Sync + 'static>(
        name: &'static str,
        values: impl IntoIterator<Item = T>,
        set: fn(&mut TunedOptions, T),
    ) -> Self {
        let choice = |value| Choice(Box::new(move |options: &mut TunedOptions| set(options, value)));
        Self {
            name,
            choices: values.into_iter().map(choice).collect(),
        }
    }

    /// `options` with each choice in turn, itself left out.
    pub(super) fn neighbours(&self, options: &TunedOptions) -> Vec<TunedOptions> {
        let mut neighbours = Vec::new();
        for Choice(set) in &self.choices {
            let mut other = *options;
            set(&mut other);
            if other != *options && !neighbours.contains(&other) {
                neighbours.push(other);
            }
        }
        neighbours
    }
}

/// Forms of a kernel: the device's own, then those of these texts.
fn forms<T: DeserializeOwned + Copy + Default>(texts: &[&str]) -> Vec<T> {
    let parsed = texts.iter().filter_map(|text| serde_json::from_str(text).ok());
    std::iter::once(T::default()).chain(parsed).collect()
}

/// Choices on a CPU: sizes alone, its kernels have no options.
pub(super) fn of_cpu() -> Vec<Dimension> {
    vec![page_sizes(&[16, 32, 128]), prefill_tokens(&[128, 256, 1024])]
}

/// Choices on a GPU. What a device or a shape cannot run is refused when it is tried.
pub(super) fn of_gpu() -> Vec<Dimension> {
    let decode_forms = forms::<DecodeKernelOptions>(&[
        r#"{"warps": 4, "stages": 3, "blocks_per_multiprocessor": 2}"#,
        r#"{"warps": 4, "stages": 4, "blocks_per_multiprocessor": 1}"#,
        r#"{"warps": 8, "stages": 3, "blocks_per_multiprocessor": 1}"#,
        r#"{"warps": 8, "stages": 2, "blocks_per_multiprocessor": 1}"#,
        r#"{"warps": 2, "stages": 5, "blocks_per_multiprocessor": 2}"#,
        r#"{"warps": 2, "stages": 4, "blocks_per_multiprocessor": 3}"#,
        r#"{"warps": 4, "stages": 2, "blocks_per_multiprocessor": 3}"#,
    ]);
    let prefill_forms = forms::<PrefillKernelOptions>(&[
        r#"{"kernel": "wgmma", "block_n": 64}"#,
        r#"{"kernel": "mma"}"#,
        r#"{"kernel": "mma", "block_m": 64}"#,
        r#"{"kernel": "mma", "block_n": 128, "blocks_per_multiprocessor": 1}"#,
        r#"{"kernel": "mma", "block_n": 64, "stages": 2, "blocks_per_multiprocessor": 1}"#,
        r#"{"kernel": "mma", "warps": 8, "blocks_per_multiprocessor": 1}"#,
    ]);
    let matrix_forms =
        forms::<MatrixKernelOptions>(&[r#"{"layer_kernel_rows": 0}"#, r#"{"layer_kernel_rows": 8}"#]);
    vec![
        Dimension::new(
            "tokens of a split",
            [None, Some(64), Some(128), Some(256), Some(512), Some(1024)],
            |options, split| options.kernels.decode.split_kv = split,
        ),
        Dimension::new("decode attention's form", decode_forms, |options, form| {
            let decode = &mut options.kernels.decode;
            decode.warps = form.warps;
            decode.stages = form.stages;
            decode.blocks_per_multiprocessor = form.blocks_per_multiprocessor;
        }),
        page_sizes(&[16, 32, 128, 256]),
        Dimension::new("rows of the layer kernel", matrix_forms, |options, form| {
            options.kernels.matrix.layer_kernel_rows = form.layer_kernel_rows;
        }),
        Dimension::new(
            "algorithms of products",
            [None, Some(1), Some(64)],
            |options, algorithms| options.kernels.matrix.algorithms = algorithms,
        ),
        Dimension::new("split products", [None, Some(false)], |options, split| {
            options.kernels.matrix.split_k = split;
        }),
        Dimension::new("prefill attention's form", prefill_forms, |options, form| {
            options.kernels.prefill = form;
        }),
        prefill_tokens(&[1024, 2048, 8192]),
        Dimension::new("splits at most", [None, Some(16), Some(64)], |options, splits| {
            options.kernels.decode.max_splits = splits;
        }),
    ]
}

fn page_sizes(others: &[usize]) -> Dimension {
    let sizes = std::iter::once(None).chain(others.iter().copied().map(Some));
    Dimension::new("page size", sizes, |options, size| options.page_size = size)
}

fn prefill_tokens(others: &[usize]) -> Dimension {
    let tokens = std::iter::once(None).chain(others.iter().copied().map(Some));
    Dimension::new("prompt tokens of a step", tokens, |options, tokens| {
        options.max_prefill_tokens = tokens;
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_can_be_read_and_every_dimension_leads_away_and_back() {
        for (dimensions, least) in [(of_cpu(), 6), (of_gpu(), 25)] {
            let start = TunedOptions::default();
            let mut count = 0;
            for dimension in &dimensions {
                let neighbours = dimension.neighbours(&start);
                assert_eq!(
                    neighbours.len(),
                    dimension.choices.len() - 1,
                    "{}: all differ from the default and each other",
                    dimension.name
                );
                assert!(dimension.neighbours(&neighbours[0]).contains(&start));
                count += neighbours.len();
            }
            assert!(count >= least, "{count}");
        }
        assert_eq!(forms::<DecodeKernelOptions>(&["{\"warps\": 4}"]).len(), 2);
    }
}
