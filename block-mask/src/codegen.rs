//! Mask and score functions printed as CUDA C.
//!
//! [`cuda_source`] prints one mask function and, if given, one score function into a self-contained piece of text that
//! defines, in this order:
//!
//! ```c
//! struct Captures {            // the captured buffers: pointers first, then their lengths
//!     const int*   i0;         // integer buffers i0, i1, … in the order of CudaSource::ints
//!     const float* f0;         // float buffers   f0, f1, … in the order of CudaSource::floats
//!     int i0_len; int f0_len;  // lengths in values, in the same order
//! };
//! __device__ __forceinline__ bool  mask_mod(int b, int h, int q, int kv, const Captures& c);
//! __device__ __forceinline__ float score_mod(float score, int b, int h, int q, int kv, const Captures& c);
//! ```
//!
//! `q` and `kv` are logical positions and `b` is the batch row, as on the CPU. The text uses no header, no library
//! function beyond `expf`, `logf`, `sqrtf`, `tanhf`, and never reads outside a buffer: an index beyond it reads as 0, so
//! a kernel may evaluate the functions on padding lanes as well.
//!
//! The host fills `Captures` as bytes: [`CudaSource::captures_bytes`] lays out device addresses and lengths in exactly
//! the order above. A struct without buffers holds one unused `int`.
//!
//! Text depends on the tree alone, not on buffer contents or lengths, so compiled kernels can be cached by it.

use std::fmt::Write;

use crate::expr::{
    Axis, Bool, BoolNode, Compare, Float, FloatBuffer, FloatFn, FloatNode, FloatOp, Int, IntBuffer, IntNode,
    IntOp,
};
use crate::{MaskMod, ScoreMod};

/// CUDA C text with the buffers that it captures.
///
/// ```
/// use block_mask::MaskMod;
///
/// let source = (MaskMod::causal() & MaskMod::padding([7, 9])).to_cuda();
/// assert!(source.code.contains("mask_mod"));
/// assert_eq!(source.ints[0].values(), [7, 9]);
/// assert!(source.captures_bytes(&[0x1000]).is_some() && source.captures_bytes(&[]).is_none(), "one buffer");
/// ```
#[derive(Clone, Debug)]
pub struct CudaSource {
    /// The text: `struct Captures`, `mask_mod`, `score_mod` and their helpers.
    pub code: String,
    /// Integer buffers in the order `c.i0`, `c.i1`, …
    pub ints: Vec<IntBuffer>,
    /// Float buffers in the order `c.f0`, `c.f1`, …
    pub floats: Vec<FloatBuffer>,
}

impl CudaSource {
    /// What distinguishes the function from `other`, if anything: its text or the values that it captured.
    #[cfg_attr(
        not(feature = "cuda"),
        allow(dead_code, reason = "masks are bound to kernels on a device")
    )]
    pub(crate) fn difference(&self, other: &CudaSource) -> Option<&'static str> {
        if self.code != other.code {
            return Some("text");
        }
        let ints = self.ints.iter().zip(&other.ints);
        let floats = self.floats.iter().zip(&other.floats);
        let bits = |x: &FloatBuffer| x.values().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        // Equal texts capture equally many buffers.
        let same = ints.clone().all(|(x, y)| x.same(y) || x.values() == y.values())
            && floats.clone().all(|(x, y)| x.same(y) || bits(x) == bits(y));
        (!same).then_some("captured values")
    }

    /// The bytes of `struct Captures`, given the device addresses of the buffers in the order of
    /// [`ints`](Self::ints) then [`floats`](Self::floats). `None` if the number of addresses differs.
    pub fn captures_bytes(&self, addresses: &[u64]) -> Option<Vec<u8>> {
        if addresses.len() != self.ints.len() + self.floats.len() {
            return None;
        }
        if addresses.is_empty() {
            return Some(vec![0; 4]);
        }
        let mut bytes: Vec<u8> = addresses
            .iter()
            .flat_map(|address| address.to_ne_bytes())
            .collect();
        let lengths = self
            .ints
            .iter()
            .map(|x| x.values().len())
            .chain(self.floats.iter().map(|x| x.values().len()));
        bytes.extend(lengths.flat_map(|len| (len.min(i32::MAX as usize) as i32).to_ne_bytes()));
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        Some(bytes)
    }
}

