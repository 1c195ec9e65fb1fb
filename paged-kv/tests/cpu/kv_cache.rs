//! Storage: what is written is read back, nothing else changes, sizes are checked before memory is taken.

use paged_kv::{Error, KvCache, KvDtype, KvLayout, KvSlice, PageCopy, PageId, PageTable, PageTableConfig};

const LAYOUT: KvLayout = KvLayout {
    n_layers: 3,
    kv_heads: 2,
    head_dim: 5,
    n_pages: 6,
    page_size: 4,
    dtype: KvDtype::F32,
};

/// Distinct values that bf16 holds exactly: 8 bits of mantissa.
fn exact(n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| (i % 256) as f32 * if i % 512 < 256 { 1.0 } else { -0.5 })
        .collect()
}

fn all(cache: &KvCache) -> Vec<f32> {
    let layers = 0..cache.layout().n_layers;
    layers
        .map(|layer| cache.layer(layer).unwrap())
        .flat_map(|view| [view.k, view.v])
        .flat_map(|s| s.to_f32_vec())
        .collect()
}

#[test]
fn what_is_written_is_read_back_at_its_place_and_nowhere_else() {
    for dtype in [KvDtype::F32, KvDtype::Bf16] {
        let mut cache = KvCache::new(KvLayout { dtype, ..LAYOUT }).unwrap();
        let physical = [21, 4, 7, 20];
        let k = exact(4 * 2 * 5);
        let v: Vec<f32> = k.iter().map(|x| -x).collect();
        cache.write(1, &physical, &k, &v).unwrap();
        let view = cache.layer(1).unwrap();
        assert_eq!((view.k.dtype(), view.k.len()), (dtype, 2 * 24 * 5));
        for position in 0..24 {
            for head in 0..2 {
                let token = physical.iter().position(|&place| place == position);
                let expected = token.map_or([0.0; 5].as_slice(), |token| &k[(token * 2 + head) * 5..][..5]);
                let negated: Vec<f32> = expected.iter().map(|x| -x).collect();
                assert_eq!(view.key(head, position).unwrap().to_f32_vec(), expected);
                assert_eq!(view.value(head, position).unwrap().to_f32_vec(), negated);
                // The layout that kernels rely on.
                let offset = (head * 24 + position) * 5;
                assert_eq!(view.k.to_f32_vec()[offset..offset + 5], *expected);
                assert_eq!(cache.layout().offset(head, position), Some(offset as u64));
            }
        }
        for layer in [0, 2] {
            let view = cache.layer(layer).unwrap();
            assert!(
                view.k
                    .to_f32_vec()
                    .iter()
                    .chain(&view.v.to_f32_vec())
                    .all(|&x| x == 0.0)
            );
        }
        assert!(view.key(2, 0).is_none() && view.key(0, 24).is_none() && view.value(0, usize::MAX).is_none());
    }
}

#[test]
fn bf16_rounds_to_nearest_even_and_keeps_nan_and_infinity() {
    let layout = KvLayout {
        n_layers: 1,
        kv_heads: 1,
        head_dim: 6,
        n_pages: 1,
        page_size: 1,
        dtype: KvDtype::Bf16,
    };
    let mut cache = KvCache::new(layout).unwrap();
    let ulp = 2.0_f32.powi(-7);
    let values = [
        1.0 + ulp / 2.0,
        1.0 + 1.5 * ulp,
        1.0 + 0.51 * ulp,
        f32::INFINITY,
        f32::NAN,
        -0.0,
    ];
    cache.write(0, &[0], &values, &values).unwrap();
    let stored = cache.layer(0).unwrap().k.to_f32_vec();
    assert_eq!(stored[..4], [1.0, 1.0 + 2.0 * ulp, 1.0 + ulp, f32::INFINITY]);
    assert!(stored[4].is_nan());
    assert_eq!(stored[5].to_bits(), (-0.0_f32).to_bits());
}

