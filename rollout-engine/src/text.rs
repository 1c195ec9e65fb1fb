//! Text in and out: the tokenizer of a model folder and its chat template.

mod chat_template;
mod incremental;
mod pipeline;
mod python;
mod tokenizer;

pub use chat_template::{ChatTemplate, ChatTemplates};
pub use incremental::IncrementalDecoder;
pub(crate) use incremental::StopText;
pub use pipeline::TextPipeline;
pub use tokenizer::Tokenizer;

/// The first boundary of a character at or after `at`.
pub(crate) fn ceil_char_boundary(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at += 1;
    }
    at
}

/// That of the bundled model, for tests.
#[cfg(test)]
pub(crate) fn bundled_pipeline() -> std::sync::Arc<TextPipeline> {
    let dir = crate::bundled::model_dir().expect("the bundled model");
    let pipeline = TextPipeline::from_dir(dir).expect("reads");
    pipeline.expect("has a tokenizer").into()
}