/// Prints `mask` and `score` (the identity if absent).
///
/// ```
/// use block_mask::{MaskMod, codegen::cuda_source};
/// let source = cuda_source(&MaskMod::causal(), None);
/// assert!(source.code.contains("return (q >= kv);"));
/// ```
pub fn cuda_source(mask: &MaskMod, score: Option<&ScoreMod>) -> CudaSource {
    let mut printer = Printer {
        ints: Vec::new(),
        floats: Vec::new(),
    };
    let mask = printer.boolean(mask.expr());
    let score = score.map_or_else(|| "score".to_owned(), |score| printer.float(score.expr()));
    let Printer { ints, floats } = printer;

    let mut code = String::from("struct Captures {\n");
    let fields: Vec<(&str, String)> = (0..ints.len())
        .map(|i| ("int", format!("i{i}")))
        .chain((0..floats.len()).map(|i| ("float", format!("f{i}"))))
        .collect();
    for (kind, name) in &fields {
        let _ = writeln!(code, "    const {kind}* {name};");
    }
    for (_, name) in &fields {
        let _ = writeln!(code, "    int {name}_len;");
    }
    if fields.is_empty() {
        code.push_str("    int unused;\n");
    }
    code.push_str("};\n");
    code.push_str(HELPERS);
    let _ = write!(
        code,
        "__device__ __forceinline__ bool mask_mod(int b, int h, int q, int kv, const Captures& c) {{\n    \
         return {mask};\n}}\n\
         __device__ __forceinline__ float score_mod(float score, int b, int h, int q, int kv, const Captures& c) {{\n    \
         return {score};\n}}\n"
    );
    CudaSource { code, ints, floats }
}

// The casts make signed arithmetic wrap, which plain C leaves undefined.
const HELPERS: &str = "\
__device__ __forceinline__ int bm_add(int x, int y) { return (int)((unsigned)x + (unsigned)y); }
__device__ __forceinline__ int bm_sub(int x, int y) { return (int)((unsigned)x - (unsigned)y); }
__device__ __forceinline__ int bm_mul(int x, int y) { return (int)((unsigned)x * (unsigned)y); }
__device__ __forceinline__ int bm_min(int x, int y) { return x < y ? x : y; }
__device__ __forceinline__ int bm_max(int x, int y) { return x > y ? x : y; }
__device__ __forceinline__ int bm_div(int x, int y) {
    if (y == 0) return 0;
    if (y == -1) return bm_sub(0, x);
    int d = x / y;
    return ((x % y != 0) && ((x % y < 0) != (y < 0))) ? d - 1 : d;
}
__device__ __forceinline__ int bm_rem(int x, int y) {
    return y == 0 ? 0 : bm_sub(x, bm_mul(bm_div(x, y), y));
}
__device__ __forceinline__ float bm_fmin(float x, float y) { return x != x ? y : (y < x ? y : x); }
__device__ __forceinline__ float bm_fmax(float x, float y) { return x != x ? y : (y > x ? y : x); }
__device__ __forceinline__ int bm_at(const int* p, int len, int i) { return (unsigned)i < (unsigned)len ? p[i] : 0; }
__device__ __forceinline__ float bm_at(const float* p, int len, int i) {
    return (unsigned)i < (unsigned)len ? p[i] : 0.0f;
}
";

struct Printer {
    ints: Vec<IntBuffer>,
    floats: Vec<FloatBuffer>,
}

impl Printer {
    fn int_buffer(&mut self, buffer: &IntBuffer) -> usize {
        self.ints
            .iter()
            .position(|known| known.same(buffer))
            .unwrap_or_else(|| {
                self.ints.push(buffer.clone());
                self.ints.len() - 1
            })
    }

    fn float_buffer(&mut self, buffer: &FloatBuffer) -> usize {
        self.floats
            .iter()
            .position(|known| known.same(buffer))
            .unwrap_or_else(|| {
                self.floats.push(buffer.clone());
                self.floats.len() - 1
            })
    }

    fn integer(&mut self, expr: &Int) -> String {
        match expr.node() {
            // The most negative integer has no literal of type int.
            IntNode::Const(i32::MIN) => "(-2147483647 - 1)".to_owned(),
            IntNode::Const(value) if *value < 0 => format!("({value})"),
            IntNode::Const(value) => format!("{value}"),
            IntNode::Axis(axis) => match axis {
                Axis::Batch => "b",
                Axis::Head => "h",
                Axis::Query => "q",
                Axis::Key => "kv",
            }
            .to_owned(),
            IntNode::Binary(op, x, y) => {
                let name = match op {
                    IntOp::Add => "add",
                    IntOp::Sub => "sub",
                    IntOp::Mul => "mul",
                    IntOp::Div => "div",
                    IntOp::Rem => "rem",
                    IntOp::Min => "min",
                    IntOp::Max => "max",
                };
                format!("bm_{name}({}, {})", self.integer(x), self.integer(y))
            }
            IntNode::Load(buffer, index) => {
                let i = self.int_buffer(buffer);
                format!("bm_at(c.i{i}, c.i{i}_len, {})", self.integer(index))
            }
            IntNode::Select(condition, x, y) => {
                format!(
                    "({} ? {} : {})",
                    self.boolean(condition),
                    self.integer(x),
                    self.integer(y)
                )
            }
        }
    }