#[test]
fn a_refused_write_or_copy_changes_nothing() {
    let mut cache = KvCache::new(LAYOUT).unwrap();
    cache.fill(3.0);
    let before = all(&cache);
    let row = vec![1.0; 10];
    assert_eq!(
        cache.write(3, &[0], &row, &row),
        Err(Error::NoSuchLayer {
            layer: 3,
            n_layers: 3
        })
    );
    assert_eq!(
        cache.layer(3).err(),
        Some(Error::NoSuchLayer {
            layer: 3,
            n_layers: 3
        })
    );
    assert_eq!(
        cache.write(0, &[0], &row[1..], &row),
        Err(Error::WrongLength {
            what: "k",
            actual: 9,
            expected: 10
        })
    );
    assert_eq!(
        cache.write(0, &[0], &row, &[]),
        Err(Error::WrongLength {
            what: "v",
            actual: 0,
            expected: 10
        })
    );
    let two = vec![1.0; 20];
    assert_eq!(
        cache.write(0, &[0, 24], &two, &two),
        Err(Error::NoSuchPosition {
            position: 24,
            n_positions: 24
        })
    );
    let good = PageCopy {
        src: PageId::new(1),
        dst: PageId::new(2),
        tokens: 4,
    };
    cache.fill_page(PageId::new(1), 3.0).unwrap();
    for (bad, error) in [
        (
            PageCopy {
                src: PageId::new(6),
                ..good
            },
            Error::NoSuchPage {
                page: PageId::new(6),
                n_pages: 6,
            },
        ),
        (
            PageCopy {
                dst: PageId::new(9),
                ..good
            },
            Error::NoSuchPage {
                page: PageId::new(9),
                n_pages: 6,
            },
        ),
        (
            PageCopy { tokens: 5, ..good },
            Error::CopyTooLong {
                tokens: 5,
                page_size: 4,
            },
        ),
    ] {
        assert_eq!(cache.copy_pages(&[good, bad]), Err(error));
    }
    assert!(cache.fill_page(PageId::new(6), 0.0).is_err());
    assert_eq!(all(&cache), before);
    cache.write(0, &[], &[], &[]).unwrap();
    assert_eq!(all(&cache), before);
}

#[test]
fn a_copy_moves_the_asked_tokens_of_every_layer_and_head_and_no_more() {
    for dtype in [KvDtype::F32, KvDtype::Bf16] {
        let mut cache = KvCache::new(KvLayout { dtype, ..LAYOUT }).unwrap();
        let places: Vec<usize> = (0..24).collect();
        for layer in 0..3 {
            let k: Vec<f32> = exact(24 * 10).iter().map(|x| x * (layer + 1) as f32).collect();
            let v: Vec<f32> = k.iter().map(|x| -x).collect();
            cache.write(layer, &places, &k, &v).unwrap();
        }
        let before = all(&cache);
        cache
            .copy_pages(&[PageCopy {
                src: PageId::new(2),
                dst: PageId::new(5),
                tokens: 3,
            }])
            .unwrap();
        let after = all(&cache);
        for (i, (&now, &was)) in after.iter().zip(&before).enumerate() {
            let (position, rest) = (i / 5 % 24, i % 5 + i / 120 * 120);
            let from = if (20..23).contains(&position) {
                rest + (position - 12) * 5
            } else {
                i
            };
            assert_eq!(
                now.to_bits(),
                before[from].to_bits(),
                "element {i}, position {position}, was {was}"
            );
        }
        assert_ne!(after, before);
    }
}

