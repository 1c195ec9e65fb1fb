//! Text in and out: the tokenizer of a model folder and its chat template.

mod chat_template;
mod pipeline;
mod python;
mod tokenizer;

pub use chat_template::{ChatTemplate, ChatTemplates};
pub use pipeline::TextPipeline;
pub use tokenizer::Tokenizer;
