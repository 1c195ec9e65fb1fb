//! `rollout quantize`, and what other commands make of its folder.

use crate::common::{adapter, assert_error, folder, run};

#[test]
fn a_folder_in_4_bits_is_written_read_and_never_put_over_files() {
    let dir = folder();
    let to = dir.path().join("nf4");
    let to = to.to_str().unwrap();
    let elsewhere = dir.path().join("elsewhere/below");
    let elsewhere = elsewhere.to_str().unwrap();
    let output = run(&["quantize", "--output", to, "--skip-module", "layers.3.mlp"]);
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    assert!(
        output.stdout.contains("25 modules in nf4, 3 in bf16"),
        "{}",
        output.stdout
    );
    let adapter = adapter("mult-r32");
    let generate = [
        "generate",
        "--device",
        "cpu",
        "--model",
        to,
        "--max-new-tokens",
        "3",
    ];
    for extra in [
        &[][..],
        &["--adapter", &adapter],
        &["--adapter", &adapter, "--dequantize"],
    ] {
        let output = run(&[&generate[..], extra].concat());
        assert!(
            output.code == Some(0) && !output.stdout.is_empty(),
            "{}",
            output.stderr
        );
    }
    let inspect = run(&["inspect", "--model", to]);
    assert!(
        inspect.stdout.contains("25 of 28 modules in 4 bits"),
        "{}",
        inspect.stdout
    );
    for (args, words) in [
        (vec!["quantize", "--output", to], ["--output", "holds files"]),
        (
            vec!["quantize", "--output", elsewhere, "--skip-module", "proj"],
            ["--skip-module", "proj"],
        ),
        (
            vec!["quantize", "--output", elsewhere, "--model", to],
            ["--model", "already"],
        ),
    ] {
        assert_error(&run(&args), 2, &words, args[0]);
    }
}