#[test]
fn copies_are_made_one_after_the_other() {
    let mut cache = KvCache::new(LAYOUT).unwrap();
    for page in 0..6 {
        cache.fill_page(PageId::new(page), page as f32).unwrap();
    }
    let copy = |src, dst| PageCopy {
        src: PageId::new(src),
        dst: PageId::new(dst),
        tokens: 4,
    };
    cache.copy_pages(&[copy(1, 2), copy(2, 3), copy(3, 3)]).unwrap();
    let view = cache.layer(2).unwrap();
    let first = |page: usize| view.key(1, page * 4).unwrap().to_f32_vec()[0];
    assert_eq!([0, 1, 2, 3, 4, 5].map(first), [0.0, 1.0, 1.0, 1.0, 4.0, 5.0]);
}

#[test]
fn copy_on_write_keeps_the_contents_of_both_sides() {
    let config = PageTableConfig {
        n_pages: 6,
        page_size: 4,
        n_slots: 3,
        max_pages_per_slot: 4,
    };
    let mut table = PageTable::new(config).unwrap();
    let mut cache = KvCache::new(LAYOUT).unwrap();
    cache.fill(f32::NAN);
    let mut write = |table: &mut PageTable, slot, tokens: &[f32]| {
        let start = table.len(slot).unwrap();
        let reservation = table.reserve(slot, start + tokens.len()).unwrap();
        cache.copy_pages(reservation.copy.as_slice()).unwrap();
        let mut places = Vec::new();
        table
            .write_positions(slot, start..start + tokens.len(), &mut places)
            .unwrap();
        let k: Vec<f32> = tokens.iter().flat_map(|&token| [token; 10]).collect();
        for layer in 0..3 {
            cache.write(layer, &places, &k, &k).unwrap();
        }
        table.advance(slot, tokens.len()).unwrap();
    };
    let parent = table.allocate_slot().unwrap();
    write(&mut table, parent, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let child = table.fork(parent).unwrap();
    write(&mut table, child, &[70.0, 80.0, 90.0]);
    write(&mut table, parent, &[7.0, 8.0, 9.0]);
    for (slot, expected) in [
        (parent, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]),
        (child, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 70.0, 80.0, 90.0]),
    ] {
        for (position, token) in expected.into_iter().enumerate() {
            let place = table.physical(slot, position).unwrap();
            for layer in 0..3 {
                let view = cache.layer(layer).unwrap();
                assert_eq!(view.key(1, place).unwrap().to_f32_vec(), [token; 5]);
                assert_eq!(view.value(0, place).unwrap().to_f32_vec(), [token; 5]);
            }
        }
    }
}

#[test]
fn bytes_of_the_published_qwen3_4b_shape() {
    let layout = KvLayout {
        n_layers: 36,
        kv_heads: 8,
        head_dim: 128,
        n_pages: 1_000,
        page_size: 128,
        dtype: KvDtype::Bf16,
    };
    assert_eq!(layout.bytes_per_token(), Ok(147_456));
    assert_eq!(layout.bytes_per_page(), Ok(147_456 * 128));
    assert_eq!(layout.bytes(), Ok(147_456 * 128_000));
    assert_eq!(
        KvLayout {
            dtype: KvDtype::F32,
            ..layout
        }
        .bytes(),
        Ok(2 * 147_456 * 128_000)
    );
    assert_eq!(layout.head_stride(), Ok(128_000 * 128));
    assert_eq!(layout.elements_per_layer(), Ok(8 * 128_000 * 128));
}

