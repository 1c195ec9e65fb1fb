//! The kernels as data, with what each may use.

use cuda_graphs::{Arch, Archs, Header, KernelSpec, Limits};

use super::options::DECODE_FORMS;
use super::{AttentionShape, DecodeOptions, Functions, TileOptions};
use crate::expr::{b, h, kv, q};
use crate::{MaskMod, ScoreMod, alibi_slopes};

macro_rules! header {
    ($name:literal) => {
        Header::new($name, include_str!(concat!("../../kernels/", $name)))
    };
}

fn headers() -> Vec<Header> {
    vec![
        header!("bf16.cuh"),
        header!("mma.cuh"),
        header!("async_copy.cuh"),
        header!("tile.cuh"),
        header!("paging.cuh"),
        header!("softmax.cuh"),
        header!("mods.cuh"),
        header!("decode_plan.cuh"),
        header!("decode_attention.cuh"),
        header!("decode_merge.cuh"),
        header!("decode_shared.cuh"),
        header!("decode_together.cuh"),
        header!("prefill_attention.cuh"),
        header!("prefill_causal.cuh"),
        header!("flex_attention.cuh"),
        header!("bulk_copy.cuh"),
        header!("wgmma.cuh"),
        header!("prefill_wgmma.cuh"),
    ]
}

/// Every kernel in every specialisation that is used without options of one's own, and one of each with functions; for
/// compiling ahead and for tests without a GPU.
pub fn kernel_specs() -> Vec<KernelSpec> {
    let none = Functions::none();
    let mut specs = vec![decode_plan_spec()];
    for options in [TileOptions::default(), TileOptions::warpgroups()] {
        let options = TileOptions {
            rows_guaranteed_safe: true,
            ..options
        };
        specs.push(counting_prefill_spec(128, &options, &none));
    }
    for head_dim in [64, 128] {
        let shape = |group| AttentionShape {
            heads: group,
            kv_heads: 1,
            head_dim,
            page_size: 16,
            n_pages: 1,
        };
        // The forms that devices with 228, 164 and 100 KiB of shared memory take.
        for (warps, stages, blocks) in [DECODE_FORMS[0], DECODE_FORMS[1], DECODE_FORMS[3]] {
            specs.push(decode_spec(
                &shape(8),
                &DecodeOptions::of(warps, stages, blocks),
                &none,
            ));
        }
        let (warps, stages, blocks) = DECODE_FORMS[0];
        let options = DecodeOptions::of(warps, stages, blocks);
        specs.push(decode_spec(&shape(16), &options, &none));
        for (warps, stages, blocks) in [DECODE_FORMS[0], DECODE_FORMS[3]] {
            let options = DecodeOptions::of(warps, stages, blocks).in_fixed_splits(1);
            specs.push(decode_spec(&shape(8), &options.for_tokens_together(), &none));
        }
        for block_m in [64, 128] {
            // Causal prefill without functions is always safe.
            let options = TileOptions {
                block_m,
                rows_guaranteed_safe: true,
                ..TileOptions::default()
            };
            specs.push(prefill_spec(head_dim, &options, &none));
        }
        for block_n in [64, 128] {
            let options = TileOptions {
                block_n,
                rows_guaranteed_safe: true,
                ..TileOptions::warpgroups()
            };
            specs.push(prefill_spec(head_dim, &options, &none));
        }
        for blocks_are_contiguous in [false, true] {
            let options = TileOptions {
                blocks_are_contiguous,
                ..TileOptions::default()
            };
            specs.push(flex_spec(head_dim, &options, &none));
        }
        let functions = sample_functions();
        let options = TileOptions {
            block_m: 64,
            ..TileOptions::default()
        };
        specs.push(decode_spec(&shape(8), &DecodeOptions::of(4, 3, 2), &functions));
        specs.push(prefill_spec(head_dim, &options, &functions));
        specs.push(prefill_spec(head_dim, &TileOptions::warpgroups(), &functions));
        specs.push(flex_spec(head_dim, &options, &functions));
    }
    specs
}

/// Functions that use every kind of node that is printed: integers, floats, buffers, choices.
fn sample_functions() -> Functions {
    let mask = (MaskMod::causal() & MaskMod::sliding_window(100)) | MaskMod::prefix_lm(vec![3, 5]);
    let score =
        alibi_slopes(8).and_then(|slopes| Ok(ScoreMod::alibi(slopes).then(&ScoreMod::soft_cap(20.0)?)));
    let by_parity = MaskMod::new((q() + kv() + b() + h()).rem_floor(2).equals(0));
    let mask = by_parity.map_or(mask.clone(), |parity| mask & !parity);
    Functions::text_only(Some(&mask), score.ok().as_ref())
}

pub(crate) fn decode_plan_spec() -> KernelSpec {
    KernelSpec::new("decode_plan", include_str!("../../kernels/decode_plan.cu"))
        .headers(headers())
        .entry("decode_plan", Limits::registers(64))
}

