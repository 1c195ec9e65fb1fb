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
