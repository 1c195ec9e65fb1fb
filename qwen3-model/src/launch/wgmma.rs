//! The matrix instruction of `kernels/wgmma.cuh`, for the number of tiles that a kernel is compiled for: its operands are one
//! register each, so every shape is an instruction of its own.

use cuda_graphs::Header;

/// `multiply(d, a, b, accumulate)` for a `d` of `tiles` tiles of 64 rows and 8 columns, at most 32.
pub(super) fn product_header(tiles: usize) -> Header {
    let registers = 4 * tiles;
    let list = |of: &dyn Fn(usize) -> String, n: usize| (0..n).map(of).collect::<Vec<_>>().join(", ");
    let names = list(&|i| format!("%{i}"), registers);
    let operands = list(&|i| format!("\"+f\"(d[{}][{}])", i / 4, i % 4), registers);
    let (a, b, accumulate) = (registers, registers + 1, registers + 2);
    let text = format!(
        "#pragma once\n\
         __device__ __forceinline__ void multiply(float (&d)[{tiles}][4], u64 a, u64 b, bool accumulate) {{\n    \
         asm volatile(\n        \
         \"{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{accumulate}, 0;\\n\"\n        \
         \"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{names}}}, %{a}, %{b}, p, 1, 1, 0, 0;\\n}}\"\n        \
         : {operands}\n        : \"l\"(a), \"l\"(b), \"r\"((int)accumulate)\n        : \"memory\");\n}}\n",
        columns = 8 * tiles,
    );
    Header {
        name: "wgmma_product.cuh".into(),
        text: text.into(),
    }
}
