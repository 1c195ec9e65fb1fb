/// One of the seven matrices of a layer, by its name in Hugging Face files.
///
/// ```
/// use qwen3_model::{FusedMatrix, Projection};
///
/// assert_eq!(Projection::Up.module(3), "model.layers.3.mlp.up_proj");
/// assert_eq!(Projection::Up.fused(), FusedMatrix::GateUp);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Projection {
    /// `self_attn.q_proj`: `[n_heads * head_dim, hidden]`.
    Q,
    /// `self_attn.k_proj`: `[n_kv_heads * head_dim, hidden]`.
    K,
    /// `self_attn.v_proj`: `[n_kv_heads * head_dim, hidden]`.
    V,
    /// `self_attn.o_proj`: `[hidden, n_heads * head_dim]`.
    O,
    /// `mlp.gate_proj`: `[intermediate, hidden]`.
    Gate,
    /// `mlp.up_proj`: `[intermediate, hidden]`.
    Up,
    /// `mlp.down_proj`: `[hidden, intermediate]`.
    Down,
}

impl Projection {
    /// All seven, in the order in which a layer applies them.
    pub const ALL: [Self; 7] = [
        Self::Q,
        Self::K,
        Self::V,
        Self::O,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    /// Name within a layer, for instance `self_attn.q_proj`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q => "self_attn.q_proj",
            Self::K => "self_attn.k_proj",
            Self::V => "self_attn.v_proj",
            Self::O => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        }
    }

    /// Full module name in the model, for instance `model.layers.3.self_attn.q_proj`.
    pub fn module(self, layer: usize) -> String {
        format!("model.layers.{layer}.{}", self.name())
    }

    /// The fused product that computes this projection.
    pub fn fused(self) -> FusedMatrix {
        match self {
            Self::Q | Self::K | Self::V => FusedMatrix::Qkv,
            Self::O => FusedMatrix::O,
            Self::Gate | Self::Up => FusedMatrix::GateUp,
            Self::Down => FusedMatrix::Down,
        }
    }
}

/// A matrix product as a backend runs it: projections with the same input are one.
///
/// ```
/// use qwen3_model::{FusedMatrix, Projection};
///
/// assert_eq!(FusedMatrix::GateUp.parts(), [Projection::Gate, Projection::Up]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FusedMatrix {
    /// Query, key and value rows, in this order; normed hidden state in.
    Qkv,
    /// Attention output in, residual width out.
    O,
    /// Gate and up rows, in this order; normed hidden state in.
    GateUp,
    /// Gated MLP state in, residual width out.
    Down,
}

impl FusedMatrix {
    /// All four, in the order in which a layer applies them.
    pub const ALL: [Self; 4] = [Self::Qkv, Self::O, Self::GateUp, Self::Down];

    /// The projections whose rows make up the matrix, in order.
    pub fn parts(self) -> &'static [Projection] {
        match self {
            Self::Qkv => &[Projection::Q, Projection::K, Projection::V],
            Self::O => &[Projection::O],
            Self::GateUp => &[Projection::Gate, Projection::Up],
            Self::Down => &[Projection::Down],
        }
    }
}
