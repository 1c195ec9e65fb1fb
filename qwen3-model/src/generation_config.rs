use std::path::Path;

use crate::Result;
use crate::json::{Fields, parse_object, read_object};

/// What `generation_config.json` says about generating text, as far as it is used here.
///
/// Sampling parameters in the file are a model's recommendation; they are kept as stated and
/// applied by nobody unless a caller does.
///
/// ```
/// use qwen3_model::GenerationConfig;
///
/// let config = GenerationConfig::from_json(br#"{"eos_token_id": [7, 3], "temperature": 0.6}"#)?;
/// assert_eq!((config.eos_token_ids, config.temperature), (vec![7, 3], Some(0.6)));
/// # Ok::<(), qwen3_model::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationConfig {
    /// Ids that end a completion: one or several, without repetition.
    pub eos_token_ids: Vec<u32>,
    /// Padding id.
    pub pad_token_id: Option<u32>,
    /// Beginning-of-sequence id.
    pub bos_token_id: Option<u32>,
    /// Recommended temperature.
    pub temperature: Option<f64>,
    /// Recommended top-p.
    pub top_p: Option<f64>,
    /// Recommended top-k.
    pub top_k: Option<usize>,
    /// Recommended min-p.
    pub min_p: Option<f64>,
    /// Recommended repetition penalty.
    pub repetition_penalty: Option<f64>,
    /// Whether sampling is recommended at all.
    pub do_sample: Option<bool>,
}

impl GenerationConfig {
    /// Reads `dir/generation_config.json`; a folder without one gives `None`.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io), [`Error::Json`](crate::Error::Json), and
    /// [`Error::Field`](crate::Error::Field) for a field of the wrong type.
    pub fn from_dir(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join("generation_config.json");
        if !path.exists() {
            return Ok(None);
        }
        Self::from_fields(&Fields::new(&path, &read_object(&path)?)).map(Some)
    }

    /// Reads the text of a `generation_config.json`.
    ///
    /// # Errors
    /// As [`GenerationConfig::from_dir`].
    pub fn from_json(json: &[u8]) -> Result<Self> {
        let path = Path::new("generation_config.json");
        Self::from_fields(&Fields::new(path, &parse_object(path, json)?))
    }

    fn from_fields(fields: &Fields<'_>) -> Result<Self> {
        let single = |field| -> Result<Option<u32>> { Ok(fields.token_ids(field)?.first().copied()) };
        let mut eos_token_ids = Vec::new();
        for id in fields.token_ids("eos_token_id")? {
            if !eos_token_ids.contains(&id) {
                eos_token_ids.push(id);
            }
        }
        Ok(Self {
            eos_token_ids,
            pad_token_id: single("pad_token_id")?,
            bos_token_id: single("bos_token_id")?,
            temperature: fields.number("temperature")?,
            top_p: fields.number("top_p")?,
            top_k: fields.count("top_k")?,
            min_p: fields.number("min_p")?,
            repetition_penalty: fields.number("repetition_penalty")?,
            do_sample: fields.boolean("do_sample")?,
        })
    }
}