    fn float(&mut self, expr: &Float) -> String {
        match expr.node() {
            FloatNode::Const(value) => format!("__int_as_float({:#010x}) /* {value} */", value.to_bits()),
            FloatNode::Score => "score".to_owned(),
            FloatNode::FromInt(x) => format!("(float){}", self.integer(x)),
            FloatNode::Load(buffer, index) => {
                let i = self.float_buffer(buffer);
                format!("bm_at(c.f{i}, c.f{i}_len, {})", self.integer(index))
            }
            FloatNode::Binary(op, x, y) => {
                let (x, y) = (self.float(x), self.float(y));
                match op {
                    FloatOp::Add => format!("({x} + {y})"),
                    FloatOp::Sub => format!("({x} - {y})"),
                    // Never joined with an addition into one rounding, as on the CPU; see bf16.cuh.
                    FloatOp::Mul => format!("__fmul_rn({x}, {y})"),
                    FloatOp::Div => format!("({x} / {y})"),
                    FloatOp::Min => format!("bm_fmin({x}, {y})"),
                    FloatOp::Max => format!("bm_fmax({x}, {y})"),
                }
            }
            FloatNode::Unary(op, x) => {
                let x = self.float(x);
                match op {
                    FloatFn::Neg => format!("(-{x})"),
                    FloatFn::Abs => format!("fabsf({x})"),
                    FloatFn::Exp => format!("expf({x})"),
                    FloatFn::Log => format!("logf({x})"),
                    FloatFn::Sqrt => format!("sqrtf({x})"),
                    FloatFn::Tanh => format!("tanhf({x})"),
                }
            }
            FloatNode::Select(condition, x, y) => {
                format!(
                    "({} ? {} : {})",
                    self.boolean(condition),
                    self.float(x),
                    self.float(y)
                )
            }
        }
    }

    fn boolean(&mut self, expr: &Bool) -> String {
        let symbol = |op: &Compare| match op {
            Compare::Lt => "<",
            Compare::Le => "<=",
            Compare::Gt => ">",
            Compare::Ge => ">=",
            Compare::Eq => "==",
            Compare::Ne => "!=",
        };
        match expr.node() {
            BoolNode::Const(value) => format!("{value}"),
            BoolNode::CompareInt(op, x, y) => {
                format!("({} {} {})", self.integer(x), symbol(op), self.integer(y))
            }
            BoolNode::CompareFloat(op, x, y) => {
                format!("({} {} {})", self.float(x), symbol(op), self.float(y))
            }
            BoolNode::And(x, y) => format!("({} && {})", self.boolean(x), self.boolean(y)),
            BoolNode::Or(x, y) => format!("({} || {})", self.boolean(x), self.boolean(y)),
            BoolNode::Not(x) => format!("(!{})", self.boolean(x)),
        }
    }
}

impl MaskMod {
    /// This function alone as CUDA C; see [`crate::codegen`].
    pub fn to_cuda(&self) -> CudaSource {
        cuda_source(self, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockMask, KvBlocks, MaskShape};
    use paged_kv::{PageTable, PageTableConfig};

    #[test]
    fn a_mask_from_lists_has_another_function_than_the_one_given() {
        let config = PageTableConfig {
            n_pages: 8,
            page_size: 16,
            n_slots: 3,
            max_pages_per_slot: 4,
        };
        let mut table = PageTable::new(config).unwrap();
        let slot = table.allocate_slot().unwrap();
        let _ = table.reserve(slot, 40).unwrap();
        table.advance(slot, 40).unwrap();
        let shape = MaskShape::new(1, 1, 16, 40).with_blocks(16, 16);
        // The third block is full and ends at 40 of 48: its 8 keys are visible although causality hides them.
        let lists = KvBlocks {
            num_blocks: &[0],
            indices: &[0; 3],
            full_num_blocks: &[1],
            full_indices: &[2, 0, 0],
        };
        let given = MaskMod::causal();
        let mask = BlockMask::from_kv_blocks(shape, &lists, given.clone()).unwrap();
        let mask = mask.to_physical(&table, &[slot]).unwrap();
        assert!(mask.mask_mod().allows(0, 0, 0, 39) && !given.allows(0, 0, 0, 39));
        assert_eq!(
            mask.mask_mod().to_cuda().difference(&given.to_cuda()),
            Some("text")
        );
        let mask = BlockMask::from_fn(shape, given.clone()).unwrap();
        let mask = mask.to_physical(&table, &[slot]).unwrap();
        assert_eq!(mask.mask_mod().to_cuda().difference(&given.to_cuda()), None);
    }

    #[test]
    fn functions_of_one_text_differ_by_what_they_captured() {
        let source = |prefix: Vec<i32>| MaskMod::prefix_lm(prefix).to_cuda();
        assert_eq!(source(vec![3, 4]).difference(&source(vec![3, 4])), None);
        assert_eq!(
            source(vec![3, 4]).difference(&source(vec![3, 5])),
            Some("captured values")
        );
        assert_eq!(
            source(vec![3]).difference(&source(vec![3, 5])),
            Some("captured values")
        );
    }
}
