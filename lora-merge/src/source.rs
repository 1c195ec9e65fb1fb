//! Where pristine weights come from: memory for speed, or a file that is read again for a smaller footprint.

use crate::{Error, ModuleSpec, Result};
use half::bf16;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Mutex;

/// The base model's weights, which nobody ever writes.
///
/// Modules are counted in the order of the [`ModuleSpec`]s of the [`crate::MergedStore`]. Every call for the same
/// module must give the same bits; `verify-no-drift` checks that it does.
///
/// ```
/// # use half::bf16;
/// # use lora_merge::*;
/// use lora_merge::{MergedStore, ModuleSpec, PristineSource};
///
/// /// Weights that are computed, not held.
/// struct Ones;
///
/// impl PristineSource for Ones {
///     fn slice(&self, _: usize) -> Option<&[bf16]> { None }
///     fn read(&self, _: usize, out: &mut [bf16]) -> Result<(), String> {
///         out.fill(bf16::ONE);
///         Ok(())
///     }
/// }
/// let store = MergedStore::new(vec![ModuleSpec::linear("q_proj", 1, 2)], Ones)?;
/// assert_eq!(store.weight(0), Some(&[bf16::ONE; 2][..]));
/// # Ok::<(), lora_merge::Error>(())
/// ```
pub trait PristineSource: Send + Sync {
    /// The weight, row-major as stored, if it lies in memory (owned, borrowed or mapped).
    fn slice(&self, module: usize) -> Option<&[bf16]>;

    /// Copies the weight into `out`. Called only where [`PristineSource::slice`] gives `None`.
    ///
    /// # Errors
    /// A text that says what failed.
    fn read(&self, module: usize, out: &mut [bf16]) -> Result<(), String> {
        let slice = self.slice(module).ok_or("the source holds no such module")?;
        if slice.len() != out.len() {
            return Err(format!("{} elements instead of {}", slice.len(), out.len()));
        }
        out.copy_from_slice(slice);
        Ok(())
    }

    /// Why no update can be merged into this module, if none can. Such a module has no bf16 weight: `slice` gives `None`
    /// and `read` an error.
    fn refusal(&self, module: usize) -> Option<&'static str> {
        let _ = module;
        None
    }

    /// The base module's bias `[out]`, if it has one.
    fn bias(&self, module: usize) -> Option<&[f32]> {
        let _ = module;
        None
    }

    /// Bytes of memory that this module's pristine copy takes. A mapped file takes none of its own.
    fn resident_bytes(&self, module: usize) -> usize {
        self.slice(module).map_or(0, size_of_val)
    }
}

/// Weights in memory that the source owns.
///
/// ```
/// # use half::bf16;
/// # use lora_merge::*;
/// use lora_merge::{OwnedWeights, PristineSource};
///
/// let weights = OwnedWeights::new([vec![bf16::ONE; 4]]).with_bias(0, vec![0.5, -0.5]);
/// assert_eq!(weights.slice(0).map(<[_]>::len), Some(4));
/// assert_eq!(weights.bias(0), Some(&[0.5, -0.5][..]));
/// assert_eq!(weights.resident_bytes(0), 8);
/// ```
#[derive(Clone, Debug, Default)]
pub struct OwnedWeights {
    weights: Vec<Box<[bf16]>>,
    biases: Vec<Option<Box<[f32]>>>,
}

impl OwnedWeights {
    /// One weight per module, in the order of the specs. Panics: none.
    pub fn new(weights: impl IntoIterator<Item = Vec<bf16>>) -> Self {
        let weights: Vec<_> = weights.into_iter().map(Vec::into_boxed_slice).collect();
        Self {
            biases: vec![None; weights.len()],
            weights,
        }
    }

    /// Gives a module's base a bias `[out]`; without effect if there is no such module. Its length is checked where the
    /// source meets the modules. Panics: none.
    #[must_use]
    pub fn with_bias(mut self, module: usize, bias: Vec<f32>) -> Self {
        if let Some(slot) = self.biases.get_mut(module) {
            *slot = Some(bias.into_boxed_slice());
        }
        self
    }
}

impl PristineSource for OwnedWeights {
    fn slice(&self, module: usize) -> Option<&[bf16]> {
        self.weights.get(module).map(|w| &w[..])
    }

    fn bias(&self, module: usize) -> Option<&[f32]> {
        self.biases.get(module)?.as_deref()
    }
}

/// Weights in memory that belong to someone else.
///
/// ```
/// # use half::bf16;
/// # use lora_merge::*;
/// use lora_merge::{BorrowedWeights, PristineSource};
///
/// let model = [bf16::ONE; 4];
/// let weights = BorrowedWeights(vec![&model]);
/// assert_eq!(weights.slice(0), Some(&model[..]));
/// assert_eq!(weights.resident_bytes(0), 0, "the model's own");
/// ```
#[derive(Clone, Debug)]
pub struct BorrowedWeights<'a>(pub Vec<&'a [bf16]>);

impl PristineSource for BorrowedWeights<'_> {
    fn slice(&self, module: usize) -> Option<&[bf16]> {
        self.0.get(module).copied()
    }

    fn resident_bytes(&self, _module: usize) -> usize {
        0
    }
}

