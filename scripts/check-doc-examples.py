#!/usr/bin/env python3
"""Every public type stands in an example that is compiled as a test of the documentation.

Collects the public structs, enums, traits and type aliases of each crate (the lint `unreachable_pub` makes sure that what
is called `pub` can be reached) and the Rust code of the documentation: of doc comments and of the crate's README, which is
part of it. A type must have an example of its own, or be named in another one of its crate. Modules that are hidden from the
documentation, and traits that seal others, are left out.

    scripts/check-doc-examples.py
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CRATES = ["paged-kv", "block-mask", "cuda-graphs", "lora-merge", "qwen3-model", "rollout-engine"]
HIDDEN = re.compile(r"#\[doc\(hidden\)\]\n(?:#\[[^\n]*\]\n)*pub mod (\w+);")
TYPE = re.compile(r"^\s*pub (?:unsafe )?(?:struct|enum|trait|union|type) ([A-Z]\w*)", re.M)
# What follows the quotes of a block of Rust. Ignored blocks are not compiled.
RUST = re.compile(r"^(rust|no_run|should_panic|compile_fail|edition\d+|,|\s)*$")


def blocks(lines):
    """Code of the Rust blocks in some lines of documentation."""
    inside, code = None, []
    for line in lines:
        text = line.strip()
        if text.startswith("```"):
            if inside is None:
                inside = bool(RUST.match(text[3:]))
            else:
                inside = None
        elif inside:
            code.append(text)
    return "\n".join(code)


def own_documentation(lines, number):
    """The doc comment above a line, past attributes."""
    comment = []
    while number > 0 and re.match(r"\s*(///|#|\)|[^/]*\)\]$)", lines[number - 1]):
        number -= 1
        comment.insert(0, re.sub(r"^\s*///? ?", "", lines[number]) if "///" in lines[number] else "")
    return comment


def main():
    missing, total = [], 0
    for crate in CRATES:
        source_dir = ROOT / crate / "src"
        hidden = {"bin", *HIDDEN.findall((source_dir / "lib.rs").read_text())}
        types, documented = {}, set()
        code = blocks((ROOT / crate / "README.md").read_text().splitlines())
        for path in sorted(source_dir.rglob("*.rs")):
            if hidden & {part.removesuffix(".rs") for part in path.relative_to(source_dir).parts[:1]}:
                continue
            source = path.read_text()
            lines = source.splitlines()
            code += "\n" + blocks(re.findall(r"^\s*//[/!] ?(.*)$", source, re.M))
            tests = source.find("#[cfg(test)]\nmod ")
            for match in TYPE.finditer(source[: tests if tests >= 0 else None]):
                name, number = match.group(1), source.count("\n", 0, match.start(1))
                if name == "Sealed" or "#[doc(hidden)]" in lines[max(0, number - 3) : number]:
                    continue
                types[name] = f"{path.relative_to(ROOT)}:{number + 1}"
                if blocks(own_documentation(lines, number)):
                    documented.add(name)
        documented |= set(re.findall(r"\w+", code))
        total += len(types)
        missing += [f"{place}: {name} is in no example" for name, place in types.items() if name not in documented]
    for line in missing:
        print(line, file=sys.stderr)
    print(f"{total} public types, {len(missing)} in no example")
    sys.exit(1 if missing else 0)


main()