pub(crate) fn decode_spec(
    shape: &AttentionShape,
    options: &DecodeOptions,
    functions: &Functions,
) -> KernelSpec {
    let (head_dim, tiles) = (shape.head_dim, options.tiles(shape));
    let DecodeOptions {
        warps,
        stages,
        blocks_per_multiprocessor: blocks,
        ..
    } = *options;
    let (kernel, source, limits) = if options.together {
        // 32 query heads of 128 elements take every register; a few words spilled outside the loop cost nothing.
        let limits = Limits {
            spill_bytes: 112,
            stack_bytes: 40,
            ..Limits::registers(255)
        };
        (
            "decode_together",
            include_str!("../../kernels/decode_together.cu"),
            limits,
        )
    } else {
        // Two blocks of 128 threads fit with up to 255 registers. Merging splits takes most of them, for loads in flight. In the
        // forms for few query heads the compiler leaves what a block finds out about its items in local memory, 64 bytes of it.
        let limits = Limits {
            // The ring of four stages, for devices with 164 KiB of shared memory.
            spill_bytes: if stages == 4 { 48 } else { 0 },
            stack_bytes: match tiles {
                1 if stages == 4 => 96,
                1 | 2 => 64,
                _ => 0,
            },
            ..Limits::registers(255)
        };
        (
            "decode_attention",
            include_str!("../../kernels/decode_attention.cu"),
            limits,
        )
    };
    let name = format!("{kernel}<{head_dim},{tiles}> {warps} warps {stages} stages {blocks} blocks");
    with_functions(KernelSpec::new(name, source), functions)
        .define("HEAD_DIM", head_dim)
        .define("N_TILES", tiles)
        .define("WARPS", warps)
        .define("STAGES", stages)
        .define("BLOCKS_PER_SM", blocks)
        .entry(kernel, limits)
}

pub(crate) fn prefill_spec(head_dim: usize, options: &TileOptions, functions: &Functions) -> KernelSpec {
    if options.warpgroup_products {
        return tile_spec(
            "prefill_wgmma",
            include_str!("../../kernels/prefill_wgmma.cu"),
            head_dim,
            options,
            functions,
        )
        .archs(Archs::Only(vec![Arch::SM_90A]));
    }
    tile_spec(
        "prefill_attention",
        include_str!("../../kernels/prefill_attention.cu"),
        head_dim,
        options,
        functions,
    )
}

/// A prefill kernel that counts the blocks of keys that it visits.
pub(crate) fn counting_prefill_spec(
    head_dim: usize,
    options: &TileOptions,
    functions: &Functions,
) -> KernelSpec {
    let mut spec = prefill_spec(head_dim, options, functions).define("COUNT_BLOCKS", 1);
    spec.name = format!("{} counting", spec.name).into();
    spec
}

pub(crate) fn flex_spec(head_dim: usize, options: &TileOptions, functions: &Functions) -> KernelSpec {
    tile_spec(
        "flex_attention",
        include_str!("../../kernels/flex_attention.cu"),
        head_dim,
        options,
        functions,
    )
}

fn tile_spec(
    kernel: &'static str,
    source: &'static str,
    head_dim: usize,
    options: &TileOptions,
    functions: &Functions,
) -> KernelSpec {
    let TileOptions {
        block_m,
        block_n,
        warps,
        stages,
        blocks_per_multiprocessor: blocks,
        ..
    } = *options;
    let safe = if options.rows_guaranteed_safe { " safe" } else { "" };
    let prescale = if options.prescale_qk { " prescaled" } else { "" };
    let contiguous = if options.blocks_are_contiguous {
        " contiguous"
    } else {
        ""
    };
    let name = format!(
        "{kernel}<{head_dim}> {block_m}x{block_n} {warps} warps {stages} stages {blocks} blocks{safe}{prescale}{contiguous}"
    );
    // 32 rows of 128 elements a warp take every register; a few words spilled outside the loop cost nothing. What the user's
    // functions need comes on top.
    let own = functions.has_mask() || functions.has_score();
    let limits = Limits {
        spill_bytes: if own { 224 } else { 160 },
        stack_bytes: if own { 112 } else { 64 },
        ..Limits::registers(255)
    };
    with_functions(KernelSpec::new(name, source), functions)
        .define("HEAD_DIM", head_dim)
        .define("BLOCK_M", block_m)
        .define("BLOCK_N", block_n)
        .define("WARPS", warps)
        .define("STAGES", stages)
        .define("BLOCKS_PER_SM", blocks)
        .define("ROWS_SAFE", u8::from(options.rows_guaranteed_safe))
        .define("PRESCALE", u8::from(options.prescale_qk))
        .define("CONTIGUOUS", u8::from(options.blocks_are_contiguous))
        .entry(kernel, limits)
}

fn with_functions(mut spec: KernelSpec, functions: &Functions) -> KernelSpec {
    let text = Header {
        name: "mods_source.cuh".into(),
        text: functions.code().to_owned().into(),
    };
    let suffix = match (functions.has_mask(), functions.has_score()) {
        (false, false) => "",
        (true, false) => " mask function",
        (false, true) => " score function",
        (true, true) => " mask and score functions",
    };
    spec.name = format!("{}{suffix}", spec.name).into();
    spec.headers(headers())
        .headers([text])
        .define("HAS_MASK_MOD", u8::from(functions.has_mask()))
        .define("HAS_SCORE_MOD", u8::from(functions.has_score()))
}
