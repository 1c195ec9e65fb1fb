//! Products by the kernel of this crate, in place of cuBLASLt.

use cuda_graphs::{
    Capture, Compiler, DeviceBuffer, Error, Matmul, MatmulDims, MatmulReport, Stream, cases, few_cases,
};
use half::bf16;

use crate::matmul::{case, check, pieces, random};
use crate::support::{numbers, stream};

fn plain(stream: &Stream) -> Matmul {
    let matmul = Matmul::plain(stream, &Compiler::new().unwrap()).unwrap();
    assert_eq!(matmul.library_version(), None);
    matmul
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn any_shape_is_right() {
    let stream = stream();
    let matmul = plain(&stream);
    // Tiles that are not full in any direction, sums shorter than a step, odd rows whose elements lie at odd addresses.
    let mut shapes = vec![
        (1, 1),
        (64, 64),
        (65, 33),
        (571, 256),
        (127, 8),
        (63, 31),
        (300, 1000),
    ];
    let drawn: Vec<usize> = numbers(fresh_seed(), 20)
        .map(|x| 1 + (x.abs() * 700.0) as usize)
        .collect();
    shapes.extend(drawn.chunks_exact(2).map(|pair| (pair[0], pair[1])));
    if !few_cases() {
        shapes.push((6144, 2560));
    }
    for (n, k) in cases(shapes) {
        for m in cases([1, 2, 16, 17, 63, 64, 65, 200]) {
            let dims = MatmulDims { m, n, k };
            let residual = m % 2 == 1;
            case::<f32>(&stream, &matmul, dims, residual, |x| x, 0.0);
            case::<bf16>(&stream, &matmul, dims, residual, bf16::from_f32, 2f64.powi(-8));
        }
    }
    for m in [1, 8, 65, 300] {
        pieces::<f32>(&stream, &matmul, m, 0.0);
        pieces::<bf16>(&stream, &matmul, m, 2f64.powi(-8));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_row_depends_on_itself_alone_also_in_a_graph_that_saw_the_shape_never_before() {
    let stream = stream();
    let matmul = plain(&stream);
    assert_eq!(matmul.padded_rows(37), 37);
    let (n, k) = (200, 168);
    let w = DeviceBuffer::from_slice(&stream, &random(1, n * k)).unwrap();
    let rows = random(2, 300 * k);
    let x = DeviceBuffer::from_slice(&stream, &rows).unwrap();
    let all = DeviceBuffer::<f32>::filled_with_bytes(stream.device(), 300 * n, 0xff).unwrap();
    let dims = |m| MatmulDims { m, n, k };
    let report = matmul.prepare::<f32>(dims(300), &w, true).unwrap();
    assert_eq!(report, MatmulReport::default(), "nothing is chosen");
    let capture = Capture::begin(&stream).unwrap();
    matmul.multiply(dims(300), &x, &w, &all, None).unwrap();
    let graph = capture.finish().unwrap();
    graph.launch(&stream).unwrap();
    let all = stream.download(&all).unwrap();
    check(dims(300), &rows, &stream.download(&w).unwrap(), None, &all, 0.0);
    for (first, m) in [(0, 1), (5, 3), (64, 64), (100, 200), (299, 1)] {
        let x = DeviceBuffer::from_slice(&stream, &rows[first * k..(first + m) * k]).unwrap();
        // The residual is the output itself.
        let y = DeviceBuffer::<f32>::zeroed(stream.device(), m * n).unwrap();
        matmul.multiply(dims(m), &x, &w, &y, Some(y.as_slice())).unwrap();
        let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|x| x.to_bits()).collect() };
        let got = stream.download(&y).unwrap();
        assert!(
            bits(&got) == bits(&all[first * n..(first + m) * n]),
            "{m} rows from {first}"
        );
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_the_kernel_cannot_address_is_refused() {
    let stream = stream();
    let matmul = plain(&stream);
    let buffer = |len| DeviceBuffer::<bf16>::zeroed(stream.device(), len).unwrap();
    // Rows of one element: more tiles than a grid has.
    let m = 64 * 65_535 + 1;
    let refused = matmul.multiply(
        MatmulDims { m, n: 1, k: 1 },
        &buffer(m),
        &buffer(1),
        &buffer(m),
        None,
    );
    let Err(Error::InvalidArgument { what: "product", why }) = refused else {
        panic!("{refused:?}");
    };
    assert!(why.contains("rows"), "{why}");
}

/// Another for every run, and printed.
fn fresh_seed() -> u64 {
    let seed = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(1, |now| now.as_nanos() as u64);
    println!("seed {seed}");
    seed
}
