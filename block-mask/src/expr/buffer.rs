//! Buffers that functions capture.

use std::sync::Arc;

use super::node::{Float, FloatNode, Int, IntNode};

/// An integer buffer captured by a function; cloning shares it.
///
/// ```
/// use block_mask::MaskMod;
/// use block_mask::expr::{IntBuffer, b, kv};
///
/// let lengths = IntBuffer::new([2, 5]);
/// let mask = MaskMod::new(kv().lt(lengths.at(b())))?;
/// assert!(!mask.allows(0, 0, 0, 3) && mask.allows(1, 0, 0, 3));
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct IntBuffer {
    inner: Arc<IntData>,
}

#[derive(Debug)]
struct IntData {
    values: Vec<i32>,
    // Smallest and largest value: what bounds an index that is itself read from this buffer.
    extent: Option<(i32, i32)>,
}

impl IntBuffer {
    /// Captures `values`.
    pub fn new(values: impl Into<Vec<i32>>) -> IntBuffer {
        let values = values.into();
        let extent = values.iter().copied().min().zip(values.iter().copied().max());
        IntBuffer {
            inner: Arc::new(IntData { values, extent }),
        }
    }

    /// The captured values.
    pub fn values(&self) -> &[i32] {
        &self.inner.values
    }

    pub(crate) fn extent(&self) -> Option<(i32, i32)> {
        self.inner.extent
    }

    pub(crate) fn same(&self, other: &IntBuffer) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// The value at `index`. Indices are checked against the length when the function is bound to a [`Domain`].
    ///
    /// [`Domain`]: crate::expr::Domain
    pub fn at(&self, index: impl Into<Int>) -> Int {
        let index = index.into();
        let info = [index.info()];
        Int::build(IntNode::Load(self.clone(), index), &info)
    }
}

/// An f32 buffer captured by a function; cloning shares it.
///
/// ```
/// use block_mask::ScoreMod;
/// use block_mask::expr::{FloatBuffer, h, score};
///
/// let per_head = FloatBuffer::new([1.0, 0.5]);
/// let scaled = ScoreMod::new(score() * per_head.at(h()))?;
/// assert_eq!((scaled.eval(4.0, 0, 0, 0, 0), scaled.eval(4.0, 0, 1, 0, 0)), (4.0, 2.0));
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct FloatBuffer {
    values: Arc<Vec<f32>>,
}

impl FloatBuffer {
    /// Captures `values`.
    pub fn new(values: impl Into<Vec<f32>>) -> FloatBuffer {
        FloatBuffer {
            values: Arc::new(values.into()),
        }
    }

    /// The captured values.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    pub(crate) fn same(&self, other: &FloatBuffer) -> bool {
        Arc::ptr_eq(&self.values, &other.values)
    }

    /// The value at `index`. Indices are checked against the length when the function is bound to a [`Domain`].
    ///
    /// [`Domain`]: crate::expr::Domain
    pub fn at(&self, index: impl Into<Int>) -> Float {
        let index = index.into();
        let info = [index.info()];
        Float::build(FloatNode::Load(self.clone(), index), &info)
    }
}
