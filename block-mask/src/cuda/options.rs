//! What can be tuned, and what is refused.

mod decode;
mod tiles;

use super::CudaError;

pub(crate) use decode::DECODE_FORMS;
pub use decode::DecodeOptions;
pub use tiles::TileOptions;

/// In a cache that is paged by a table, which changes while sequences grow, nothing can be said of the pages ahead.
pub(super) fn refuse_contiguous(asked: Option<bool>) -> Result<(), CudaError> {
    match asked {
        Some(true) => Err(CudaError::OptionRefused {
            option: "blocks_are_contiguous",
            why: "pages of sequences that grow in turns are not; FlexAttention takes it for masks that are checked"
                .to_owned(),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use cuda_graphs::DeviceInfo;

    use super::*;
    use crate::cuda::AttentionShape;

    fn device(per_block: usize, per_multiprocessor: usize) -> DeviceInfo {
        DeviceInfo {
            ordinal: 0,
            name: "a device".to_owned(),
            compute_capability: (8, 0),
            multiprocessors: 100,
            l2_bytes: 40 << 20,
            shared_bytes_per_block: per_block,
            shared_bytes_per_multiprocessor: per_multiprocessor,
            registers_per_multiprocessor: 65_536,
            threads_per_multiprocessor: 2048,
            memory_bytes: 40 << 30,
            driver_version: 13_000,
        }
    }

    fn shape(group: usize, head_dim: usize) -> AttentionShape {
        AttentionShape {
            heads: group,
            kv_heads: 1,
            head_dim,
            page_size: 16,
            n_pages: 10,
        }
    }

    #[test]
    fn the_default_rings_fit_every_device_for_every_group() {
        // Kilobytes per block and per multiprocessor of compute capability 9.0, 8.0, and 8.6, 8.9 and 12.0.
        for (per_block, per_multiprocessor) in [(227, 228), (163, 164), (99, 100)] {
            let info = device(per_block << 10, per_multiprocessor << 10);
            for group in 1..=16 {
                for head_dim in [64, 128] {
                    let shape = shape(group, head_dim);
                    let options = DecodeOptions::for_device(&info, &shape);
                    options.check().unwrap();
                    let bytes = options.shared_bytes(&shape);
                    assert!(
                        bytes <= info.shared_bytes_per_block,
                        "{options:?} takes {bytes} bytes"
                    );
                    let together = options.in_fixed_splits(1000).for_tokens_together();
                    together.check().unwrap();
                    let (bytes, blocks) = (together.shared_bytes(&shape), together.blocks_per_multiprocessor);
                    assert!(
                        bytes <= info.shared_bytes_per_block
                            && (bytes + 1024) * blocks <= info.shared_bytes_per_multiprocessor,
                        "{together:?} takes {bytes} bytes"
                    );
                }
                let tiles = TileOptions::default();
                assert!(tiles.shared_bytes(&shape(group, 128)) <= info.shared_bytes_per_block);
            }
        }
        let h200 = device(227 << 10, 228 << 10);
        let (warps, stages, blocks) = DECODE_FORMS[0];
        let expected = DecodeOptions::of(warps, stages, blocks);
        assert_eq!(DecodeOptions::for_device(&h200, &shape(4, 128)), expected);
    }

    #[test]
    fn decode_options_that_cannot_run_are_refused_by_name() {
        let good = DecodeOptions::of(4, 3, 2);
        let refused = |options: DecodeOptions| match options.check() {
            Err(CudaError::OptionRefused { option, .. }) => option,
            other => panic!("{options:?} gave {other:?}"),
        };
        assert!(good.check().is_ok());
        assert_eq!(refused(DecodeOptions { warps: 3, ..good }), "warps");
        assert_eq!(refused(DecodeOptions { stages: 1, ..good }), "stages");
        assert_eq!(
            refused(DecodeOptions {
                blocks_per_multiprocessor: 0,
                ..good
            }),
            "blocks_per_multiprocessor"
        );
        assert_eq!(
            refused(DecodeOptions {
                split: Some(100),
                ..good
            }),
            "split"
        );
        assert_eq!(
            refused(DecodeOptions {
                split: Some(0),
                ..good
            }),
            "split"
        );
        assert_eq!(
            refused(DecodeOptions {
                max_splits: 0,
                ..good
            }),
            "max_splits"
        );
    }

    #[test]
    fn tokens_together_need_splits_that_hold_the_longest_row_and_no_functions() {
        let options = DecodeOptions::of(4, 3, 2)
            .in_fixed_splits(5000)
            .for_tokens_together();
        assert_eq!((options.split, options.max_splits), (Some(1024), 5));
        assert_eq!(
            options.check_together(true, &shape(4, 128), 5000).unwrap(),
            8,
            "rows of an item"
        );
        assert_eq!(options.check_together(true, &shape(16, 128), 5000).unwrap(), 2);
        let refused = |plain, max_length| {
            let error = options.check_together(plain, &shape(4, 128), max_length);
            matches!(
                error,
                Err(CudaError::OptionRefused {
                    option: "together",
                    ..
                })
            )
        };
        assert!(refused(false, 5000) && refused(true, 5121));
        let given = DecodeOptions {
            split: Some(512),
            ..DecodeOptions::of(4, 3, 2)
        };
        let options = given.in_fixed_splits(5000);
        assert_eq!((options.split, options.max_splits), (Some(512), 10));
        let long = DecodeOptions::of(4, 3, 2).in_fixed_splits(1 << 20);
        assert_eq!((long.split, long.max_splits), (Some(4096), 256));
        assert_eq!(
            DecodeOptions::of(8, 2, 2)
                .for_tokens_together()
                .blocks_per_multiprocessor,
            1
        );
    }

    #[test]
    fn prescaling_is_possible_only_where_it_is_exact() {
        let options = TileOptions {
            prescale_qk: true,
            ..TileOptions::default()
        };
        assert!(options.check(&shape(4, 64), 0.125).is_ok());
        assert!(options.check(&shape(4, 64), 2.0).is_ok());
        for scale in [0.088_388_35, 0.3, 0.125_000_01] {
            let refused = options.check(&shape(4, 128), scale);
            assert!(
                matches!(
                    refused,
                    Err(CudaError::OptionRefused {
                        option: "prescale_qk",
                        ..
                    })
                ),
                "{scale}"
            );
        }
    }

    #[test]
    fn warpgroup_products_are_for_one_capability_and_one_form() {
        let mut info = device(227 << 10, 228 << 10);
        assert_eq!(TileOptions::for_device(&info), TileOptions::default());
        let options = TileOptions::warpgroups();
        assert!(options.check_device(&info).is_err());
        info.compute_capability = (9, 0);
        assert_eq!(TileOptions::for_device(&info), options);
        assert!(options.check_device(&info).is_ok());
        for head_dim in [64, 128] {
            let shape = shape(4, head_dim);
            assert!(options.check(&shape, 0.1).is_ok());
            assert!(options.shared_bytes(&shape) <= info.shared_bytes_per_block);
        }
        assert_eq!(options.threads(), 384);
        for wrong in [
            TileOptions {
                block_m: 64,
                warps: 4,
                ..options
            },
            TileOptions {
                block_n: 32,
                ..options
            },
            TileOptions { warps: 4, ..options },
            TileOptions { stages: 1, ..options },
            TileOptions {
                blocks_per_multiprocessor: 2,
                ..options
            },
            TileOptions {
                prescale_qk: true,
                ..options
            },
        ] {
            let refused = wrong.check(&shape(4, 64), 0.125);
            assert!(
                matches!(
                    refused,
                    Err(CudaError::OptionRefused {
                        option: "warpgroup_products",
                        ..
                    })
                ),
                "{wrong:?}"
            );
        }
    }

    #[test]
    fn shapes_without_a_kernel_are_refused() {
        let good = shape(4, 128);
        assert!(good.check().is_ok());
        for wrong in [
            AttentionShape { head_dim: 96, ..good },
            AttentionShape { page_size: 8, ..good },
            AttentionShape {
                page_size: 48,
                ..good
            },
            AttentionShape {
                page_size: 512,
                ..good
            },
            AttentionShape { kv_heads: 0, ..good },
            AttentionShape { heads: 17, ..good },
            AttentionShape {
                heads: 5,
                kv_heads: 2,
                ..good
            },
            AttentionShape {
                n_pages: 1 << 28,
                ..good
            },
        ] {
            assert!(
                matches!(wrong.check(), Err(CudaError::Unsupported { .. })),
                "{wrong:?}"
            );
        }
    }

    #[test]
    fn few_rows_are_cut_finely_and_many_coarsely() {
        let mut options = DecodeOptions::of(4, 3, 2);
        let splits = [1, 4, 5, 8, 9, 16, 17, 128].map(|rows| options.split_for(rows, 8, 264));
        assert_eq!(splits, [128, 128, 256, 256, 512, 512, 1024, 1024]);
        assert_eq!(options.smallest_split(), splits[0]);
        assert_eq!(options.split_for(0, 8, 264), 128);
        assert_eq!(options.split_for(usize::MAX, 8, 264), 1024);
        options.split = Some(64);
        assert_eq!([1, 128].map(|rows| options.split_for(rows, 8, 264)), [64, 64]);
        assert_eq!(options.smallest_split(), 64);
        options.split = Some(40);
        assert!(matches!(
            options.check(),
            Err(CudaError::OptionRefused { option: "split", .. })
        ));
    }

    #[test]
    fn given_options_replace_the_devices_and_contradictions_are_refused() {
        let mut info = device(227 << 10, 228 << 10);
        info.compute_capability = (9, 0);
        let decode = |text: &str| DecodeOptions::of(4, 3, 2).with(&text.parse().unwrap());
        let options = decode("{\"warps\": 2, \"split_kv\": 64, \"max_splits\": 8}").unwrap();
        let expected = DecodeOptions {
            warps: 2,
            split: Some(64),
            max_splits: 8,
            ..DecodeOptions::of(4, 3, 2)
        };
        assert_eq!(options, expected);
        let prefill = |text: &str| TileOptions::for_prefill(&info, &text.parse().unwrap());
        assert_eq!(prefill("{}").unwrap(), TileOptions::warpgroups());
        for (text, expected) in [
            ("{\"kernel\": \"mma\"}", TileOptions::default()),
            ("{\"USE_TMA\": false}", TileOptions::default()),
            (
                "{\"use_tma\": true, \"kernel\": \"wgmma\"}",
                TileOptions::warpgroups(),
            ),
        ] {
            assert_eq!(prefill(text).unwrap(), expected, "{text}");
        }
        let narrow = prefill("{\"kernel\": \"mma\", \"BLOCK_M\": 64, \"num_stages\": 2}").unwrap();
        assert_eq!(
            (narrow.block_m, narrow.stages, narrow.warpgroup_products),
            (64, 2, false)
        );
        for (refused, name) in [
            (
                prefill("{\"kernel\": \"mma\", \"use_tma\": true}").map(drop),
                "use_tma",
            ),
            (
                prefill("{\"BLOCKS_ARE_CONTIGUOUS\": true}").map(drop),
                "blocks_are_contiguous",
            ),
            (
                decode("{\"blocks_are_contiguous\": true}").map(drop),
                "blocks_are_contiguous",
            ),
        ] {
            match refused {
                Err(CudaError::OptionRefused { option, .. }) => assert_eq!(option, name),
                other => panic!("{name}: {other:?}"),
            }
        }
        assert!(decode("{\"blocks_are_contiguous\": false}").is_ok());
    }
}