#[test]
fn offsets_past_two_to_the_31_elements_are_right() {
    let layout = KvLayout {
        n_layers: 64,
        kv_heads: 8,
        head_dim: 128,
        n_pages: 65_536,
        page_size: 128,
        dtype: KvDtype::Bf16,
    };
    // Past 2^32 as well: (7 * 8388608 + 8388607) * 128.
    assert_eq!(layout.offset(7, 8_388_607), Some(8_589_934_464));
    assert_eq!(layout.offset(8, 0), None);
    assert_eq!(layout.offset(0, 8_388_608), None);

    // The same in storage. Only the memory that is written is backed, so this takes a few pages, not 8 GiB.
    let layout = KvLayout {
        n_layers: 1,
        kv_heads: 3,
        head_dim: 128,
        n_pages: 43_691,
        page_size: 128,
        dtype: KvDtype::Bf16,
    };
    assert!(layout.elements_per_layer().unwrap() > 1 << 31);
    let mut cache = KvCache::new(layout).unwrap();
    let last = 43_691 * 128 - 1;
    let row = |start: f32| {
        (0..3 * 128)
            .map(|i| start + (i / 128) as f32)
            .collect::<Vec<f32>>()
    };
    cache
        .write(
            0,
            &[last, 0],
            &[row(10.0), row(20.0)].concat(),
            &[row(30.0), row(40.0)].concat(),
        )
        .unwrap();
    let copy = PageCopy {
        src: PageId::new(43_690),
        dst: PageId::new(43_689),
        tokens: 128,
    };
    cache.copy_pages(&[copy]).unwrap();
    let view = cache.layer(0).unwrap();
    assert_eq!(view.key(2, last).unwrap().to_f32_vec(), [12.0; 128]);
    assert_eq!(view.value(2, last).unwrap().to_f32_vec(), [32.0; 128]);
    assert_eq!(view.key(2, last - 128).unwrap().to_f32_vec(), [12.0; 128]);
    assert_eq!(view.key(1, 0).unwrap().to_f32_vec(), [21.0; 128]);
    assert_eq!(view.key(2, last - 1).unwrap().to_f32_vec(), [0.0; 128]);
    let KvSlice::Bf16(k) = view.k else {
        panic!("made as bf16")
    };
    assert_eq!(k[k.len() - 1].to_f32(), 12.0);
}

#[test]
fn a_cache_that_cannot_exist_is_refused_before_memory_is_taken() {
    for (layout, name) in [
        (
            KvLayout {
                n_layers: 0,
                ..LAYOUT
            },
            "n_layers",
        ),
        (
            KvLayout {
                kv_heads: 0,
                ..LAYOUT
            },
            "kv_heads",
        ),
        (
            KvLayout {
                head_dim: 0,
                ..LAYOUT
            },
            "head_dim",
        ),
        (KvLayout { n_pages: 0, ..LAYOUT }, "n_pages"),
        (
            KvLayout {
                page_size: 0,
                ..LAYOUT
            },
            "page_size",
        ),
    ] {
        assert!(matches!(KvCache::new(layout), Err(Error::OutOfRange { field, .. }) if field == name));
        assert!(matches!(layout.check(), Err(Error::OutOfRange { field, .. }) if field == name));
        assert_eq!(layout.offset(0, 0), None);
    }
    // A product that wraps to a small number in 64 bits.
    let wraps = KvLayout {
        n_layers: 1 << 32,
        kv_heads: 1 << 32,
        ..LAYOUT
    };
    assert_eq!(wraps.bytes(), Err(Error::SizeOverflow { what: "KV cache" }));
    assert_eq!(
        KvCache::new(wraps).err(),
        Some(Error::SizeOverflow { what: "KV cache" })
    );
    // Fits 64 bits, but no address space.
    let unaddressable = KvLayout {
        n_pages: 1 << 54,
        ..LAYOUT
    };
    assert_eq!(
        KvCache::new(unaddressable).err(),
        Some(Error::SizeOverflow { what: "KV cache" })
    );
    // Fits the address space of the type system, but no machine.
    let vast = KvLayout {
        n_pages: 1 << 48,
        ..LAYOUT
    };
    let bytes = vast.bytes().unwrap();
    assert_eq!(
        KvCache::new(vast).err(),
        Some(Error::OutOfMemory {
            what: "KV cache",
            bytes
        })
    );
    let many_layers = KvLayout {
        n_layers: 1 << 50,
        kv_heads: 1,
        head_dim: 1,
        n_pages: 1,
        page_size: 1,
        ..LAYOUT
    };
    assert!(matches!(
        KvCache::new(many_layers).err(),
        Some(Error::OutOfMemory { .. })
    ));
}