/// Weights that are read from a file again at every refresh: half the memory, a slower refresh.
///
/// ```
/// # use half::bf16;
/// # use lora_merge::*;
/// use lora_merge::{FileWeights, ModuleSpec, PristineSource};
///
/// let path = std::env::temp_dir().join(format!("weights-{}", std::process::id()));
/// std::fs::write(&path, [0x80, 0x3f, 0x00, 0x40]).expect("writable"); // 1 and 2 in bf16
/// let weights = FileWeights::open(&path, &[ModuleSpec::linear("q_proj", 1, 2)], vec![0])?;
/// let mut read = [bf16::ZERO; 2];
/// weights.read(0, &mut read).expect("it is there");
/// assert_eq!(read, [1.0, 2.0].map(bf16::from_f32));
/// # std::fs::remove_file(path).ok();
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Debug)]
pub struct FileWeights {
    file: Mutex<File>,
    /// Byte offset and elements of each module.
    places: Vec<(u64, usize)>,
}

impl FileWeights {
    /// Reads little-endian bf16 at one byte offset per module.
    ///
    /// # Errors
    /// [`Error::Read`] if the file cannot be opened; [`Error::Pristine`] if a module lies beyond its end. Panics:
    /// none.
    pub fn open(path: impl AsRef<Path>, specs: &[ModuleSpec], offsets: Vec<u64>) -> Result<Self> {
        let path = path.as_ref();
        let fail = |source| Error::Read {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(fail)?;
        let len = file.metadata().map_err(fail)?.len();
        crate::resolve::check_length("the list of offsets", specs.len(), offsets.len())?;
        for (spec, offset) in specs.iter().zip(&offsets) {
            let end = offset.saturating_add((spec.elements() as u64).saturating_mul(2));
            if end > len {
                let reason = format!("bytes {offset}..{end} of a file of {len} bytes");
                return Err(Error::Pristine {
                    module: spec.name.clone(),
                    reason,
                });
            }
        }
        let elements = specs.iter().map(ModuleSpec::elements);
        Ok(Self {
            file: Mutex::new(file),
            places: offsets.into_iter().zip(elements).collect(),
        })
    }

    /// The bf16 tensors of a safetensors file, by `{module}.weight`.
    ///
    /// # Errors
    /// As [`FileWeights::open`], and [`Error::Pristine`] for a tensor that is absent, is no bf16 or has another
    /// shape. Panics: none.
    pub fn from_safetensors(path: impl AsRef<Path>, specs: &[ModuleSpec]) -> Result<Self> {
        let path = path.as_ref();
        let fail = |source| Error::Read {
            path: path.to_owned(),
            source,
        };
        let mut file = File::open(path).map_err(fail)?;
        let file_len = file.metadata().map_err(fail)?.len();
        let mut len = [0u8; 8];
        file.read_exact(&mut len).map_err(fail)?;
        let len = u64::from_le_bytes(len);
        if len > file_len.saturating_sub(8) || len > 100_000_000 {
            return Err(Error::Container {
                reason: format!("a header of {len} bytes in a file of {file_len}"),
            });
        }
        let mut header = Vec::new();
        file.take(len).read_to_end(&mut header).map_err(fail)?;
        let metadata: safetensors::tensor::Metadata =
            serde_json::from_slice(&header).map_err(|e| Error::Container {
                reason: e.to_string(),
            })?;
        let offset = |spec: &ModuleSpec| {
            let fail = |reason: String| Error::Pristine {
                module: spec.name.clone(),
                reason,
            };
            let info = metadata
                .info(&format!("{}.weight", spec.name))
                .ok_or_else(|| fail("no such tensor".into()))?;
            let (rows, columns) = spec.stored_shape();
            if info.dtype != safetensors::Dtype::BF16 || info.shape != [rows, columns] {
                return Err(fail(format!(
                    "{:?} {:?} instead of BF16 [{rows}, {columns}]",
                    info.dtype, info.shape
                )));
            }
            // An offset that wraps would lie within the file.
            Ok((8 + len).saturating_add(info.data_offsets.0 as u64))
        };
        Self::open(path, specs, specs.iter().map(offset).collect::<Result<_>>()?)
    }
}

impl PristineSource for FileWeights {
    fn slice(&self, _module: usize) -> Option<&[bf16]> {
        None
    }

    fn read(&self, module: usize, out: &mut [bf16]) -> Result<(), String> {
        let (offset, elements) = *self.places.get(module).ok_or("no such module")?;
        if elements != out.len() {
            return Err(format!("{elements} elements instead of {}", out.len()));
        }
        let mut file = self.file.lock().map_err(|_| "a reader panicked")?;
        file.seek(SeekFrom::Start(offset)).map_err(|e| e.to_string())?;
        file.read_exact(bytemuck::cast_slice_mut(out))
            .map_err(|e| e.to_string())?;
        if cfg!(target_endian = "big") {
            for value in out {
                *value = bf16::from_bits(value.to_bits().swap_bytes());
            }
        }
        Ok(())
    }
}
